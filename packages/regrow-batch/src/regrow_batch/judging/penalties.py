"""Checks whether a worker applies the LZ penalty that rows ask for: a server without it accepts any parameters."""

import asyncio

from regrow.core.process.tasks import shared
from regrow_batch.rows import BatchRow
from regrow_batch.sending import Sender

HEEDED, MISSING, UNKNOWN = "heeded", "missing", "unknown"
_NONSENSE = {"lz_strength": "no number"}
_REFUSES = (400, 422)


class Penalties:
    """Results of the check for each worker and kind of rows.

    Args:
        sender: sends rows to workers.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._known: dict[tuple[str, tuple[str, str]], asyncio.Task[str]] = {}

    async def at(self, url: str, row: BatchRow) -> str:
        """Check, once for each kind of rows, whether a worker applies the penalty that a row asks for."""
        key = (url, row.kind)
        task = self._known.get(key)
        if task is None:
            task = self._known[key] = shared(self._ask(url, row))
        return await asyncio.shield(task)

    async def _ask(self, url: str, row: BatchRow) -> str:
        """Send an invalid strength: a worker that has the penalty refuses it, one that has not ignores it."""
        asked = row.with_fields({"vllm_xargs": _NONSENSE, "custom_params": _NONSENSE, "max_tokens": 1})
        outcome = await self._sender.send(url, asked)
        status = getattr(outcome, "status", 0)
        return HEEDED if status in _REFUSES else MISSING if status == 200 else UNKNOWN

    def forget(self, url: str) -> None:
        """Drop the results of a worker that has come back, maybe as another server."""
        for key in [key for key in self._known if key[0] == url]:
            del self._known[key]
