"""Copies of state that an agent keeps: two versions of each rank of its node and of the node that it is buddy to."""

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from regrow.core.errors import DamagedCopy, Torn
from regrow.core.ids import Rank, StepNo, WorkerId
from regrow.core.messages.copies import KeptCopy
from regrow.hydration.copies.segment import Segment, chunk_count, chunks_of
from regrow.hydration.streams import DIGEST_BYTES, checksum

VERSIONS = 2


class CopyVersion:
    """One whole copy: where it is, and the checksums of its payload as far as they are known.

    Args:
        received: it came from another node, and its memory is this agent's own.
        worker: who took it, where it waits for the word that it is stored.
        name: of this very copy, on all nodes.
    """

    def __init__(
        self,
        segment: Segment,
        *,
        rank: Rank,
        step: StepNo,
        holding: str,
        payload: int,
        received: bool = False,
        worker: WorkerId | None = None,
        name: str = "",
    ) -> None:
        self.segment = segment
        self.rank = rank
        self.step = step
        self.holding = holding
        self.payload = payload
        self.received = received
        self.worker = worker
        self.name = name or secrets.token_hex(8)
        self.readers = 0
        self._digests = bytearray(chunk_count(payload) * DIGEST_BYTES)
        self._known = 0

    @property
    def whole(self) -> bool:
        """True if it is still the same copy; a worker writes over its oldest copy when that is not needed any more."""
        return self.segment.step == self.step

    @property
    def described(self) -> KeptCopy:
        """For the coordinator."""
        return KeptCopy(self.rank, self.holding, self.step, self.payload)

    def learn(self, chunk: int, digest: bytes | bytearray) -> None:
        """The checksum of a chunk, those before it being known."""
        self._digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES] = digest
        self._known = chunk + 1

    def chunks(self, first: int = 0) -> Iterator[tuple[memoryview, bytes]]:
        """The payload from a chunk on, each with its checksum, compared with the one that was taken before.

        Raises `DamagedCopy`; `Torn` where the copy was written over, after which nothing read so far counts.
        """
        if not self.whole:
            raise Torn(f"the copy of rank {self.rank}'s state@{self.step} was written over")
        space = self.segment.payload()
        for chunk, (start, end) in enumerate(chunks_of(self.payload)):
            if chunk < first:
                continue
            data = space[start:end]
            digest = checksum(data)
            at = chunk * DIGEST_BYTES
            if chunk < self._known and self._digests[at : at + DIGEST_BYTES] != digest:
                if not self.whole:
                    raise Torn(f"the copy of rank {self.rank}'s state@{self.step} was written over")
                raise DamagedCopy(
                    f"bytes {start} to {end} of the copy of rank {self.rank}'s state@{self.step} are damaged"
                )
            if chunk == self._known:
                self.learn(chunk, digest)
            yield data, digest

    def inventory(self) -> bytes:
        """Msgpack of its `Inventory`. Raises `Torn`."""
        head = self.segment.head()
        if head.step != self.step or head.payload != self.payload:
            raise Torn(f"the copy of rank {self.rank}'s state@{self.step} was written over")
        return head.inventory


class CopyVersions:
    """The copies of one agent; any thread may ask. Memory is given back when nobody reads it any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: dict[Rank, list[CopyVersion]] = {}

    def put(self, version: CopyVersion) -> None:
        """A new whole copy. What it supersedes goes: two are kept a rank, and none that no world could return to."""
        with self._lock:
            kept = [old for old in self._versions.get(version.rank, ()) if old.step != version.step and old.whole]
            self._versions[version.rank] = sorted([*kept, version], key=lambda each: each.step)[-VERSIONS:]
            steps = sorted({each.step for row in self._versions.values() for each in row}, reverse=True)
            # Every rank has stored a copy before any rank takes the next: older ones are of ranks that went elsewhere.
            if len(steps) > VERSIONS:
                self._keep(lambda each: each.step >= steps[VERSIONS - 1])

    def went_back(self, step: StepNo) -> None:
        """The world goes on from `state@step`: later copies are of a future that did not happen."""
        with self._lock:
            self._keep(lambda each: each.step <= step)

    def discard(self, version: CopyVersion) -> None:
        """It is of no use any more."""
        with self._lock:
            self._keep(lambda each: each is not version)

    def _keep(self, wanted: Callable[[CopyVersion], bool]) -> None:
        rows = {rank: [each for each in row if wanted(each)] for rank, row in self._versions.items()}
        self._versions = {rank: row for rank, row in rows.items() if row}

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._versions.clear()

    def all(self) -> list[CopyVersion]:
        """Those that are whole, by rank, the older first."""
        with self._lock:
            return [each for _, row in sorted(self._versions.items()) for each in row if each.whole]

    def __contains__(self, version: CopyVersion) -> bool:
        with self._lock:
            return version in self._versions.get(version.rank, ())

    @contextmanager
    def borrow(self, rank: Rank, step: StepNo) -> Iterator[CopyVersion | None]:
        """A whole copy to read from, not overwritten by this agent meanwhile; None where there is none."""
        with self._lock:
            row = self._versions.get(rank, ())
            found = next((each for each in row if each.step == step and each.whole), None)
            if found is not None:
                found.readers += 1
        try:
            yield found
        finally:
            if found is not None:
                with self._lock:
                    found.readers -= 1

    def named(self, rank: Rank, name: str) -> CopyVersion | None:
        """This very copy, if it is here and whole."""
        with self._lock:
            row = self._versions.get(rank, ())
            return next((each for each in row if each.name == name and each.whole), None)

    def room(self, rank: Rank, step: StepNo) -> Segment:
        """Memory to receive a copy in: that of the one that it will supersede, if nobody reads it, else new.

        Raises `NoRoom`.
        """
        with self._lock:
            row = self._versions.get(rank, [])
            stale = [each for each in row if each.step == step]
            if not stale and len(row) >= VERSIONS and row[0].step < step:
                stale = row[:1]
            for version in stale:
                row.remove(version)
            if not row:
                self._versions.pop(rank, None)
            for version in stale:
                if version.received and not version.readers:
                    return version.segment
        return Segment.create()
