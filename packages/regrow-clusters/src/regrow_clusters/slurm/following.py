"""Client of a job's present coordinator: the shared folder of records names the elected one."""

import time
from pathlib import Path
from typing import Final

from regrow.core.errors import RegrowError
from regrow.core.ids import Seconds
from regrow.core.job import JobSpec
from regrow.launch.addresses import endpoint_of
from regrow.launch.folder import JobEntry, read_entry
from regrow.launch.remote import CoordinatorClient
from regrow.membership.orders import AnswerScale
from regrow.membership.server.requests import DrainRequest, ScaleRequest
from regrow.membership.view import JobView

_READ_EVERY_S: Final[Seconds] = 1.0
_ANSWER_S: Final[Seconds] = 5.0


class FollowedCoordinator:
    """A `CoordinatorClient` that follows elections.

    Args:
        at: address of the first coordinator.
        token: the job's secret.
        records: the run's folder; None: no other coordinator is ever elected.
    """

    def __init__(self, at: str, token: str, records: Path | None = None) -> None:
        self._first, self._token, self._records = at, token, records
        self._client = CoordinatorClient(at, token, timeout=_ANSWER_S)
        self._entry: JobEntry | None = None
        self._read_at: Seconds = -1e9
        self.at = at
        """The present coordinator's address."""

    @property
    def moved(self) -> bool:
        """True if another coordinator was elected to replace the first."""
        self._look()
        return not _same(self.at, self._first)

    @property
    def over(self) -> int | None:
        """The job's exit code, as recorded by an elected coordinator; None: no end is recorded."""
        self._look()
        entry = self._entry
        return entry.code if entry is not None and entry.ended is not None and self.moved else None

    def answers(self) -> bool:
        """True if the coordinator answers now."""
        try:
            self.spec()
        except RegrowError:
            return False
        return True

    def spec(self) -> JobSpec:
        """Specification with which the job was started."""
        self._look()
        return self._client.spec()

    def status(self) -> JobView:
        """The job's present state."""
        self._look()
        return self._client.status()

    def drain(self, request: DrainRequest) -> AnswerScale:
        """Ask the coordinator to release a node; returns its answer."""
        return self._client.drain(request)

    def scale(self, request: ScaleRequest) -> AnswerScale:
        """Request another number of replicas; returns the coordinator's answer."""
        return self._client.scale(request)

    def stop(self, reason: str, *, patience: Seconds) -> None:
        """Ask the job to end; `patience`: time in which it may save its state first."""
        self._look()
        self._client.stop(reason, patience=patience)

    def _look(self) -> None:
        now = time.monotonic()
        if self._records is None or now - self._read_at < _READ_EVERY_S:
            return
        self._read_at = now
        entry = read_entry(self._records)
        if entry is None or not entry.address:
            return
        self._entry = entry
        if not _same(entry.address, self.at):
            self.at = entry.address
            self._client = CoordinatorClient(entry.address, self._token, timeout=_ANSWER_S)


def _same(one: str, other: str) -> bool:
    return one == other or endpoint_of("an address", one) == endpoint_of("an address", other)
