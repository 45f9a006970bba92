"""What really moves data under a group of ours: gloo, NCCL, or nothing at all (echo).

A transport is formed once and never re-used: after a fault it is halted, buried, and another one is formed.
"""

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from regrow.comm import private, sockets
from regrow.comm.private import ProcessGroup, Store, Work
from regrow.core.errors import DeadlineExceeded, GenerationHalted

FORM_S = 60.0
RUN = timedelta(minutes=30)


class Transport(Protocol):
    """One group of one generation."""

    def form(self, deadline: float) -> None:
        """Connect to all peers. Raises `GenerationHalted` when halted meanwhile, `DeadlineExceeded` when too slow."""
        ...

    def call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run one method of a process group by name."""
        ...

    def halt(self) -> None:
        """End everything that is blocked in this transport, from any thread, at once."""
        ...

    def broke(self) -> bool:
        """Whether a collective of this transport has failed."""
        ...

    def bury(self) -> bool:
        """Free what it holds, if nothing runs in it any more; whether it is free."""
        ...


class GlooTransport:
    """Gloo over TCP from one host address."""

    def __init__(self, store: Store, rank: int, size: int, *, host: str, spare_ports: frozenset[int]) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self._host, self._spare_ports = host, spare_ports
        self._group: ProcessGroup | None = None
        self._backend: private.ProcessGroupGloo | None = None
        self._before: frozenset[tuple[int, int]] = frozenset()
        self._own: frozenset[tuple[int, int]] = frozenset()
        self._done = threading.Event()
        self._halted = False
        self._error: BaseException | None = None
        self._running: deque[Work] = deque()
        self.failed = False

    def form(self, deadline: float) -> None:
        self._before = sockets.open_sockets()
        # In a thread of its own, so that a halt need not wait until gloo gives up on a dead peer.
        threading.Thread(target=self._connect, args=(deadline,), name="regrow-form", daemon=True).start()
        if not self._done.wait(deadline + 5.0):
            raise DeadlineExceeded(f"no gloo group of {self._size} within {deadline:.0f} s", hint="is a peer hung?")
        if self._halted:
            raise GenerationHalted("halted while its groups were formed")
        if self._error is not None:
            raise self._error

    def _connect(self, deadline: float) -> None:
        try:
            backend = private.gloo_backend(
                self._store, self._rank, self._size, self._host, timedelta(seconds=deadline), RUN
            )
            group = private.inner_group(self._store, self._rank, self._size)
            private.register_gloo(group, backend, ("cpu",))
            self._own = sockets.open_sockets() - self._before
            self._backend, self._group = backend, group
            if self._halted:
                self._shut(self._own)
        except Exception as error:  # noqa: BLE001  torch raises RuntimeError and its own kinds; all are handed to form()
            self._error = error
        finally:
            self._done.set()

    def call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self._group is None:
            raise GenerationHalted("this group's generation is over")
        try:
            result = getattr(self._group, name)(*args, **options)
        except RuntimeError:
            self.failed = True
            raise
        if isinstance(result, Work):
            self._settle()
            self._running.append(result)
        return result

    def _settle(self) -> None:
        """Let go of finished work, oldest first; remember whether some of it failed."""
        while self._running and self._running[0].is_completed():
            self._judge(self._running.popleft())

    def _judge(self, work: Work) -> None:
        try:
            work.wait()
        except RuntimeError:
            self.failed = True

    def broke(self) -> bool:
        """Whether a collective of this transport has failed so far."""
        for work in [work for work in self._running if work.is_completed()]:
            self._judge(work)
        return self.failed

    def halt(self) -> None:
        self._halted = True
        if self._group is not None:
            self._shut(self._own)
        else:
            self._shut(sockets.open_sockets() - self._before)
        self._done.set()

    def _shut(self, which: frozenset[tuple[int, int]]) -> None:
        sockets.shut(which, host=self._host, spare_ports=self._spare_ports)

    def bury(self) -> bool:
        # Destroying a gloo group joins its threads; with work still running in them that can deadlock on the GIL.
        self._settle()
        if self._running or not self._done.is_set() or (self._group is None and self._error is None):
            return False
        self._group = self._backend = None
        return True


class EchoTransport:
    """Answers every collective locally, as if all ranks had the caller's data.

    So a worker can build its model and rehearse alone: what it computes is overwritten when it is admitted. For a world of
    one the answers are exact.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._answers: dict[str, Callable[..., Any]] = {
            "allgather": _fill_lists,
            "allgather_coalesced": _fill_lists,
            "_allgather_base": self._gather_base,
            "all_gather_single": self._gather_base,
            "allgather_into_tensor_coalesced": _each(self._gather_base),
            "gather": _fill_lists,
            "reduce_scatter": _take_first,
            "_reduce_scatter_base": self._scatter_base,
            "reduce_scatter_single": self._scatter_base,
            "reduce_scatter_tensor_coalesced": _each(self._scatter_base),
            "scatter": _take_first,
            "alltoall": _copy_lists,
            "alltoall_base": _copy_base,
            "all_to_all_single": _copy_base,
        }

    def form(self, deadline: float) -> None:
        """Nothing to connect."""

    def call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        answer = self._answers.get(name)
        if answer is not None:
            answer(*args)
        return private.finished_work([args[0]] if args else [])

    def broke(self) -> bool:
        """Nothing can fail."""
        return False

    def halt(self) -> None:
        """Nothing blocks."""

    def bury(self) -> bool:
        return True

    def _gather_base(self, output: Any, given: Any, *_: Any) -> None:
        output.view(self._size, -1).copy_(given.reshape(1, -1).expand(self._size, -1))

    def _scatter_base(self, output: Any, given: Any, *_: Any) -> None:
        output.view(-1).copy_(given.reshape(self._size, -1)[0])


def _each(answer: Callable[..., None]) -> Callable[..., None]:
    def answer_all(outputs: list[Any], given: list[Any], *_: Any) -> None:
        for output, source in zip(outputs, given, strict=True):
            answer(output, source)

    return answer_all


def _fill_lists(outputs: list[list[Any]], given: list[Any], *_: Any) -> None:
    for output, source in zip(outputs, given, strict=False):
        for tensor in output:
            tensor.copy_(source)


def _take_first(outputs: list[Any], given: list[list[Any]], *_: Any) -> None:
    for output, sources in zip(outputs, given, strict=False):
        output.copy_(sources[0])


def _copy_lists(outputs: list[Any], given: list[Any], *_: Any) -> None:
    for output, source in zip(outputs, given, strict=True):
        output.copy_(source)


def _copy_base(output: Any, given: Any, *_: Any) -> None:
    if output.numel() == given.numel():
        output.view(-1).copy_(given.reshape(-1))
