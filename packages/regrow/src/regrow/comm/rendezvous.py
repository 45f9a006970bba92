"""`env://` on the job's own store: for every script that an agent starts, even one that does not use regrow.

torch would have rank 0 listen on MASTER_ADDR:MASTER_PORT and all others connect to it. Here no rank listens: a worker
uses its own node's agent. A script that changes MASTER_ADDR or MASTER_PORT wants a rendezvous of its own and gets
torch's, and so does a process that no agent started.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

from regrow.comm.store import AgentStore, Connections
from regrow.comm.torch_private import group_names
from regrow.comm.torch_private.internals import Store, default_pg_timeout, rendezvous_handlers
from regrow.core.config import WorkerEnv, meeting_place, rank_variable, rootless
from regrow.core.errors import UsageError
from regrow.core.messages.vocabulary import Role

Meeting = Iterator[tuple[Store, int, int]]


class EnvRendezvous:
    """Answers `env://` in one worker.

    Args:
        torchs: torch's own handler.
        worker: the agent's settings for this process; None if no agent started it.
    """

    def __init__(self, torchs: Callable[..., Meeting], worker: Callable[[], WorkerEnv | None]) -> None:
        self._torchs = torchs
        self._worker = worker
        self._place = meeting_place()
        self._held: Counter[int] = Counter()
        self._connections: Connections | None = None
        self._stores: list[AgentStore] = []
        """Stores that must stay alive here, because torch keeps only the C++ half of a store."""

    def __call__(self, url: str, timeout: timedelta = default_pg_timeout, **options: Any) -> Meeting:
        """Yield the store, this process's rank and the world's size, as torch's own handler does."""
        env = self._worker()
        if env is None or meeting_place() != self._place:
            yield from self._torchs(url, timeout=timeout, **options)
            return
        rank, world = _rank_and_world(url)
        yield self._store(env, world, timeout), rank, world

    def _store(self, env: WorkerEnv, world: int, timeout: timedelta) -> AgentStore:
        if env.role is not Role.RANK:
            raise UsageError(
                f"worker {env.worker} holds no rank yet, so it cannot meet the others at env://",
                hint="only scripts that call regrow.init() can have standbys; run this one without --standby",
            )
        if self._connections is None:
            group_names.watch()
            self._connections = Connections(env.store, env.token)
        # A script that destroys its groups and makes them anew must not find the addresses of the old ones.
        self._held[world] += 1
        prefix = f"g{env.generation}/env{world}.{self._held[world]}/"
        store = AgentStore(env.store, env.token, prefix, connections=self._connections)
        store.set_timeout(timeout)
        self._stores.append(store)
        return store


def install(worker: Callable[[], WorkerEnv | None]) -> None:
    """From now on answer `env://` by the job's store, unless the user has set `REGROW_ROOTLESS=0`.

    Args:
        worker: returns the agent's settings for this process; None if no agent started it, as in a fork of a worker.
    """
    torchs = rendezvous_handlers["env"]
    if rootless() and not isinstance(torchs, EnvRendezvous):
        rendezvous_handlers["env"] = EnvRendezvous(torchs, worker)


def _rank_and_world(url: str) -> tuple[int, int]:
    """Rank and world size, from the script's URL, else from the environment. Raises `ValueError` as torch does."""
    given = parse_qs(urlparse(url).query)
    return _number("rank", given, "RANK"), _number("world_size", given, "WORLD_SIZE")


def _number(name: str, given: dict[str, list[str]], variable: str) -> int:
    text = given[name][0] if name in given else rank_variable(variable)
    if not text:
        raise ValueError(
            f"Error initializing torch.distributed using env:// rendezvous: environment variable {variable} expected, "
            "but not set"
        )
    return int(text)
