"""One agent's part of the job's store: it keeps the keys whose home it is, and gives its node access to all others.

Writes go straight to a key's home. Reads go through a tree of agents (`routing`), each of which caches the values that
it passes on. Additions go through the same tree, and those that meet on the way are combined into one. Every key is
linearizable: before a value that was given out changes, all copies of it are forgotten.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from regrow.agent.store.cached import CachedValues, Fetch, Found
from regrow.agent.store.keys import KeyTable, generation_of
from regrow.agent.store.ownership import KeyOwnership, KeyRoute
from regrow.agent.store.peers import StorePeers
from regrow.agent.store.prompt import PromptAnswers, Rewrite
from regrow.core.errors import StoreNodeLost, StoreRefusal
from regrow.core.ids import Generation, Instant, Seconds
from regrow.core.messages.store import (
    TIMEOUT,
    AnswersAsked,
    AnswersNoted,
    StoreAdd,
    StoreAppend,
    StoreCancel,
    StoreCheck,
    StoreCompareSet,
    StoreCount,
    StoreDelete,
    StoreForget,
    StoreGet,
    StoreHello,
    StoreLength,
    StoreList,
    StoreMessage,
    StoreMultiGet,
    StoreMultiSet,
    StorePop,
    StorePush,
    StoreReply,
    StoreRequest,
    StoreSet,
    StoreTable,
    StoreWait,
)
from regrow.core.process.tasks import Tasks, seen, shared

ANSWER_S: Seconds = 30.0
"""Longest wait for another agent's answer to a request that needs no wait there."""
_FORGET_S: Seconds = 10.0
_WAIT_LIMIT_S: Seconds = 24 * 3600.0
_log = logging.getLogger("regrow.agent")
Result = TypeVar("Result")
Change = StoreSet | StoreAppend | StoreCompareSet | StoreDelete | StorePush | StorePop | StoreLength


