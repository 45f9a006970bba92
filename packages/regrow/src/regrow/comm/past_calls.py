"""Collectives between two steps: recorded when they are answered, and repeated for a worker that gets there later.

The new worker of a replaced rank runs alone the code that the others have run since the last step. Local answers would
be its own data, so it gets the recorded answers of the others. If an answer is on one rank only, a call differs, or
there are more calls than were recorded, the difference is reported as a doubt about the job's result.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from regrow.comm.set_up import CallingGroup, calls
from regrow.comm.set_up.calls import AnswerKind
from regrow.comm.set_up.log import Note, differs, spoken
from regrow.comm.torch_private.internals import Work
from regrow.comm.work import finished_work
from regrow.core.errors import ProtocolError

MOST_BYTES = 16 << 20
"""Most bytes of answers that are kept since the last step."""
_OF_STATE = ("gather", "scatter", "all_to_all", "alltoall")
"""Parts of the names of collectives by which wrappers assemble a state that no single rank has."""


class PastCall(msgspec.Struct, array_like=True):
    """One call. `known`: its answer is recorded and is the same on all ranks; otherwise `why` gives the reason."""

    note: Note
    known: bool = False
    why: str = "was not done yet"


class PastPart(msgspec.Struct, array_like=True):
    """The calls in the restartable function `number` or, if `behind`, after that function and before the next one."""

    number: int
    behind: bool
    calls: list[PastCall] = []

    @property
    def place(self) -> tuple[int, bool]:
        """Position of this part among the parts."""
        return self.number, self.behind


_PARTS = msgspec.msgpack.Decoder(list[PastPart])


class PastCalls:
    """The calls of one worker since its last step.

    Args:
        doubt: called with the reason why an answer of this worker may differ from the others'.
        world: returns the present number of ranks.
    """

    def __init__(self, doubt: Callable[[str], None], world: Callable[[], int]) -> None:
        self._doubt, self._world = doubt, world
        self._parts: dict[tuple[int, bool], PastPart] = {}
        self._at: tuple[int, bool] = (0, True)
        self._bytes = 0
        self.notes = False
        """True if the present calls come after a step, and are recorded."""
        self._left: Iterator[PastCall] | None = None
        self._lock = threading.Lock()

    # --- the script's position ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note that a step was committed: later calls belong to the code after that step."""
        with self._lock:
            self._parts, self._at, self._bytes = {}, (0, True), 0
        self.notes = True

    def end(self) -> None:
        """Note that a step begins, or that the loop is over; the record stays until the next commit."""
        self.notes = False

    @contextmanager
    def function(self, number: int) -> Iterator[None]:
        """Context for the calls in restartable function `number`; its earlier calls in the record are dropped."""
        before, self._at = self._at, (number, False)
        if self.notes:
            with self._lock:
                self._parts[self._at] = PastPart(number, False)
        try:
            yield
        finally:
            self._at = max(before, (number, True))

    @contextmanager
    def again(self, number: int | None = None) -> Iterator[None]:
        """Context in which this worker's calls get the others' recorded answers.

        Args:
            number: the restartable function that is called; None: all code since the last step.
        """
        with self._lock:
            parts = [self._parts[place] for place in sorted(self._parts) if number is None or place == (number, False)]
        before, self._left = self._left, iter([each for part in parts for each in part.calls])
        try:
            yield
        finally:
            self._left = before

    # --- recording ---------------------------------------------------------------------------------------------

    def record(
        self, group: CallingGroup, name: str, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Callable[[], None] | None:
        """Note a collective that all ranks answer. Call the returned function, if any, when the answer has arrived."""
        if not self.notes:
            return None
        call = calls.read(name, args, options, group.place)
        if call is None or call.kind is AnswerKind.BARRIER:
            return None
        past = PastCall(call.note)
        with self._lock:
            self._parts.setdefault(self._at, PastPart(*self._at)).calls.append(past)
        if call.kind is not AnswerKind.ALIKE or len(group.ranks) != self._world():
            past.why = "has an answer that other ranks have not"
            return None
        outputs = call.outputs
        self._bytes += sum(each.nbytes for each in outputs)
        if self._bytes > MOST_BYTES:
            past.why = f"makes more than {MOST_BYTES >> 20} MiB of answers since the last step"
            return None

        def done() -> None:
            try:
                past.note = msgspec.structs.replace(past.note, value=calls.value_of(outputs))
                past.known = True
            except Exception as error:  # noqa: BLE001  a transport's thread must not end because of it
                past.why = f"has an answer that cannot be noted ({error})"

        return done

    # --- exchange with other workers ---------------------------------------------------------------------------

    def encoded(self) -> bytes:
        """The record in the form that a newcomer receives; empty if there is no record."""
        with self._lock:
            parts = [self._parts[place] for place in sorted(self._parts)]
        return msgspec.msgpack.encode(parts) if parts else b""

    def receive(self, encoded: bytes) -> None:
        """Take over another worker's record. Raises `ProtocolError` if the bytes are no record."""
        try:
            parts = _PARTS.decode(encoded) if encoded else []
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"the record of collectives between steps does not decode: {error}") from error
        with self._lock:
            self._parts = {part.place: part for part in parts}

    # --- answering ---------------------------------------------------------------------------------------------

    def answer(self, group: CallingGroup, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Work | None:
        """The work of a call, with the others' recorded answer; None: answer the call locally."""
        if self._left is None or len(group.ranks) == 1:
            return None
        call = calls.read(name, args, options, group.place)
        if call is None:
            if any(word in name for word in _OF_STATE):
                self._doubt(f"{name} gathers a state of which each rank has a part")
            return None
        if call.kind is AnswerKind.BARRIER:
            return None
        past = next(self._left, None)
        if past is None:
            self._doubt(f"the others did not call {spoken(call.note)}")
            return None
        if not call.outputs and past.note.name == call.note.name:
            return None  # nothing is filled on this rank
        if not past.known:
            self._doubt(f"{spoken(past.note)} {past.why}")
            return None
        if why := differs(past.note, call.note):
            self._doubt(why)
            return None
        if call.note.root == group.place and calls.value_of(call.outputs) != past.note.value:
            self._doubt(f"{spoken(call.note)} sends something else than it did")
        with torch.no_grad():
            calls.fill(call.outputs, past.note.value)
        result = args[0] if isinstance(args[0], list) else [args[0]]
        return finished_work(result, source=past.note.source)
