"""Collectives between two steps that the others are past: noted as they are answered, told to who comes to them later.

A rank that is replaced runs alone what the others have been through since the last step. What it heard there would be
its own data; so it is told what the others have heard. An answer that nobody else has, another call, or more than is
noted leaves a doubt, which is told: the job does not end as if nothing had been.
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
"""Bytes kept of the answers since the last step."""
_OF_STATE = ("gather", "scatter", "all_to_all", "alltoall")
"""In the name of collectives by which wrappers put a state together that no rank has alone."""


class PastCall(msgspec.Struct, array_like=True):
    """One call. `known`: its answer is noted, and is that of each rank; else `why` it is not."""

    note: Note
    known: bool = False
    why: str = "was not done yet"


class PastPart(msgspec.Struct, array_like=True):
    """The calls within the restartable function `number`, or, if `behind`, behind it and before the next one."""

    number: int
    behind: bool
    calls: list[PastCall] = []

    @property
    def place(self) -> tuple[int, bool]:
        """Position among the parts."""
        return self.number, self.behind


_PARTS = msgspec.msgpack.Decoder(list[PastPart])


class PastCalls:
    """The calls of one worker since its last step.

    Args:
        doubt: told why an answer that was given to this worker is not that of the others.
        world: ranks in the world now.
    """

    def __init__(self, doubt: Callable[[str], None], world: Callable[[], int]) -> None:
        self._doubt, self._world = doubt, world
        self._parts: dict[tuple[int, bool], PastPart] = {}
        self._at: tuple[int, bool] = (0, True)
        self._bytes = 0
        self.notes = False
        """True if the present calls follow a step, and are noted."""
        self._left: Iterator[PastCall] | None = None
        self._lock = threading.Lock()

    # --- where the script is -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step was committed: what is called from now on belongs to what follows it."""
        with self._lock:
            self._parts, self._at, self._bytes = {}, (0, True), 0
        self.notes = True

    def end(self) -> None:
        """A step begins, or the loop is over: what was noted stays until the next commit."""
        self.notes = False

    @contextmanager
    def function(self, number: int) -> Iterator[None]:
        """Within this, what is called belongs to that function, whose earlier calls count no more."""
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
        """Within this, calls that are answered locally are answered as the others' were.

        Args:
            number: of the function that is called; None: all since the last step.
        """
        with self._lock:
            parts = [self._parts[place] for place in sorted(self._parts) if number is None or place == (number, False)]
        before, self._left = self._left, iter([each for part in parts for each in part.calls])
        try:
            yield
        finally:
            self._left = before

    # --- noting ------------------------------------------------------------------------------------------------

    def given(
        self, group: CallingGroup, name: str, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Callable[[], None] | None:
        """A collective is called for all ranks to answer. What is returned is to be called when its answer is here."""
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
            except Exception as error:  # noqa: BLE001  a transport's thread must not end by it
                past.why = f"has an answer that cannot be noted ({error})"

        return done

    # --- telling -----------------------------------------------------------------------------------------------

    def encoded(self) -> bytes:
        """Past calls that a newcomer needs; empty: none."""
        with self._lock:
            parts = [self._parts[place] for place in sorted(self._parts)]
        return msgspec.msgpack.encode(parts) if parts else b""

    def receive(self, encoded: bytes) -> None:
        """Take over what another worker has noted. Raises `ProtocolError` where it is something else."""
        try:
            parts = _PARTS.decode(encoded) if encoded else []
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"what was told of collectives between steps does not decode: {error}") from error
        with self._lock:
            self._parts = {part.place: part for part in parts}

    # --- answering ---------------------------------------------------------------------------------------------

    def answer(self, group: CallingGroup, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Work | None:
        """The work of a call as the others were answered; None: it is to be answered locally."""
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
            return None  # nothing is filled here
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
