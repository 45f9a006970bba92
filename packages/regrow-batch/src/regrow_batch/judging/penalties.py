"""Finds out whether a worker heeds the LZ penalty that rows ask for: one that does not takes anything for it."""

import asyncio

from regrow.core.process.tasks import shared
from regrow_batch.rows import BatchRow
from regrow_batch.sending import Sender

HEEDED, MISSING, UNKNOWN = "heeded", "missing", "unknown"
_NONSENSE = {"lz_strength": "no number"}
_REFUSES = (400, 422)


class Penalties:
    """Knowledge of workers' penalties.

    Args:
        sender: speaks with them.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._known: dict[tuple[str, tuple[str, str]], asyncio.Task[str]] = {}

    async def at(self, url: str, row: BatchRow) -> str:
        """Ask, once for each kind of rows, if a worker heeds the penalty that a row asks for."""
        key = (url, row.kind)
        task = self._known.get(key)
        if task is None:
            task = self._known[key] = shared(self._ask(url, row))
        return await asyncio.shield(task)

    async def _ask(self, url: str, row: BatchRow) -> str:
        """Send a strength that means nothing: who has the penalty refuses it, who has not never looks at it."""
        asked = row.with_fields({"vllm_xargs": _NONSENSE, "custom_params": _NONSENSE, "max_tokens": 1})
        outcome = await self._sender.send(url, asked)
        status = getattr(outcome, "status", 0)
        return HEEDED if status in _REFUSES else MISSING if status == 200 else UNKNOWN

    def forget(self, url: str) -> None:
        """A worker has come back, maybe as another."""
        for key in [key for key in self._known if key[0] == url]:
            del self._known[key]
