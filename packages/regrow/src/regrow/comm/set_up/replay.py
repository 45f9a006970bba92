"""The set-up of a newcomer, whose collectives get the answers that the first workers got."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import msgspec
import torch

from regrow.comm.echo_objects import own_objects
from regrow.comm.group_ranks import RankInWorld
from regrow.comm.set_up import CallingGroup, calls
from regrow.comm.set_up.calls import AnswerKind, SetUpCall
from regrow.comm.set_up.log import REFUSED, WORLD, Note, SetUpEnd, counted_differently, differs, group_name, spoken
from regrow.comm.set_up.notes import SetUpNotes
from regrow.comm.torch_private.internals import Work, objects_of
from regrow.comm.work import finished_work
from regrow.core.errors import DeadlineExceeded, SetUpDiffers
from regrow.core.ids import Instant, Seconds

_NOTES = msgspec.msgpack.Decoder(Note)
_ENDS = msgspec.msgpack.Decoder(SetUpEnd)
_PIECES_TOGETHER = 8


class Replay:
    """Answers the set-up calls of this newcomer.

    Args:
        notes: stores the notes.
        rank_in_world: this worker's rank in the world.
        unit: number of ranks in one replica.
        patience: longest wait for the first workers to reach a call, in seconds.
        refuted: called with the reason why this worker would not be equal, before the error is raised.
        alone: called with the name and line of a call whose answer belongs to this rank alone.
    """

    def __init__(
        self,
        notes: SetUpNotes,
        rank_in_world: RankInWorld,
        unit: int,
        *,
        patience: Seconds,
        refuted: Callable[[str], None],
        alone: Callable[[str], None],
    ) -> None:
        self._notes, self._rank_in_world, self._unit = notes, rank_in_world, unit
        self._patience, self._refuted, self._alone = patience, refuted, alone
        self._counts: Counter[str] = Counter()
        self._sizes: list[int] = []
        """Sizes of the objects that this rank sends to all, kept until the objects' bytes follow."""
        self._rank: int | None = None

    # --- calls -------------------------------------------------------------------------------------------------

    def answer(
        self, group: CallingGroup, name: str, args: tuple[Any, ...], options: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Finished work with the recorded answer; see `SetUp.answer`. Raises `SetUpDiffers` or `DeadlineExceeded`."""
        call = calls.read(name, args, options, group.place)
        if call is None:
            return run()
        called = self._named(group)
        if call.kind is AnswerKind.BARRIER:
            self._wait_for_barrier(call, called)
            return run()
        if call.kind is not AnswerKind.ALIKE:
            self._alone(spoken(call.note))
        counted = f"{called}/{calls.peer(name, args)}" if call.kind is AnswerKind.RECEIVED else called
        number, self._counts[counted] = self._counts[counted], self._counts[counted] + 1
        common = None if call.kind is AnswerKind.RECEIVED else self._note(call, f"a/{counted}/{number}")
        if common is not None and call.kind is not AnswerKind.ALIKE:
            self._compare(common, msgspec.structs.replace(call.note, outputs=[]))
        note = common if call.kind is AnswerKind.ALIKE else self._note(call, f"r{self.rank}/{counted}/{number}")
        if note is None or note.protected:
            return run()
        return self._replayed(note, call, args, group.place)

    def together(self, work: Work) -> Work:
        """Return the work of coalesced calls unchanged; see `SetUp.together`."""
        return work

    def _replayed(self, note: Note, call: SetUpCall, args: tuple[Any, ...], place: int) -> Work:
        sent = own_objects() if call.kind is AnswerKind.ALIKE and call.note.root == place else None
        if sent is None:
            self._compare(note, call.note)
        else:
            self._compare(msgspec.structs.replace(note, outputs=[]), msgspec.structs.replace(call.note, outputs=[]))
        value = self._value(note, call)
        if sent is not None and not (note.outputs == call.note.outputs and calls.value_of(call.outputs) == value):
            self._send_again(sent, note, value)
        if sent is None or note.outputs == call.note.outputs:
            with torch.no_grad():
                calls.fill(call.outputs, value)
        result = args[0] if isinstance(args[0], list) else [args[0]]
        return finished_work(result, source=note.source)

    def _send_again(self, sent: list[Any], note: Note, value: bytes) -> None:
        """Replace objects that this newcomer would send by those that the others have (a name with the time in it)."""
        tensor = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
        if note.outputs[0].dtype != "uint8":
            self._sizes = tensor.view(torch.int64).tolist()
        elif len(self._sizes) == len(sent):
            sent[:] = objects_of(tensor, self._sizes)

    @property
    def rank(self) -> int:
        """The rank whose notes apply here: the same rank among the first workers, or its place in the first replica."""
        if self._rank is None:
            place = self._rank_in_world.rank % self._unit
            found = self._ask([WORLD], place, "the first workers")
            self._rank = self._rank_in_world.rank if self._rank_in_world.rank < int(found[WORLD]) else place
        return self._rank

    def _named(self, group: CallingGroup) -> str:
        whole = group.key.endswith(".0") and group.ranks == list(range(self._rank_in_world.world))
        replica = self.rank // self._unit
        called = group_name(group.ranks, self._rank_in_world, self._unit, whole=whole, replica=replica)
        return f"{called}.{group.key.rpartition('.')[2]}"

    # --- notes -------------------------------------------------------------------------------------------------

    def _wait_for_barrier(self, call: SetUpCall, group: str) -> None:
        """Wait until the first workers have passed this barrier. An extra or missing barrier makes no difference."""
        number, self._counts[f"b/{group}"] = self._counts[f"b/{group}"], self._counts[f"b/{group}"] + 1
        self._ask([f"b/{group}/{number}", self._end, REFUSED], self.rank, call.note.where)

    @property
    def _end(self) -> str:
        return f"r{self.rank}/end"

    def _note(self, call: SetUpCall, name: str) -> Note:
        where = spoken(call.note)
        found = self._ask([name, self._end, REFUSED], self.rank, where)
        if name not in found:
            if REFUSED in found:
                self._refuse(found[REFUSED].decode())
            self._refuse(f"it calls {where}, which the first workers did not call before their loop")
        return _NOTES.decode(found[name])

    def _value(self, note: Note, call: SetUpCall) -> bytes:
        if not note.pieces:
            return note.value
        found = dict[str, bytes]()
        where = spoken(call.note)
        until = time.monotonic() + self._patience
        left = list(dict.fromkeys(note.pieces))
        while left:
            try:
                found |= self._notes.ask(left[:_PIECES_TOGETHER], until, self.rank)
            except DeadlineExceeded as error:
                raise DeadlineExceeded(f"{where}: {error.cause}") from error
            left = [name for name in left if name not in found]
        return b"".join(found[name] for name in note.pieces)

    def _ask(self, names: list[str], rank: int, where: str) -> dict[str, bytes]:
        until: Instant = time.monotonic() + self._patience
        try:
            return self._notes.ask(names, until, rank)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{where}: {error.cause} ({self._patience:.0f} s)") from error

    def _compare(self, note: Note, called: Note) -> None:
        if why := differs(note, called):
            self._refuse(why)

    def settle(self, _: Iterable[torch.Tensor]) -> None:
        """At the end of the set-up, check that it had as many calls as the set-up of the first workers.

        Raises `SetUpDiffers` or `DeadlineExceeded`.
        """
        found = self._ask([self._end], self.rank, "the end of the set-up")
        first = _ENDS.decode(found[self._end]).counts
        mine = {name: count for name, count in self._counts.items() if not name.startswith("b/")}
        different = counted_differently(first, mine)
        if different is None:
            return
        counted, number = different
        names = [f"a/{counted}/{number}", f"r{self.rank}/{counted}/{number}"]
        notes = self._ask(names, self.rank, "the end of the set-up")
        note = _NOTES.decode(next(iter(notes.values())))
        self._refuse(f"it did not call {spoken(note)}, as the first workers did before their loop")

    def _refuse(self, why: str) -> NoReturn:
        self._refuted(why)
        raise SetUpDiffers(
            f"a newcomer for rank {self._rank_in_world.rank} would not be equal: {why}",
            hint="let every rank call the same collectives before the loop, whenever it is started",
        )
