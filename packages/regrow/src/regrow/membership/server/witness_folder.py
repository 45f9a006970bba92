"""A witness as a folder on a disk that launchers share. Each place in it is a file that only one launcher creates."""

import asyncio
import contextlib
import os
import secrets
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from regrow.core.background import Background
from regrow.core.clock import Clock, MonotonicClock
from regrow.core.ids import Instant, NodeId, Seconds
from regrow.core.messages.elections import LauncherPresent, VoteAsked, Voter, WitnessWord
from regrow.core.wire import UNREADABLE
from regrow.membership.succession.voters import VOTE_LEASE, Voters
from regrow.membership.succession.witness import SCHEME, Witness, is_witness

_DISK_S: Seconds = 4.0
"""Longest wait for an answer from the disk; a later answer is ignored."""
_KEPT = 256
"""Number of newest places that are kept. They span minutes, which is longer than any write can be late."""
Got = TypeVar("Got")


def place_file(folder: Path, place: int) -> Path:
    """The file for one place of a witness."""
    return folder / f"place-{place:012d}"


def newest_place(folder: Path) -> int:
    """The number of the newest place that is taken; 0: none is. Raises `OSError`."""
    names = (name.removeprefix("place-") for name in os.listdir(folder) if name.startswith("place-"))
    return max((int(name) for name in names if name.isdigit()), default=0)


def read_place(folder: Path, place: int) -> WitnessWord:
    """Read the entry at a place. Raises `OSError` and `UNREADABLE`."""
    return msgspec.json.decode(place_file(folder, place).read_bytes(), type=WitnessWord)


def take_place(folder: Path, place: int, word: WitnessWord) -> bool:
    """Take a place if it is free; returns True if this launcher took it. Raises `OSError`.

    The file is complete before it gets its name, and `link` gives a name only once, also on network file systems. If
    the answer of `link` is lost there, the file's number of links shows whether it succeeded (open(2)).
    """
    temporary = folder / f"draft-{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as stream:
            stream.write(msgspec.json.encode(word))
            stream.flush()
            os.fsync(stream.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, place_file(folder, place))
        mine = os.stat(temporary).st_nlink == 2
    finally:
        temporary.unlink(missing_ok=True)
    # A place that was deleted long ago cannot be taken.
    return mine and newest_place(folder) == place


def make_witness(home: Path, job: str) -> Voter:
    """Make a witness, in a folder of its own, for one run of a job. Raises `OSError`, also without hard links."""
    name = f"{job}-{secrets.token_hex(8)}"
    folder = home.absolute() / name
    folder.mkdir(mode=0o700, parents=True)
    try:
        trial = folder / "trial"
        trial.touch()
        os.link(trial, folder / "again")
        for made in (trial, folder / "again"):
            made.unlink()
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Voter(f"witness@{name}", NodeId("the witness"), f"{SCHEME}{folder}")


class WitnessFolder:
    """One launcher's access to a witness. No call waits for the disk longer than some seconds.

    Args:
        voter: the witness.
        clock: clock for leases.
    """

    def __init__(self, voter: Voter, clock: Clock | None = None) -> None:
        self.voter = voter
        self._folder = Path(voter.address.removeprefix(SCHEME))
        self._clock = clock or MonotonicClock()
        self._known = Witness(VOTE_LEASE)
        self._disk = Background("regrow-witness", within=1.0)
        self._disk.start()
        self._busy = False
        self.answers = True
        """True if the disk has answered the last request."""

    @classmethod
    def among(cls, voters: list[Voter]) -> "WitnessFolder | None":
        """Access to the witness among these voters; None: there is no witness."""
        return next((cls(voter) for voter in voters if is_witness(voter)), None)

    async def bind(self, voters: Voters) -> bool:
        """Renew the witness's vote for the coordinator by one lease; returns True if it was renewed."""
        if not await self._look() or not self._known.binds(voters.term, voters.me.name):
            return False
        began = self._clock.now()
        number = voters.for_witness(self.voter.name, began)
        word = WitnessWord(voters.term, voters.me.name, (voters.term, number))
        if not await self._take(word, began):
            return False
        voters.received(LauncherPresent(self.voter, voters.term, number, began), self._clock.now())
        old = self._known.place - _KEPT
        if old > 0:
            self._disk.do(partial(place_file(self._folder, old).unlink, missing_ok=True))
        return True

    async def votes(self, asked: VoteAsked) -> bool:
        """True if the witness elects this launcher, or, in a trial vote, would elect it."""
        if not await self._look() or not self._known.elects(asked, self._clock.now()):
            return False
        return asked.trial or await self._take(WitnessWord(asked.term, asked.name, asked.version), self._clock.now())

    def close(self, *, remove: bool = False) -> None:
        """Stop using the witness. `remove`: delete it, as the job has ended."""
        if remove:
            self._disk.do(lambda: shutil.rmtree(self._folder, ignore_errors=True))
        self._disk.close()

    async def _look(self) -> bool:
        """Read the newest entry; returns True if the disk has answered."""

        def look() -> tuple[int, WitnessWord | None]:
            place = newest_place(self._folder)
            return place, read_place(self._folder, place) if place else None

        found = await self._ask(look, self._clock.now())
        if found is not None and found[1] is not None:
            self._known.saw(found[0], found[1], self._clock.now())
        self.answers = found is not None
        return self.answers

    async def _take(self, word: WitnessWord, began: Instant) -> bool:
        place = self._known.place + 1
        taken = await self._ask(lambda: take_place(self._folder, place, word), began)
        if taken:
            self._known.saw(place, word, self._clock.now())
        return bool(taken)

    async def _ask(self, act: Callable[[], Got], began: Instant) -> Got | None:
        """Run an action on the disk; None: no answer in time, or an error."""
        if self._busy:
            return None  # The disk is still busy with an earlier request.
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Got | None] = loop.create_future()
        self._busy = True

        def done(got: Got | None) -> None:
            self._busy = False
            if not answer.done():
                answer.set_result(got)

        def run() -> None:
            got = None
            with contextlib.suppress(OSError, *UNREADABLE):
                got = act()
            with contextlib.suppress(RuntimeError):  # The loop may have ended.
                loop.call_soon_threadsafe(done, got)

        self._disk.do(run)
        await asyncio.wait({answer}, timeout=_DISK_S)
        late = self._clock.now() - began > _DISK_S
        return answer.result() if answer.done() and not late else None
