"""Answers that the first workers received from collectives before their loop, kept on two nodes for later workers.

Each agent keeps the answers of its own workers and copies them to another agent. For a worker that builds on a third
node, its agent asks these two, and then all. Fetched answers are kept here too.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from regrow.agent.store.peers import StorePeers
from regrow.core.errors import StoreNodeLost
from regrow.core.ids import Instant, Seconds
from regrow.core.messages.store import TIMEOUT, AnswersAsked, AnswersNoted, StoreReply
from regrow.core.process.tasks import shared, supervised

_log = logging.getLogger("regrow.agent")
_LOOK_S: Seconds = 0.5
"""Interval at which other agents are asked again."""
_ANSWER_S: Seconds = 5.0
_COPY_S: Seconds = 60.0
_TOGETHER_BYTES = 8 << 20
_PIECE = "p/"
"""Prefix of the name of a piece of an answer."""
_EVERYBODY = 4
"""Interval, in tries, at which all agents are asked, not only those that should have the answer."""


def keepers(rank: int, world: int, nodes: int) -> tuple[int, int]:
    """Indexes of the nodes that have a rank's answers: its own, as far as that is known, and that of the copy."""
    own = min(rank, world - 1) * nodes // world
    return own, copy_place(own, nodes)


def copy_place(own: int, nodes: int) -> int:
    """Index of the node that keeps a node's copies: half of all nodes further on, so rarely in the same rack."""
    return (own + max(1, nodes // 2)) % nodes


class SetUpAnswers:
    """The answers that one agent keeps. All methods are called from its loop.

    Args:
        peers: connections to the other agents.
    """

    def __init__(self, peers: StorePeers) -> None:
        self._peers = peers
        self._build = -1
        self._kept: dict[str, bytes] = {}
        self._ranks: dict[str, int] = {}
        """Rank of each kept answer."""
        self._brought: set[str] = set()
        """Answers that this node's workers received, or that were fetched for them."""
        self._stores: tuple[str, ...] = ()
        self._world = 1
        self._own = ""
        self._source: dict[int, str] = {}
        """A store that had a rank's answers before, by rank."""
        self._news: asyncio.Future[None] | None = None
        self._uncopied: dict[str, int] = {}
        self._copying: asyncio.Task[None] | None = None
        self._target = ""
        self._copied_here: set[str] = set()
        """The agents whose answers are copied to this one."""

    # --- agents --------------------------------------------------------------------------------------------------

    def learn(self, own: str, stores: Sequence[str], world: int) -> None:
        """Enter the agents of a generation of `world` ranks, in the order of nodes; one of them gets the copies."""
        self._own = own
        if not stores:
            return
        bereft = bool(self._copied_here - set(stores))
        self._stores, self._world = tuple(stores), max(1, world)
        target, nodes = "", len(stores)
        if own in stores:
            place = stores.index(own)
            target = stores[copy_place(place, nodes)]
            self._copied_here = {each for at, each in enumerate(stores) if copy_place(at, nodes) == place}
        if target == own:
            target = ""
        if target != self._target or bereft:
            # Also copy answers that were copied to this node, as their first holder may be lost.
            self._target, self._uncopied = target, dict(self._ranks)
        self._copy()

    async def close(self) -> None:
        """Stop copying."""
        if self._copying is not None:
            self._copying.cancel()
            await asyncio.wait({self._copying})

    # --- writing -------------------------------------------------------------------------------------------------

    def note(self, noted: AnswersNoted) -> None:
        """Keep answers, unless they belong to an earlier start of all workers."""
        if not self._enter(noted.build):
            return
        self._keep(noted.answers, noted.rank, copied=noted.copied)

    def _enter(self, build: int) -> bool:
        if build > self._build:
            self._build = build
            self._kept, self._ranks, self._uncopied, self._source = {}, {}, {}, {}
            self._brought.clear()
        return build == self._build

    def _keep(self, answers: dict[str, bytes], rank: int, *, copied: bool) -> None:
        for name, value in answers.items():
            self._kept.setdefault(name, value)
            self._ranks.setdefault(name, rank)
            if not copied and name not in self._brought:
                self._brought.add(name)
                self._uncopied[name] = rank
        if self._news is not None:
            self._news.set_result(None)
            self._news = None
        self._copy()

    def _copy(self) -> None:
        if self._uncopied and self._target and (self._copying is None or self._copying.done()):
            self._copying = supervised(self._copy_all(), "copying the answers that the first workers received", _failed)

    async def _copy_all(self) -> None:
        while self._uncopied and self._target:
            target, build = self._target, self._build
            names, size = list[str](), 0
            for name, rank in self._uncopied.items():
                if names and (size > _TOGETHER_BYTES or rank != self._uncopied[names[0]]):
                    break
                names.append(name)
                size += len(self._kept[name])
            rank = self._uncopied[names[0]]
            try:
                there = await self._peers.ask(target, AnswersAsked(build, rank, names, 0.0, here=True), _ANSWER_S)
                missing = {name: self._kept[name] for name in names if name not in there.also and name in self._kept}
                if missing and build == self._build:
                    await self._peers.ask(target, AnswersNoted(build, rank, missing, copied=True), _COPY_S)
            except StoreNodeLost:
                if target == self._target:
                    return  # The next generation has another target for copies.
                continue  # A new generation has begun meanwhile.
            if target == self._target and build == self._build:
                for name in names:
                    self._uncopied.pop(name, None)

    # --- reading -------------------------------------------------------------------------------------------------

    def at_once(self, asked: AnswersAsked) -> StoreReply | None:
        """The answer to a request that needs no other agent and no wait; else None."""
        found = self._find(asked)
        if found:
            return StoreReply(also=found)
        return StoreReply(error=TIMEOUT) if asked.here else None

    async def answer(self, asked: AnswersAsked) -> StoreReply:
        """Wait for the answer, here or on other agents."""
        until, looks = _now() + asked.timeout, 0
        while True:
            found = self._find(asked) or await self._elsewhere(asked, everybody=looks % _EVERYBODY == 1)
            if found:
                return StoreReply(also=found)
            if _now() >= until:
                return StoreReply(error=TIMEOUT)
            looks += 1
            await self._arrival(min(until, _now() + _LOOK_S))

    def _find(self, asked: AnswersAsked) -> dict[str, bytes]:
        if asked.build != self._build:
            return {}
        return {name: self._kept[name] for name in asked.names if name in self._kept}

    async def _arrival(self, until: Instant) -> None:
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        await asyncio.wait({self._news}, timeout=max(0.0, until - _now()))

    async def _elsewhere(self, asked: AnswersAsked, *, everybody: bool) -> dict[str, bytes]:
        whom = [store for store in self._who(asked.rank, everybody=everybody) if store != self._own]
        request = AnswersAsked(asked.build, asked.rank, asked.names, 0.0, here=True)
        found = await self._first(whom, request)
        # Do not keep a marker of the end: it would also hold for answers that have not arrived here yet.
        kept = {name: value for name, value in found.items() if name == asked.names[0] or name.startswith(_PIECE)}
        if kept and self._enter(asked.build):
            self._keep(kept, asked.rank, copied=False)
        return found

    def _who(self, rank: int, *, everybody: bool) -> Iterable[str]:
        source = self._source.get(rank)
        if everybody or not self._stores:
            return self._stores
        places = keepers(rank, self._world, len(self._stores))
        return dict.fromkeys([*([source] if source else []), *(self._stores[place] for place in places)])

    async def _first(self, whom: Sequence[str], request: AnswersAsked) -> dict[str, bytes]:
        """The answer of the first store that has an answer."""
        if not whom:
            return {}
        asking = {shared(self._peers.ask(store, request, _ANSWER_S)): store for store in whom}
        until, left = _now() + _ANSWER_S, set(asking)
        try:
            while left and _now() < until:
                done, left = await asyncio.wait(left, timeout=until - _now(), return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.exception() is None and task.result().also:
                        self._source[request.rank] = asking[task]
                        return task.result().also
            return {}
        finally:
            for task in asking:
                task.cancel()


def _failed(what: str, error: BaseException) -> None:
    _log.error("%s has failed", what, exc_info=error)


def _now() -> Instant:
    return asyncio.get_running_loop().time()
