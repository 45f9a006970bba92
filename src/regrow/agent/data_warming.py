"""A node that takes a lost one's place fetches what another node has kept for it, while its workers build.

What comes is not looked into: whoever reads an entry checks it. What fails is left: producers and workers make it.
"""

import asyncio
import contextlib
import logging
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from regrow.agent.data_door import IDENTITY, NAME
from regrow.core.config import AgentConfig
from regrow.core.ids import Seconds

_LISTING_S: Seconds = 2.0
_ENTRY_S: Seconds = 2.0
_BYTES_S = 16 << 20
"""An entry may take `_ENTRY_S`, and a second more for so many bytes."""
_ALL_S: Seconds = 60.0
_PART_BYTES = 1 << 20
_TAKING = "taking"
_log = logging.getLogger("regrow.agent")


async def warm(config: AgentConfig, mirror: str) -> int:
    """Fetch all that the node behind this door keeps for this one, within the cache's budget; how many came."""
    fetched = 0
    try:
        async with _session(config, mirror) as session, asyncio.timeout(_ALL_S):
            for identity, name, size in _in_order(await _listing(session, config), config.data_budget):
                fetched += await _fetch(session, Path(config.data_dir), identity, name, size)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        _log.info("%s took %d entries from %s, and no more: %r", config.node, fetched, mirror, error)
    return fetched


def _session(config: AgentConfig, endpoint: str) -> aiohttp.ClientSession:
    """Raises `ValueError`."""
    kind, _, place = endpoint.partition(":")
    if kind not in ("unix", "tcp"):
        raise ValueError(f"{endpoint!r} is no endpoint")
    unix = kind == "unix"
    return aiohttp.ClientSession(
        "http://localhost" if unix else f"http://{place}",
        connector=aiohttp.UnixConnector(path=place) if unix else None,
        headers={"Authorization": f"Bearer {config.token}"},
        raise_for_status=True,
    )


async def _listing(session: aiohttp.ClientSession, config: AgentConfig) -> Any:
    async with session.get(
        f"/data/mirror/{quote(config.node, safe='')}", timeout=aiohttp.ClientTimeout(total=_LISTING_S)
    ) as response:
        return await response.json()


def _in_order(listed: Any, budget: int) -> list[tuple[str, str, int]]:
    """Identity, name and bytes of what is fetched, the soonest needed first: names sort by step.

    Raises `ValueError` where that is no list of entries.
    """
    if not isinstance(listed, dict) or not all(isinstance(names, dict) for names in listed.values()):
        raise ValueError("its list of entries is none")
    found = [(name, identity, size) for identity, names in listed.items() for name, size in names.items()]
    wanted: list[tuple[str, str, int]] = []
    for name, identity, size in sorted(found, key=lambda each: each[:2]):
        if not IDENTITY.fullmatch(identity) or not NAME.fullmatch(name) or not isinstance(size, int) or size < 0:
            raise ValueError(f"it lists {identity!r}/{name!r}, which is no entry")
        budget -= size
        if budget < 0:
            break
        wanted.append((identity, name, size))
    return wanted


async def _fetch(session: aiohttp.ClientSession, folder: Path, identity: str, name: str, size: int) -> bool:
    place = folder / identity / name
    if await asyncio.to_thread(place.exists):
        return False
    draft = folder / _TAKING / secrets.token_hex(8)
    timeout = aiohttp.ClientTimeout(total=_ENTRY_S + size / _BYTES_S)
    try:
        async with session.get(f"/data/{identity}/{name}", timeout=timeout) as response:
            got = 0
            await asyncio.to_thread(draft.parent.mkdir, mode=0o700, exist_ok=True)
            with await asyncio.to_thread(draft.open, "xb") as file:
                async for part in response.content.iter_chunked(_PART_BYTES):
                    got += len(part)
                    await asyncio.to_thread(file.write, part)
        if got != size:
            raise ValueError(f"{name} has {got} bytes instead of {size}")
        await asyncio.to_thread(place.parent.mkdir, mode=0o700, exist_ok=True)
        draft.replace(place)
    except aiohttp.ClientResponseError as error:
        if error.status != 404:  # it was given up there meanwhile
            raise
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
    return True
