"""The agent's memory of copies of state: those of its own ranks, and those of the node whose buddy it is.

All methods are called from the agent's loop and return at once; threads move the bytes.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from regrow.agent.state_copies.server import CopyServer
from regrow.agent.state_copies.stream import PATIENCE, Placement, RankStream, StreamOutcome
from regrow.agent.state_copies.versions import CopyVersion, CopyVersions
from regrow.core.config import AgentConfig
from regrow.core.errors import Torn
from regrow.core.ids import Instant, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.copies import (
    CopiesHeld,
    CopyStreamEnded,
    PlaceCopies,
    ReportCopies,
    SnapshotStored,
    SnapshotTaken,
)
from regrow.hydration.copies.segment import Segment

_REPORT_S: Seconds = 5.0
_log = logging.getLogger("regrow.agent")


class CopyStore:
    """Copies of state that outlive workers.

    Args:
        config: configuration of the agent. It listens on a unix socket if all nodes are on this machine, else on TCP.
        stored: called from a thread when a worker's snapshot is stored, or cannot be.
        streamed: called from a thread when a copy has reached the buddy or failed to: at each change between the two,
            and otherwise for one success in five seconds.
        patience: see `PATIENCE`.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        stored: Callable[[SnapshotStored], None],
        streamed: Callable[[CopyStreamEnded], None],
        patience: Seconds = PATIENCE,
    ) -> None:
        self._config = config
        self._stored = stored
        self._streamed = streamed
        self._patience = patience
        self._versions = CopyVersions()
        self._server = CopyServer(
            self._versions,
            token=config.token,
            folder=Path(config.socket_dir) if config.one_machine else None,
            bind=config.bind,
            advertise=config.advertise,
        )
        self._placement = Placement(NodeId(""), "")
        self._streams: dict[Rank, RankStream] = {}
        self._segments: dict[tuple[WorkerId, int], Segment] = {}
        self._reporting = threading.Lock()
        self._reported_at: Instant = -_REPORT_S
        self._reported_failure: dict[Rank, bool] = {}
        self.endpoint = ""

    @property
    def kept_bytes(self) -> int:
        """Bytes of all whole copies."""
        return sum(version.payload for version in self._versions.all())

    def open(self) -> str:
        """Begin to serve copies; returns the endpoint. Raises `OSError`."""
        self.endpoint = self._server.open()
        return self.endpoint

    def close(self) -> None:
        """End all threads and release all memory. May be called twice."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._server.close()
        self._segments.clear()
        self._versions.clear()

    # --- from workers ------------------------------------------------------------------------------------------

    def snapshot_taken(self, fact: SnapshotTaken, pid: int) -> str:
        """Keep a worker's copy of its state, which is in shared memory, and send the copy to the buddy.

        Returns the reason if the copy cannot be kept, else an empty string.
        """
        try:
            segment = self._segment(fact, pid)
            head = segment.head()
            if (head.rank, head.step, head.holding) != (fact.rank, fact.step, fact.holding):
                raise Torn("the segment holds another copy than the worker announced")
            stream = self._stream(fact.rank)
        except (OSError, RuntimeError, Torn) as error:  # RuntimeError: no thread can be started for the stream.
            _log.warning("the copy of rank %d's state@%d is lost: %s", fact.rank, fact.step, error)
            reason = f"the agent could not take it: {error}"
            self._stored(SnapshotStored(fact.worker, fact.step, reason))
            return reason
        version = CopyVersion(
            segment, rank=fact.rank, step=fact.step, holding=fact.holding, payload=head.payload, worker=fact.worker
        )
        self._versions.put(version)
        stream.push(version)
        return ""

    def _segment(self, fact: SnapshotTaken, pid: int) -> Segment:
        known = self._segments.get((fact.worker, fact.descriptor))
        if known is None:
            # A descriptor of a worker refers to the same memory as long as the worker lives.
            known = self._segments[fact.worker, fact.descriptor] = Segment.attach(f"/proc/{pid}/fd/{fact.descriptor}")
        known.refresh()
        return known

    def worker_ended(self, worker: WorkerId) -> None:
        """Forget the memory of a worker that has ended. Its whole copies stay."""
        for key in [key for key in self._segments if key[0] == worker]:
            del self._segments[key]

    # --- from the coordinator ----------------------------------------------------------------------------------

    def place(self, order: PlaceCopies) -> None:
        """Set the destination of the copies of this node's ranks."""
        self._placement = Placement(order.buddy, order.endpoint)
        for stream in self._streams.values():
            stream.place(self._placement)

    def report(self, order: ReportCopies) -> CopiesHeld:
        """Answer with the complete copies that this agent keeps."""
        copies = [version.described for version in self._versions.all()]
        return CopiesHeld(self._config.node, order.generation, copies)

    def forget(self) -> None:
        """Drop all copies, as no rank will go back to them."""
        self._versions.clear()

    def formed(self, step: StepNo) -> None:
        """Drop copies of later steps, as a generation starts with `state@step`."""
        self._versions.went_back(step)

    # --- threads -----------------------------------------------------------------------------------------------

    def _stream(self, rank: Rank) -> RankStream:
        stream = self._streams.get(rank)
        if stream is None:
            config = self._config
            stream = self._streams[rank] = RankStream(
                rank,
                node=config.node,
                token=config.token,
                versions=self._versions,
                done=self._done,
                patience=self._patience,
            )
            stream.place(self._placement)
        return stream

    def _done(self, outcome: StreamOutcome) -> None:
        version, placement = outcome.version, outcome.placement
        if version.worker is not None:
            self._stored(SnapshotStored(version.worker, version.step, outcome.error))
        if not placement.endpoint:
            return
        now, failed = time.monotonic(), bool(outcome.error)
        with self._reporting:
            otherwise = failed != self._reported_failure.get(version.rank, False)
            worth_it = otherwise or (not failed and now - self._reported_at >= _REPORT_S)
            if worth_it:
                self._reported_at = now
            self._reported_failure[version.rank] = failed
        if worth_it:
            self._streamed(
                CopyStreamEnded(
                    self._config.node,
                    placement.buddy,
                    version.rank,
                    version.step,
                    version.payload,
                    outcome.seconds,
                    outcome.error,
                )
            )
