"""Asks running jobs for their progress. Each request has a short timeout, and no decision depends on an answer."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Final

import aiohttp
import msgspec

from regrow.core import http, tls
from regrow.core.ids import Seconds
from regrow.core.wire import UNREADABLE
from regrow.membership.orders import AnswerScale
from regrow.observe.watch.present import JobFigures
from regrow_clusters.operator.objects import token_of
from regrow_clusters.operator.resource import TrainingJob

_AT_ONCE: Final = 16
_LONGEST_ANSWER: Final = 65536


class JobAsker:
    """`async with JobAsker(key) as asker`.

    Args:
        key: the jobs' secrets are derived from it.
        within: timeout of a request to one job.
    """

    def __init__(self, key: bytes, *, within: Seconds = 2.0) -> None:
        self._key = key
        self._timeout = aiohttp.ClientTimeout(total=within)
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "JobAsker":
        # Neither a proxy nor a redirect may see a job's token.
        self._session = http.session(timeout=self._timeout, trust_env=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def drop(self, job: TrainingJob, host: str, nodes: Sequence[str]) -> bool:
        """Ask the coordinator at this address to drain a node that trains on though the cluster has given it up.

        `nodes`: names that it may have; the first known one is drained. Returns True if one is; nothing depends on it.
        """
        for node in nodes:
            grace = job.spec.graceful_shutdown_timeout_in_seconds
            request = {"node": node, "grace": grace, "reason": "the cluster has given its pod up", "certain": True}
            reported = await self._answer(job, host, "POST", "/drain", msgspec.json.encode(request))
            if reported is not None and _accepted(reported):
                return True
        return False

    async def ask(self, job: TrainingJob, host: str) -> JobFigures | None:
        """Progress of the job, as its coordinator at this address reports it; None: no answer in time."""
        reported = await self._answer(job, host, "GET", "/figures")
        try:
            return None if reported is None else msgspec.json.decode(reported, type=JobFigures)
        except UNREADABLE:
            return None

    async def _answer(
        self, job: TrainingJob, host: str, method: str, path: str, body: bytes | None = None
    ) -> bytes | None:
        """Body of the answer; None: a refusal, or no answer in time. Old versions of regrow lack `/figures`."""
        if self._session is None:
            return None
        place = f"[{host}]" if ":" in host else host
        headers = {"Authorization": f"Bearer {token_of(self._key, job.uid)}"}
        url = tls.url(f"{place}:{job.spec.port}{path}")
        try:
            async with (
                self._turns,
                self._session.request(method, url, data=body, headers=headers, allow_redirects=False) as answer,
            ):
                return await answer.content.read(_LONGEST_ANSWER) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None


def _accepted(answer: bytes) -> bool:
    try:
        return msgspec.json.decode(answer, type=AnswerScale).accepted
    except UNREADABLE:
        return False
