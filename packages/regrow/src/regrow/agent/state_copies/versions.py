"""Copies of state that an agent keeps: two versions per rank of its own node and of the node whose buddy it is."""

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
    """One whole copy: its memory, and the known checksums of its payload.

    Args:
        received: the copy came from another node, and its memory belongs to this agent.
        worker: the worker that took the copy, if that worker waits for the report that it is stored.
        name: name of this copy, the same on all nodes.
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
        """True if the memory still holds this copy; a worker overwrites its oldest copy once the copy is not needed."""
        return self.segment.step == self.step

    @property
    def described(self) -> KeptCopy:
        """Description of this copy for the coordinator."""
        return KeptCopy(self.rank, self.holding, self.step, self.payload)

    def learn(self, chunk: int, digest: bytes | bytearray) -> None:
        """Set the checksum of a chunk; the checksums of earlier chunks must be known."""
        self._digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES] = digest
        self._known = chunk + 1

    def chunks(self, first: int = 0) -> Iterator[tuple[memoryview, bytes]]:
        """The chunks of the payload from `first` on, each with its checksum, after comparison with an earlier one.

        Raises `DamagedCopy`, or `Torn` if the copy was overwritten, which invalidates all chunks read so far.
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
        """Msgpack of the copy's `Inventory`. Raises `Torn`."""
        head = self.segment.head()
        if head.step != self.step or head.payload != self.payload:
            raise Torn(f"the copy of rank {self.rank}'s state@{self.step} was written over")
        return head.inventory


class CopyVersions:
    """The copies of one agent, for use by any thread. Memory is released once it has no readers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: dict[Rank, list[CopyVersion]] = {}

    def put(self, version: CopyVersion) -> None:
        """Add a whole copy and drop superseded ones: two are kept per rank, unless no world could return to them."""
        with self._lock:
            kept = [old for old in self._versions.get(version.rank, ()) if old.step != version.step and old.whole]
            self._versions[version.rank] = sorted([*kept, version], key=lambda each: each.step)[-VERSIONS:]
            steps = sorted({each.step for row in self._versions.values() for each in row}, reverse=True)
            # Every rank stores a copy before any rank takes the next, so older ones belong to ranks that moved away.
            if len(steps) > VERSIONS:
                self._keep(lambda each: each.step >= steps[VERSIONS - 1])

    def went_back(self, step: StepNo) -> None:
        """Drop copies of later steps, as the world starts again with `state@step`."""
        with self._lock:
            self._keep(lambda each: each.step <= step)

    def discard(self, version: CopyVersion) -> None:
        """Drop a copy."""
        with self._lock:
            self._keep(lambda each: each is not version)

    def _keep(self, wanted: Callable[[CopyVersion], bool]) -> None:
        rows = {rank: [each for each in row if wanted(each)] for rank, row in self._versions.items()}
        self._versions = {rank: row for rank, row in rows.items() if row}

    def clear(self) -> None:
        """Drop all copies."""
        with self._lock:
            self._versions.clear()

    def all(self) -> list[CopyVersion]:
        """The whole copies, by rank, the oldest first."""
        with self._lock:
            return [each for _, row in sorted(self._versions.items()) for each in row if each.whole]

    def __contains__(self, version: CopyVersion) -> bool:
        with self._lock:
            return version in self._versions.get(version.rank, ())

    @contextmanager
    def borrow(self, rank: Rank, step: StepNo) -> Iterator[CopyVersion | None]:
        """Lend a whole copy for reading, which this agent does not overwrite meanwhile; None if there is none."""
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
        """The copy with this name, if it is here and whole; else None."""
        with self._lock:
            row = self._versions.get(rank, ())
            return next((each for each in row if each.name == name and each.whole), None)

    def room(self, rank: Rank, step: StepNo) -> Segment:
        """Memory for a copy to be received: that of the superseded copy, if it has no readers, else new memory.

        Raises `NoMemoryForCopy`.
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
