"""Metrics of a node for Prometheus. Off by default; no error here affects the job."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from aiohttp import web

from regrow.agent.worker_states import WorkerStates, node_series
from regrow.core import http, tls
from regrow.core.config import AgentConfig
from regrow.core.hosts import address_of, answers_to
from regrow.core.ids import Seconds
from regrow.core.metrics_text import CONTENT_TYPE, text_of
from regrow.core.strangers import refused

_PATIENCE: Seconds = 5.0
"""Longest wait for the sizes of files, which may be on a slow disk."""
_log = logging.getLogger("regrow.agent")


class NodeMetricsSite:
    """Serves metrics at `config.metrics`, if set, within `async with`. If it cannot listen, it logs that.

    Args:
        config: configuration of the agent.
        worker_states: states of its workers.
        copies: returns the number of bytes of state that are kept for ranks.
    """

    def __init__(self, config: AgentConfig, worker_states: WorkerStates, copies: Callable[[], int]) -> None:
        self.port = 0
        """Port on which the site listens; 0: none."""
        self._config = config
        self._worker_states = worker_states
        self._copies = copies
        self._runner: web.AppRunner | None = None
        self._looking = asyncio.Lock()

    async def __aenter__(self) -> Self:
        if self._config.metrics is None:
            return self
        host, port = self._config.metrics
        app = web.Application()
        app.add_routes([web.get("/metrics", self._serve)])
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
        try:
            await runner.setup()
            self.port = await http.listen(runner, host, port, reuse=True, anybody=True, endpoint="metrics")
        except (OSError, OverflowError) as error:  # `OverflowError`: an impossible port number.
            await runner.cleanup()
            place = address_of(host, port)
            _log.warning("%s: --node-metrics cannot listen on %s: %s", self._config.node, place, _text_of(error))
            return self
        self._runner = runner
        _log.warning("%s: metrics %s/metrics", self._config.node, tls.url(address_of(host, self.port)))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.Response:
        """Serve one scrape at a time; an error ends only this request."""
        if self._config.metrics is not None and not answers_to(self._config.metrics[0], request.url.host or ""):
            return web.Response(status=403, text=f"this is not {request.host}\n")
        try:
            async with asyncio.timeout(_PATIENCE), self._looking:
                memory = await asyncio.to_thread(_memory, self._worker_states.pids, self._config.data_dir)
        except TimeoutError:
            return web.Response(status=503, text="the data cache's files do not answer\n")
        memory["copies"] = self._copies()
        found = node_series(
            self._worker_states,
            job=self._config.spec.job,
            node=self._config.node,
            memory=memory,
            offset=time.time() - time.monotonic(),
            refused=refused.counts,
        )
        headers = {"Content-Type": CONTENT_TYPE, "Cache-Control": "no-store"}
        return web.Response(body=text_of(found).encode(), headers=headers)


def _text_of(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _memory(pids: list[int], cache: str) -> dict[str, int]:
    """Resident bytes of the agent and of its workers, and bytes in the files of the data cache."""
    return {
        "agent": _resident(os.getpid()),
        "workers": sum(_resident(pid) for pid in pids),
        "cache": _below(Path(cache)) if cache else 0,
    }


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0  # The process has just ended.


def _below(folder: Path) -> int:
    """Bytes of all files below a folder; files that vanish during the count are left out."""
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError:
                continue
    return total
