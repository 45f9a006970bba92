"""Collectives answered locally."""

from collections.abc import Callable
from typing import Any

from regrow.comm.transport import finished_work
from regrow.core.ids import Seconds


class EchoTransport:
    """Answers every collective locally, as if all ranks had the caller's data.

    So a worker can build its model and rehearse alone: what it computes is overwritten when it is admitted. For a
    world of one the answers are exact.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._answers: dict[str, Callable[..., Any]] = {
            "allgather": _fill_lists,
            "allgather_coalesced": _fill_rows,
            "_allgather_base": self._gather_base,
            "all_gather_single": self._gather_base,
            "allgather_into_tensor_coalesced": _pairwise(self._gather_base),
            "all_gather_single_coalesced": _pairwise(self._gather_base),
            "gather": _fill_lists,
            "reduce_scatter": _take_first,
            "_reduce_scatter_base": self._scatter_base,
            "reduce_scatter_single": self._scatter_base,
            "reduce_scatter_tensor_coalesced": _pairwise(self._scatter_base),
            "reduce_scatter_single_coalesced": _pairwise(self._scatter_base),
            "scatter": _take_first,
            "alltoall": _copy_lists,
            "alltoall_base": _copy_base,
            "all_to_all_single": _copy_base,
        }

    def form(self, deadline: Seconds) -> None:
        """Nothing to connect."""

    def call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Answer one method; the work it returns is done."""
        answer = self._answers.get(name)
        if answer is not None:
            answer(*args)
        return finished_work(args[0] if args else [])

    def broke(self) -> bool:
        """Nothing can fail."""
        return False

    def halt(self) -> None:
        """Nothing blocks."""

    def close(self) -> None:
        """Nothing to free."""

    def _gather_base(self, output: Any, given: Any, *_: Any) -> None:
        output.copy_(given.reshape(1, -1).expand(self._size, -1).reshape(output.shape))

    def _scatter_base(self, output: Any, given: Any, *_: Any) -> None:
        output.copy_(given.reshape(self._size, -1)[0].reshape(output.shape))


def _pairwise(answer: Callable[..., None]) -> Callable[..., None]:
    def answer_all(outputs: list[Any], given: list[Any], *_: Any) -> None:
        for output, source in zip(outputs, given, strict=True):
            answer(output, source)

    return answer_all


def _fill_lists(outputs: list[list[Any]], given: list[Any], *_: Any) -> None:
    for output, source in zip(outputs, given, strict=False):
        for tensor in output:
            tensor.copy_(source)


def _fill_rows(outputs: list[list[Any]], given: list[Any], *_: Any) -> None:
    for row in outputs:
        for tensor, source in zip(row, given, strict=True):
            tensor.copy_(source)


def _take_first(outputs: list[Any], given: list[list[Any]], *_: Any) -> None:
    for output, sources in zip(outputs, given, strict=False):
        output.copy_(sources[0])


def _copy_lists(outputs: list[Any], given: list[Any], *_: Any) -> None:
    for output, source in zip(outputs, given, strict=True):
        output.copy_(source)


def _copy_base(output: Any, given: Any, *_: Any) -> None:
    if output.numel() == given.numel():
        output.copy_(given.reshape(output.shape))