class StoreNode:
    """One agent's part of the store.

    Args:
        address: address at which other agents reach this one.
        peers: connections to the other agents.
        alone: the job has only this agent, which keeps every key.
    """

    def __init__(self, address: str, peers: StorePeers, *, alone: bool) -> None:
        self.address = address
        self.table = KeyTable()
        self.copies = CachedValues()
        self._peers = peers
        self._ownership = KeyOwnership(address, alone=alone)
        self._changing: dict[str, asyncio.Future[None]] = {}
        self._prompt = PromptAnswers(self.table, self.copies, self._ownership, self._changing)
        self._received: dict[tuple[Generation | None, str], int] = {}
        """Number of another agent's published keys that were received from it, by generation and agent."""
        self._sums: dict[str, list[tuple[int, asyncio.Future[int]]]] = {}
        self._summing = Tasks(lambda key, error: _log.error("the sum of %r failed", key, exc_info=error))

    def learn(self, generation: Generation, stores: Sequence[str], world: int) -> None:
        """Enter the agents over which the keys of this generation are distributed; all agents enter the same."""
        self._ownership.learn(generation, stores, world)

    def drop_before(self, oldest: Generation) -> None:
        """Drop the keys of earlier generations, and end requests that wait for them."""
        self.table.drop_before(oldest)
        self._prompt.drop_before(oldest)
        self._received = {at: has for at, has in self._received.items() if at[0] is not None and at[0] >= oldest}
        self.copies.drop(self.table.is_old)
        self._peers.keep_only(self._ownership.drop_before(oldest))

    # --- requests ----------------------------------------------------------------------------------------------

    def at_once(self, request: StoreRequest, caller: str = "") -> StoreReply | None:
        """The answer to a request by a worker of this node, or by the agent `caller`; None: `carry_out` answers it."""
        return self._prompt.answer(request, caller)

    async def carry_out(self, request: StoreRequest, caller: str = "") -> StoreReply:
        """Answer a request that `at_once` cannot answer."""
        try:
            return await self._carry_out(request, caller)
        except StoreRefusal as refused:
            return StoreReply(error=str(refused))

    async def _carry_out(self, request: StoreRequest, caller: str) -> StoreReply:
        match request:
            case StoreGet(key=key, timeout=timeout, queue=queue):
                found = await self._read(key, _until(timeout), caller, queue=queue)
                return StoreReply(error=TIMEOUT) if found is None else self._prompt.reply_to(request, found, caller)
            case StoreMultiGet(keys=keys, timeout=timeout):
                every = await self._read_all(keys, timeout, queue=False)
                if every is None:
                    return StoreReply(error=TIMEOUT)
                return StoreReply(values=[each.value or b"" for each in every])
            case StoreWait(keys=keys, timeout=timeout):
                every = await self._read_all(keys, timeout, queue=True)
                return StoreReply() if every is not None else StoreReply(error=TIMEOUT)
            case StoreCheck(keys=keys):
                return StoreReply(number=int(await self._read_all(keys, 0.0, queue=True) is not None))
            case StoreAdd(key=key, amount=amount):
                return StoreReply(number=await self._add(key, amount))
            case StoreMultiSet(keys=keys, values=values):
                if len(keys) != len(values):
                    raise StoreRefusal(f"{len(keys)} keys, but {len(values)} values")
                for key, value in zip(keys, values, strict=True):
                    _refuse(await self._change(StoreSet(key, value), caller))
                return StoreReply()
            case StoreCount() | StoreList():
                return await self._look(request)
            case StoreForget(key=key):
                await self._forget(key, self.copies.forget(key))
                return StoreReply()
            case StoreHello() | StoreCancel():
                raise StoreRefusal("the greeting was sent twice")
            case StoreTable() | AnswersNoted() | AnswersAsked():
                raise StoreRefusal("no tables and no answers of a set-up are kept here")
            case _:
                return await self._change(request, caller)

    async def _change(self, request: Change, caller: str) -> StoreReply:
        """Carry out a change at the key's home."""
        way = await self._ownership.to(request.key)
        if way is not None:
            return await self._at_home(way, request, caller)
        match request:
            case StorePush(key=key, value=value):
                self.table.push(key, value)
                return StoreReply()
            case StorePop(key=key, timeout=timeout):
                return await self._pop(key, _until(timeout))
            case StoreLength(key=key):
                return StoreReply(number=self.table.length(key))
            case _:
                return await self._write(request)

    async def _at_home(self, way: KeyRoute, request: Change, caller: str) -> StoreReply:
        """The answer of the key's home to a change; a pop may have to wait there."""
        if caller:
            raise StoreRefusal("two agents disagree about where a key lives")
        within = ANSWER_S + (min(request.timeout, _WAIT_LIMIT_S) if isinstance(request, StorePop) else 0.0)
        try:
            return await self._peers.ask(way.home, request, within)
        except StoreNodeLost as lost:
            raise StoreRefusal(f"the agent that keeps the key was lost: {lost}") from lost

    async def _look(self, request: StoreCount | StoreList) -> StoreReply:
        agents = None if request.here else await self._ownership.agents(request.prefix)
        if agents is None:
            keys = self.table.keys(request.prefix)
            return StoreReply(number=len(keys)) if isinstance(request, StoreCount) else StoreReply(keys=keys)
        here = type(request)(prefix=request.prefix, here=True)
        replies = await _all([self._look_at(store, here) for store in agents.stores if store != self.address])
        replies.append(await self._look(here))
        return StoreReply(number=sum(reply.number for reply in replies), keys=[key for r in replies for key in r.keys])

    async def _look_at(self, store: str, request: StoreCount | StoreList) -> StoreReply:
        try:
            return await self._peers.ask(store, request, ANSWER_S)
        except StoreNodeLost as lost:
            raise StoreRefusal(f"keys cannot be listed: {lost}") from lost

    # --- reading -----------------------------------------------------------------------------------------------

    async def _read_all(self, keys: list[str], timeout: Seconds, *, queue: bool) -> list[Found] | None:
        """Read all keys; None if one of them does not arrive in time."""
        until = _until(timeout)
        found = await _all([self._read(key, until, "", queue=queue) for key in keys])
        there = [each for each in found if each is not None]
        return there if len(there) == len(keys) else None

    async def _read(self, key: str, until: Instant, caller: str, *, queue: bool) -> Found | None:
        """Read a key, waiting until it appears; None if it does not appear in time."""
        way = await self._ownership.to(key)
        if way is None:
            return await self._read_here(key, until, caller, queue=queue)
        waits = until > _now()
        while True:
            self.table.refuse_old(key)
            value = self.copies.get(key)
            if value is not None:
                return self._prompt.hand_out(key, value, caller)
            fetch = self.copies.fetch((key, waits, queue)) or self._begin(way, Fetch((key, waits, queue), until))
            early = not fetch.sent
            grace = ANSWER_S if fetch.until <= until else 0.0  # The asked agent itself reports the end of its wait.
            found = await fetch.result(max(0.0, until - _now()) + grace)
            if found is None:
                self.table.refuse_old(key)
                if not waits or _now() >= until:
                    return None
            elif early or found.keep:
                return (
                    found._replace(keep=False)
                    if found.value is None
                    else self._prompt.hand_out(key, found.value, caller)
                )

    def _begin(self, way: KeyRoute, fetch: Fetch) -> Fetch:
        self.copies.begin(fetch)
        fetch.start(lambda begun: self._fetch(way, begun), lambda: self.copies.end(fetch))
        return fetch

    async def _fetch(self, way: KeyRoute, fetch: Fetch) -> Found | None:
        fetch.sent = True
        key, waits, queue = fetch.key
        left = max(0.0, fetch.until - _now()) if waits else 0.0
        at = (generation_of(key), way.home)
        has = self._received.get(at, 0) if way.hop == way.home else None
        reply = await self._ask_up(way, StoreGet(key, left, queue, has), left + ANSWER_S)
        if reply.error == TIMEOUT:
            return None
        _refuse(reply)
        if reply.number:
            return Found(None, False)
        if reply.keep and not fetch.spoiled:
            self._received[at] = max(reply.has, self._received.get(at, 0))
            for other, value in {key: reply.value, **reply.also}.items():
                if other not in fetch.forgotten:
                    self.copies.keep(other, value)
                    self._prompt.published.note_known(other)
        return Found(reply.value, reply.keep)

    async def _ask_up(self, way: KeyRoute, request: StoreMessage, within: Seconds) -> StoreReply:
        """Ask through the tree; ask the home directly if an agent on the way, which had only copies, was lost."""
        try:
            return await self._peers.ask(way.hop, request, within)
        except StoreNodeLost as lost:
            if way.hop == way.home:
                raise StoreRefusal(f"the agent that keeps the key was lost: {lost}") from lost
            _log.warning("a key is read around an agent: %s", lost)
        try:
            return await self._peers.ask(way.home, request, within)
        except StoreNodeLost as lost:
            raise StoreRefusal(f"the agent that keeps the key was lost: {lost}") from lost

    async def _read_here(self, key: str, until: Instant, caller: str, *, queue: bool) -> Found | None:
        while True:
            found = self._prompt.find_here(key, caller, queue=queue)
            if found is not None:
                return found
            if not await self._arrives(key, until):
                return None

    async def _arrives(self, key: str, until: Instant) -> bool:
        left = until - _now()
        if left <= 0:
            return False
        arrival = self.table.arrival(key)
        try:
            await asyncio.wait({arrival}, timeout=left)
            if arrival.done():
                arrival.result()
            return arrival.done()
        finally:
            arrival.cancel()

    async def _pop(self, key: str, until: Instant) -> StoreReply:
        while (value := self.table.pop(key)) is None:
            if not await self._arrives(key, until):
                return StoreReply(error=TIMEOUT)
        return StoreReply(value=value)

    # --- writing -----------------------------------------------------------------------------------------------

    async def _await_changes(self, key: str) -> None:
        """Wait until no change of the key is under way."""
        while (change := self._changing.get(key)) is not None:
            await asyncio.wait({change})

    async def _write(self, request: Rewrite) -> StoreReply:
        """Change a value whose home is this agent, once no copy of it is left anywhere."""
        key = request.key
        await self._await_changes(key)
        holders = self.copies.forget(key)
        if not holders:
            return self._prompt.rewrite(request)
        self._prompt.rewritten.add(key)
        done = self._changing[key] = asyncio.get_running_loop().create_future()
        try:
            await self._forget(key, holders)
            holders = set()
            return self._prompt.rewrite(request)
        finally:
            self.copies.restore(key, holders)
            del self._changing[key]
            done.set_result(None)

    async def _forget(self, key: str, holders: set[str]) -> None:
        """Order all holders to forget a key. An unreachable holder has ended with its copies, or soon learns of it."""
        for outcome in await asyncio.gather(
            *(self._peers.ask(holder, StoreForget(key), _FORGET_S) for holder in sorted(holders)),
            return_exceptions=True,
        ):
            if isinstance(outcome, StoreNodeLost):
                _log.warning("a copy of %r was not forgotten: %s", key, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    # --- adding ------------------------------------------------------------------------------------------------

    async def _add(self, key: str, amount: int) -> int:
        """Add to a counter, here or through the tree, combined with additions that others make in the meantime."""
        way = await self._ownership.to(key)
        if way is None:
            return (await self._write(StoreAdd(key, amount))).number
        mine: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        mine.add_done_callback(seen)
        if key in self._sums:
            self._sums[key].append((amount, mine))
        else:
            self._sums[key] = [(amount, mine)]
            self._summing.start(self._sum(key, way), key)
        return await mine

    async def _sum(self, key: str, way: KeyRoute) -> None:
        while parts := self._sums[key]:
            self._sums[key] = []
            try:
                # Not repeated after the loss of an agent, as the addition may have been carried out.
                reply = await self._peers.ask(way.hop, StoreAdd(key, sum(amount for amount, _ in parts)), ANSWER_S)
                error = reply.error
            except StoreNodeLost as lost:
                error = f"an agent on the way to the key was lost, and whether it was added to is unknown: {lost}"
            except Exception as defect:  # noqa: BLE001 - all waiting callers get the error
                error = f"a defect of regrow, and whether the key was added to is unknown: {defect!r}"
            total = 0 if error else reply.number - sum(amount for amount, _ in parts)
            for amount, waiting in parts:
                total += amount
                if waiting.done():
                    continue  # The caller has left.
                if error:
                    waiting.set_exception(StoreRefusal(error))
                else:
                    waiting.set_result(total)
        del self._sums[key]


def _now() -> Instant:
    return asyncio.get_running_loop().time()


def _until(timeout: Seconds) -> Instant:
    return _now() + min(max(timeout, 0.0), _WAIT_LIMIT_S)


def _refuse(reply: StoreReply) -> None:
    if reply.error:
        raise StoreRefusal(reply.error)


async def _all(works: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all of these coroutines; returns the results in order. The first error cancels the others."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [shared(work) for work in works]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        return [task.result() for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
