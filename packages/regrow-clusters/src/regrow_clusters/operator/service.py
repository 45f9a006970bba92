"""`regrow operator run`: waits until it is the leader, controls jobs while it leads, and then ends."""

import asyncio
import logging
import os
import secrets
import signal
import socket
from pathlib import Path
from typing import Final

from regrow.core.errors import UsageError
from regrow.core.exit_codes import OK, RUN_AGAIN
from regrow.core.process.tasks import TaskScope
from regrow_clusters.cluster.node_health import HealthTable, read_table
from regrow_clusters.operator.controller import Controller
from regrow_clusters.operator.leadership import Leadership
from regrow_clusters.operator.lightkube_api import LightkubeApi
from regrow_clusters.operator.observed.node_watch import NodeWatch

MANAGER: Final = "regrow-operator"
_LOG = logging.getLogger("regrow.operator")
_SHORTEST_KEY = 16


def read_key(path: str) -> bytes:
    """Read the key from which the jobs' secrets are derived. Raises `UsageError`."""
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise UsageError(
            f"--key-file {path} cannot be read: {error.strerror or error}",
            hint="mount the Secret regrow-operator-key there (docs/kubernetes.md)",
        ) from error
    if len(key) < _SHORTEST_KEY:
        raise UsageError(f"--key-file {path} has {len(key)} bytes", hint=f"give {_SHORTEST_KEY} random ones or more")
    return key


def run_operator(
    *, key_file: str, namespace: str, elect: bool, health_table: str = "", mark_nodes: bool = False
) -> int:
    """Run until SIGTERM or SIGINT, or until another operator leads; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    key, table = read_key(key_file), read_table(health_table)
    return asyncio.run(_serve(key, namespace, table, elect=elect, mark=mark_nodes))


async def _serve(key: bytes, namespace: str, table: HealthTable, *, elect: bool, mark: bool) -> int:
    async with LightkubeApi(manager=MANAGER) as api:
        controller = Controller(api, key, wall=api.clock, nodes=NodeWatch(api, table, mark=mark))
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        async with TaskScope() as tasks:
            stopped = tasks.start(stop.wait())
            if not elect:
                return await _control(tasks.start(controller.run()), stopped, None)
            identity = f"{socket.gethostname()}_{os.getpid()}_{secrets.token_hex(4)}"
            leadership = Leadership(api, namespace=namespace or api.namespace, identity=identity)
            waiting = tasks.start(leadership.acquire())
            await asyncio.wait({waiting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                return OK
            _LOG.info("%s leads", identity)
            code = await _control(tasks.start(controller.run()), stopped, tasks.start(leadership.hold()))
            if code == OK:
                await leadership.release()
            return code


async def _control(
    working: "asyncio.Task[None]", stopped: "asyncio.Task[bool]", held: "asyncio.Task[None] | None"
) -> int:
    waited: set[asyncio.Task[None] | asyncio.Task[bool]] = {working, stopped}
    if held is not None:
        waited.add(held)
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        await working  # it ends only by an error, which is raised here
    working.cancel()
    if held is not None and held.done() and not stopped.done():
        _LOG.warning("the lease is lost; another operator leads")
        return RUN_AGAIN
    if held is not None:
        held.cancel()
    return OK
