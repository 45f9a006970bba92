"""Answers that need no wait and no other agent. Most are of this kind, as each rank's own keys are on its own agent.

They are given within the call in which a request arrived, without a separate task.
"""

from collections.abc import Container, Iterable

from regrow.agent.store.cached import CachedValues, Found
from regrow.agent.store.keys import KeyTable
from regrow.agent.store.ownership import KeyOwnership
from regrow.agent.store.published import Published
from regrow.core.errors import StoreRefusal
from regrow.core.ids import Generation
from regrow.core.messages.store import (
    StoreAdd,
    StoreAppend,
    StoreCheck,
    StoreCompareSet,
    StoreDelete,
    StoreGet,
    StoreLength,
    StoreMultiGet,
    StorePush,
    StoreReply,
    StoreRequest,
    StoreSet,
    StoreWait,
)

Rewrite = StoreSet | StoreAppend | StoreCompareSet | StoreDelete | StoreAdd
"""Changes of a value of which other agents may have copies."""
_DONE = StoreReply()


class PromptAnswers:
    """Answers the requests that one agent can answer by itself.

    Args:
        table: the keys whose home is this agent.
        copies: copies of keys whose home is another agent, and the holders of copies.
        ownership: the homes of keys.
        changing: keys whose copies are being forgotten.
    """

    def __init__(
        self, table: KeyTable, copies: CachedValues, ownership: KeyOwnership, changing: Container[str]
    ) -> None:
        self._table, self._copies, self._ownership, self._changing = table, copies, ownership, changing
        self.rewritten: set[str] = set()
        """Keys that were changed while copies existed; no further copies of these keys are given out."""
        self.published = Published(self._to_copy, self._to_announce)

    def answer(self, request: StoreRequest, caller: str) -> StoreReply | None:
        """The answer to a request; None if it needs a wait or another agent."""
        try:
            return self._answer(request, caller)
        except StoreRefusal as refused:
            return StoreReply(error=str(refused))

    def _answer(self, request: StoreRequest, caller: str) -> StoreReply | None:
        match request:
            case StoreGet(key=key, queue=queue):
                found = self._find(key, caller, queue=queue)
                return None if found is None else self.reply_to(request, found, caller)
            case StoreWait(keys=keys):
                return None if self._find_all(keys, queue=True) is None else _DONE
            case StoreSet() | StoreAdd() | StoreAppend() | StoreCompareSet() | StoreDelete():
                key = request.key
                free = key not in self._changing and not self._copies.is_held(key)
                return self.rewrite(request) if free and self._ownership.is_here(key) else None
            case StoreMultiGet(keys=keys):
                every = self._find_all(keys, queue=False)
                return None if every is None else StoreReply(values=[each.value or b"" for each in every])
            case StoreCheck(keys=keys):
                return None if self._find_all(keys, queue=True) is None else StoreReply(number=1)
            case StorePush(key=key, value=value):
                if not self._ownership.is_here(key):
                    return None
                self._table.push(key, value)
                return _DONE
            case StoreLength(key=key):
                return StoreReply(number=self._table.length(key)) if self._ownership.is_here(key) else None
            case _:
                return None

    def _find_all(self, keys: Iterable[str], *, queue: bool) -> list[Found] | None:
        every = []
        for key in keys:
            found = self._find(key, "", queue=queue)
            if found is None:
                return None
            every.append(found)
        return every

    def _find(self, key: str, caller: str, *, queue: bool) -> Found | None:
        here = self._ownership.is_here(key)
        if here:
            return self.find_here(key, caller, queue=queue)
        value = None if here is None else self._copies.get(key)
        return None if value is None else self.hand_out(key, value, caller)

    def find_here(self, key: str, caller: str, *, queue: bool) -> Found | None:
        """Find the value of a key whose home is this agent."""
        value = self._table.get(key)
        if value is not None:
            # Copies of a key that changes are not worth the work of forgetting them each time. A key that is being
            # changed keeps its old value until all copies are forgotten, and no new ones are made meanwhile.
            keep = bool(caller) and key not in self.rewritten
            if keep:
                self._copies.note(key, caller)
            return Found(value, keep)
        return Found(None, False) if queue and self._table.length(key) else None

    def hand_out(self, key: str, value: bytes, caller: str) -> Found:
        """Give out a cached value. The caller may keep it, and is noted as a holder, unless it was dropped here."""
        keep = bool(caller) and self._copies.get(key) is value
        if keep:
            self._copies.note(key, caller)
        return Found(value, keep)

    def reply_to(self, request: StoreGet, found: Found, caller: str) -> StoreReply:
        """The answer to a read, with further published keys if the caller wants them."""
        if found.value is None:
            return StoreReply(number=1)
        if request.has is None or (caller and not (found.keep and self._ownership.is_here(request.key))):
            return StoreReply(value=found.value, keep=found.keep)
        if not caller:
            also, has = self.published.to_worker(request.key, request.has)
            return StoreReply(value=found.value, also=also, has=has)
        also, has = self.published.to_agent(request.key, request.has)
        for key in also:
            self._copies.note(key, caller)
        return StoreReply(value=found.value, keep=True, also=also, has=has)

    def _to_copy(self, key: str) -> bytes | None:
        return None if key in self.rewritten else self._table.get(key)

    def _to_announce(self, key: str) -> bytes | None:
        return self._table.get(key) if self._ownership.is_here(key) else self._copies.get(key)

    def rewrite(self, request: Rewrite) -> StoreReply:
        """Change a value whose home is this agent. Raises `StoreRefusal`."""
        table = self._table
        match request:
            case StoreSet(key=key, value=value):
                table.put(key, value)
                self.published.note_written(key)
                return _DONE
            case StoreAppend(key=key, value=value):
                table.append(key, value)
                return _DONE
            case StoreAdd(key=key, amount=amount):
                return StoreReply(number=table.add(key, amount))
            case StoreCompareSet(key=key, expected=expected, desired=desired):
                return StoreReply(value=table.compare_set(key, expected, desired))
            case StoreDelete(key=key):
                return StoreReply(number=int(table.delete(key)))

    def drop_before(self, oldest: Generation) -> None:
        """Forget the keys of generations that are over."""
        self.published.drop_before(oldest)
        self.rewritten = {key for key in self.rewritten if not self._table.is_old(key)}
