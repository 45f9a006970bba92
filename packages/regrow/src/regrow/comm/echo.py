"""Transport that answers collectives locally."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from regrow.comm.echo_objects import answer_special
from regrow.comm.torch_private.internals import Work
from regrow.comm.work import finished_work
from regrow.core.errors import CollectiveMisuse
from regrow.core.ids import Seconds


class EchoTransport:
    """Answers every collective locally, as if all ranks had the caller's data.

    A worker can thus build its model and rehearse alone: the results are overwritten when it joins the training. Shapes
    are right. Data that only a peer has (a received activation, a part of a root's tensor) is zero; Python objects are
    the caller's own. For a world of one rank the answers are exact.

    Args:
        rank: the caller's rank in the group.
        size: number of ranks in the group.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._answers: dict[str, Callable[..., Any]] = {
            "broadcast": self._broadcast,
            "allgather": _fill_lists,
            "allgather_coalesced": _fill_rows,
            "_allgather_base": self._gather_base,
            "all_gather_single": self._gather_base,
            "allgather_into_tensor_coalesced": _pairwise(self._gather_base),
            "all_gather_single_coalesced": _pairwise(self._gather_base),
            "gather": _fill_lists,
            "reduce_scatter": self._take_own,
            "_reduce_scatter_base": self._scatter_base,
            "reduce_scatter_single": self._scatter_base,
            "reduce_scatter_tensor_coalesced": _pairwise(self._scatter_base),
            "reduce_scatter_single_coalesced": _pairwise(self._scatter_base),
            "scatter": self._take_own,
            "alltoall": _pairwise(_fit),
            "alltoall_base": _fit,
            "all_to_all_single": _fit,
            "recv": _receive,
            "recv_anysource": _receive,
        }

    def form(self, deadline: Seconds) -> None:
        """Does nothing: there are no peers to connect to."""

    def call(
        self, name: str, args: tuple[Any, ...], options: dict[str, Any], done: Callable[[], None] | None = None
    ) -> Any:
        """Answer one method with finished work. Raises `UsageError` if no local answer can be right."""
        answer = self._answers.get(name)
        if answer is not None:
            with torch.no_grad():
                answer(*args, **options)
        if done is not None:
            done()
        result = args[0] if args else []
        if isinstance(result, torch.Tensor):
            result = [result]
        # A receive from any source must report a rank other than the caller's.
        return finished_work(result if isinstance(result, list) else [], source=0 if self._rank else self._size - 1)

    def broke(self) -> bool:
        """False: no local answer can fail."""
        return False

    def misuse(self) -> CollectiveMisuse | None:
        """None: no local answer can fail."""
        return None

    def set_timeout(self, seconds: Seconds) -> None:
        """Does nothing: local answers take no time."""

    def start_coalescing(self, device: torch.device) -> bool:
        """False: each call is answered at once."""
        return False

    def end_coalescing(self, device: torch.device) -> Work | None:
        """None: no calls were coalesced."""
        return None

    def give_up_coalescing(self) -> None:
        """Does nothing: no calls were coalesced."""

    def halt(self) -> None:
        """Does nothing: no local answer blocks."""

    def close(self) -> None:
        """Does nothing: there is nothing to free."""

    def _broadcast(self, tensors: list[torch.Tensor], opts: Any = None, **_: Any) -> None:
        if opts is not None and opts.rootRank != self._rank:
            for tensor in tensors:
                answer_special(tensor)

    def _gather_base(self, output: torch.Tensor, given: torch.Tensor, *_: Any, **__: Any) -> None:
        output.copy_(given.reshape(1, -1).expand(self._size, -1).reshape(output.shape))

    def _scatter_base(self, output: torch.Tensor, given: torch.Tensor, *_: Any, **__: Any) -> None:
        output.copy_(given.reshape(self._size, -1)[self._rank].reshape(output.shape))

    def _take_own(
        self, outputs: list[torch.Tensor], given: Sequence[Sequence[torch.Tensor]], *_: Any, **__: Any
    ) -> None:
        for at, output in enumerate(outputs):
            if at < len(given):
                output.copy_(given[at][self._rank])
            elif not answer_special(output):
                output.zero_()


def _pairwise(answer: Callable[..., None]) -> Callable[..., None]:
    def answer_all(outputs: list[torch.Tensor], given: list[torch.Tensor], *_: Any, **__: Any) -> None:
        for output, source in zip(outputs, given, strict=True):
            answer(output, source)

    return answer_all


def _fill_lists(outputs: list[list[torch.Tensor]], given: list[torch.Tensor], *_: Any, **__: Any) -> None:
    for output, source in zip(outputs, given, strict=False):
        for tensor in output:
            _fit(tensor, source)


def _fill_rows(outputs: list[list[torch.Tensor]], given: list[torch.Tensor], *_: Any, **__: Any) -> None:
    for row in outputs:
        for tensor, source in zip(row, given, strict=True):
            _fit(tensor, source)


def _receive(tensors: list[torch.Tensor], *_: Any, **__: Any) -> None:
    for tensor in tensors:
        if not answer_special(tensor):
            tensor.zero_()


def _fit(output: torch.Tensor, given: torch.Tensor, *_: Any, **__: Any) -> None:
    """Copy the elements of `given` that fit into `output`; the rest becomes zero, in place of a peer's data."""
    if output.numel() == given.numel():
        output.copy_(given.reshape(output.shape))
        return
    count = min(output.numel(), given.numel())
    flat = torch.zeros(output.numel(), dtype=output.dtype, device=output.device)
    flat[:count] = given.reshape(-1)[:count]
    output.copy_(flat.view(output.shape))
