"""The set-up of a first worker, which records its collectives with their results."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import xxhash

from regrow.comm import nccl
from regrow.comm.group_ranks import RankInWorld
from regrow.comm.set_up import CallingGroup, calls
from regrow.comm.set_up.calls import AnswerKind, SetUpCall
from regrow.comm.set_up.log import (
    ALIKE_BYTES,
    AT_ONCE_BYTES,
    OWN_BYTES,
    PIECE_BYTES,
    REFUSED,
    WORLD,
    Note,
    NoteBounds,
    SetUpEnd,
    group_name,
    spoken,
)
from regrow.comm.set_up.notes import SetUpNotes
from regrow.comm.torch_private.internals import Work, storage_name
from regrow.comm.work import FollowedWork, noting
from regrow.core.errors import ProtocolError
from regrow.core.ids import Seconds

SETTLE_S: Seconds = 60.0
_ENCODER = msgspec.msgpack.Encoder()


@dataclass(eq=False)
class _RecordedCall:
    """One call: its note's name, the tensors that it fills, and their `value` once it is known."""

    name: str
    call: SetUpCall
    own: bool
    storages: list[object] = field(default_factory=list)
    done: bool = False
    value: bytes | None = None
    source: int = -1
    nbytes: int = 0


class Recording:
    """Records the set-up calls of this worker and their answers.

    Args:
        notes: stores the notes.
        rank_in_world: this worker's rank in the world.
        unit: number of ranks in one replica.
    """

    def __init__(self, notes: SetUpNotes, rank_in_world: RankInWorld, unit: int) -> None:
        self._notes, self._rank_in_world, self._unit = notes, rank_in_world, unit
        self._lock = threading.Condition()
        self._counts: Counter[str] = Counter()
        self._bounds = NoteBounds()
        self._late: list[_RecordedCall] = []
        """Calls whose results are recorded at the end of the set-up."""
        self._held = 0
        """Total bytes of the results that are recorded at the end."""
        self._open: list[_RecordedCall] = []
        self._following: list[FollowedWork] = []
        self.refused = ""
        """Reason why no newcomer can be answered, for people; empty if all can."""
        self.fixed = ""
        """Reason why the answers are invalid in a world of another size, for people; empty if they are valid there."""
        self._say({WORLD: str(rank_in_world.world).encode()})

    # --- calls -------------------------------------------------------------------------------------------------

    def answer(
        self, group: CallingGroup, name: str, args: tuple[Any, ...], options: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Make the call, record it with its result, and return its work; see `SetUp.answer`."""
        call = None if self.refused else calls.read(name, args, options, group.place)
        if call is None:
            return run()
        whole = self._is_whole(group)
        called = group_name(group.ranks, self._rank_in_world, self._unit, whole=whole, replica=self._replica)
        recorded = self._begin(call, f"{called}.{group.key.rpartition('.')[2]}", args)
        self._look_at_size(call, group, across=called.startswith("x"))
        if recorded is None:
            return run()
        if nccl.on_device(args):
            return self._follow(recorded, run())
        with noting(lambda source: self._done(recorded, source)):
            return run()

    @property
    def _replica(self) -> int:
        return self._rank_in_world.rank // self._unit

    def _is_whole(self, group: CallingGroup) -> bool:
        return group.key.endswith(".0") and group.ranks == list(range(self._rank_in_world.world))

    def _begin(self, call: SetUpCall, group: str, args: tuple[Any, ...]) -> _RecordedCall | None:
        note, rank = call.note, self._rank_in_world.rank
        with self._lock:
            if why := self._bounds.call(note):
                self._refuse(why)
                return None
            counted = f"{group}/{calls.peer(note.name, args)}" if call.kind is AnswerKind.RECEIVED else group
            counted = f"b/{group}" if call.kind is AnswerKind.BARRIER else counted
            number, self._counts[counted] = self._counts[counted], self._counts[counted] + 1
            own = call.kind in (AnswerKind.OWN, AnswerKind.AT_ROOT, AnswerKind.RECEIVED)
            name = f"b/{group}/{number}" if call.kind is AnswerKind.BARRIER else f"a/{counted}/{number}"
            if call.kind in (AnswerKind.OWN, AnswerKind.AT_ROOT):  # all ranks may know the call, but not its answer
                self._say({name: _ENCODER.encode(msgspec.structs.replace(note, outputs=[]))})
            if own:
                name = f"r{rank}/{counted}/{number}"
            nbytes = sum(each.numel() * each.element_size() for each in call.outputs)
            recorded = _RecordedCall(name, call, own, nbytes=nbytes)
            if nbytes > AT_ONCE_BYTES:
                recorded.storages = [storage_name(each) for each in call.outputs if each.numel()]
                self._late.append(recorded)
            self._open.append(recorded)
            return recorded

    def _look_at_size(self, call: SetUpCall, group: CallingGroup, *, across: bool) -> None:
        if self.fixed or call.kind is AnswerKind.BARRIER or (across and not call.needs_size):
            return
        if len(group.ranks) == 1 and not across:
            return
        note = call.note
        if across:
            self.fixed = f"{spoken(note)} was answered before the loop by as many ranks as there were then"
        else:
            self.fixed = (
                f"{spoken(note)} was answered before the loop inside a replica, and a new replica has no answer"
            )

    # --- answers -----------------------------------------------------------------------------------------------

    def _follow(self, recorded: _RecordedCall, work: Any) -> Any:
        """Record the result of NCCL's work, which ends on the device, when the script or the set-up's end awaits it."""
        followed = FollowedWork(work, lambda: self._done(recorded, -1))
        self._following.append(followed)
        return followed

    def together(self, work: Work) -> Work:
        """Record the results of coalesced calls once their work ends; see `SetUp.together`."""
        waiting = [each for each in self._following if each.inner is None]
        for each in waiting:
            each.inner = work

        def follow() -> None:
            for each in waiting:
                each.follow()

        return FollowedWork(work, follow) if waiting else work

    def _done(self, recorded: _RecordedCall, source: int) -> None:
        """Record the result of a call, in the thread that has filled it, before the script can change it."""
        keep = recorded not in self._late or self._held + recorded.nbytes <= ALIKE_BYTES + OWN_BYTES
        try:
            value = calls.value_of(recorded.call.outputs) if keep else None
        except (RuntimeError, TypeError, NotImplementedError) as error:
            value = b""
            self._refuse(f"the answer of {spoken(recorded.call.note)} cannot be noted: {error}")
        with self._lock:
            recorded.done, recorded.value, recorded.source = True, value, source
            if recorded in self._late:
                self._held += len(value or b"")
            elif why := self._over(recorded):
                self._refuse(why)
            else:
                self._say({recorded.name: _ENCODER.encode(_noted(recorded, value or b""))})
            recorded.call.outputs.clear()
            self._open.remove(recorded)
            self._lock.notify_all()

    def _over(self, recorded: _RecordedCall) -> str:
        return self._bounds.answer(recorded.call.note, recorded.nbytes, own=recorded.own)

    # --- the end -----------------------------------------------------------------------------------------------

    def settle(self, protected: Iterable[torch.Tensor]) -> None:
        """At the end of the set-up, record the numbers of calls, and all large results that are not protected state.

        Args:
            protected: the tensors of protected state.
        """
        for followed in self._following:
            followed.follow()
        self._await_all()
        known = {storage_name(each) for each in protected} if self._late else set[object]()
        for recorded in self._late:
            if self.refused:
                break
            if recorded.storages and all(each in known for each in recorded.storages):
                self._say({recorded.name: _ENCODER.encode(_noted(recorded, b"", protected=True))})
            elif why := self._over(recorded):
                self._refuse(why)
            else:
                self._note_pieces(recorded)
        self._late.clear()
        counts = {name: count for name, count in self._counts.items() if not name.startswith("b/")}
        self._say({f"r{self._rank_in_world.rank}/end": _ENCODER.encode(SetUpEnd(counts))})

    def _await_all(self) -> None:
        until = time.monotonic() + SETTLE_S
        with self._lock:
            while self._open and (left := until - time.monotonic()) > 0:
                self._lock.wait(left)
            if self._open:
                note = self._open[0].call.note
                self._refuse(f"{spoken(note)} was not done when the loop began")

    def _note_pieces(self, recorded: _RecordedCall) -> None:
        value = recorded.value or b""
        pieces = [value[at : at + PIECE_BYTES] for at in range(0, len(value), PIECE_BYTES)]
        names = [f"p/{xxhash.xxh3_128_hexdigest(piece)}" for piece in pieces]
        try:
            there = self._notes.have(names)
        except (OSError, ValueError, ProtocolError) as error:
            self._refuse(f"this node's agent has not answered: {error}")
            return
        for name, piece in zip(names, pieces, strict=True):
            if name not in there:
                self._say({name: piece})
        self._say({recorded.name: _ENCODER.encode(_noted(recorded, b"", pieces=names))})
        recorded.value = None

    # --- storing notes -----------------------------------------------------------------------------------------

    def _say(self, notes: dict[str, bytes]) -> None:
        try:
            self._notes.note(notes)
        except (OSError, ValueError, ProtocolError) as error:
            self.refused = self.refused or f"this node's agent has not taken a note: {error}"

    def _refuse(self, why: str) -> None:
        if not self.refused:
            self.refused = why
            self._say({REFUSED: why.encode()})


def _noted(recorded: _RecordedCall, value: bytes, *, pieces: list[str] | None = None, protected: bool = False) -> Note:
    return msgspec.structs.replace(
        recorded.call.note, value=value, pieces=pieces or [], source=recorded.source, protected=protected
    )
