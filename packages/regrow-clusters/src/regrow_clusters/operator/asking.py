"""Asks running jobs how far they are. It waits for nobody long, and nothing depends on its answers."""

import asyncio
from types import TracebackType
from typing import Final

import aiohttp
import msgspec

from regrow.core import http, tls
from regrow.core.ids import Seconds
from regrow.core.wire import UNREADABLE
from regrow.observe.watch.present import JobFigures
from regrow_clusters.operator.objects import token_of
from regrow_clusters.operator.resource import TrainingJob

_AT_ONCE: Final = 16
_LONGEST_ANSWER: Final = 65536


class JobAsker:
    """`async with JobAsker(key) as asker`.

    Args:
        key: from which the jobs' secrets are made.
        within: the longest that one job is waited for.
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

    async def ask(self, job: TrainingJob, host: str) -> JobFigures | None:
        """How far the job is, by its coordinator at this address; None: it does not say, or not in time."""
        if self._session is None:
            return None
        place = f"[{host}]" if ":" in host else host
        headers = {"Authorization": f"Bearer {token_of(self._key, job.uid)}"}
        try:
            async with (
                self._turns,
                self._session.get(
                    tls.url(f"{place}:{job.spec.port}/figures"), headers=headers, allow_redirects=False
                ) as answer,
            ):
                if answer.status != 200:
                    return None  # a regrow from before it had figures
                return msgspec.json.decode(await answer.content.read(_LONGEST_ANSWER), type=JobFigures)
        except (aiohttp.ClientError, TimeoutError, OSError, *UNREADABLE):
            return None
