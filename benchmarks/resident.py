"""Memory of a node's ranks that read the same corpus, each page counted once: for `data.py`."""

import ctypes
import mmap
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
from forking import Child, Failed, forked
from loaders import Body, Place, Reading, array, make_corpus, ours

from regrow.core.ids import Seconds

RANKS = (1, 2, 4, 8)
SIDES = {"ours": "shared", "memmap": "memmap", "loaded": "loaded"}
"""The measured sides, and the prefixes of their figures' names."""
BUDGET = 256 << 20
"""Size of the cache, in bytes."""
PATIENCE: Seconds = 900.0

_AREA = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)")
_GONE = " (deleted)"


class Memory(NamedTuple):
    """Bytes; a page that several processes map is divided among them (Pss).

    corpus: pages of the corpus in the page cache, mapped or not; 0 if none of these processes maps it. cache: pages of
    the node's cache, mapped or not, and of removed entries that are still mapped. rest: all else of the processes.
    """

    corpus: int
    cache: int
    rest: int


def family(pids: Sequence[int]) -> list[int]:
    """These processes and all their descendants."""
    started = (child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True))
    return [*pids, *started]


def memory(pids: Sequence[int], corpus: Path, cache: str) -> Memory:
    """Present memory of these processes and their descendants. `cache`: the cache's folder; empty: there is none."""
    of_corpus = of_cache = of_gone = rest = 0
    for pid in family(pids):
        for path, pss in _areas(pid):
            if path == str(corpus):
                of_corpus += pss
            elif cache and path.startswith(f"{cache}/"):
                of_cache += pss
                of_gone += pss if path.endswith(_GONE) else 0
            else:
                rest += pss
    held = sum(each.stat().st_blocks * 512 for each in Path(cache).rglob("*.entry")) if cache else 0
    return Memory(max(of_corpus, resident(corpus)) if of_corpus else 0, max(of_cache, held + of_gone), rest)


def _areas(pid: int) -> Iterable[tuple[str, int]]:
    path = ""
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        if found := _AREA.fullmatch(line):
            path = found[1]
        elif line.startswith("Pss:"):
            yield path, int(line.split()[1]) << 10


def resident(file: Path) -> int:
    """Bytes of a file that are in the page cache."""
    size = os.path.getsize(file)
    pages = -(-size // mmap.PAGESIZE)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    there = ctypes.create_string_buffer(pages)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as area:
        first = ctypes.c_char.from_buffer(area)
        failed = libc.mincore(ctypes.addressof(first), size, there)
        del first
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {file} failed")
    return mmap.PAGESIZE * sum(page & 1 for page in there.raw)


# --- the measurement --------------------------------------------------------------------------------------------------


@dataclass
class MemoryUsed:
    """Bytes by side and number of ranks, and the reasons for missing ones. `base`: memory of the processes alone."""

    gigabytes: float
    beyond: dict[str, dict[int, Memory]] = field(default_factory=lambda: {side: {} for side in SIDES})
    base: dict[str, dict[int, int]] = field(default_factory=lambda: {side: {} for side in SIDES})
    missing: list[str] = field(default_factory=list)

    def over_one(self, side: str) -> float | None:
        """Ratio of the memory of 8 ranks to that of one."""
        told = self.beyond[side]
        return sum(told[8]) / sum(told[1]) if 8 in told else None


def measure_memory(place: Place, size: int) -> MemoryUsed:
    """Measure every side with every number of ranks, on a corpus of `size` bytes."""
    folder = place.folder / "corpus-memory"
    file = make_corpus(folder, size // 2)
    result = MemoryUsed(size / 1e9)
    free = psutil.virtual_memory().available / 2
    reading = Reading(str(folder), length=1024, stride=8 * 1024, batch_size=16, shuffle=False, dtype=None)
    batches = size // 2 // reading.stride // reading.batch_size
    try:
        for ranks in RANKS:
            with place.node(reading, BUDGET) as node, node.producing() as producer:
                bodies = [ours(node, rank, ranks) for rank in range(ranks)]
                told = _through(bodies, producer, batches // ranks, partial(memory, corpus=file, cache=node.folder))
                _note(result, "ours", ranks, *told)
            look = partial(memory, corpus=file, cache="")
            bodies = [array(reading, file, rank, ranks, loaded=False) for rank in range(ranks)]
            base, after = _through(bodies, [], batches // ranks, look)
            _note(result, "memmap", ranks, base, after)
            if ranks * size > free:
                result.missing.append(
                    f"{ranks} ranks with {ranks} copies: half of the free memory is {free / 1e9:.0f} GB"
                )
                continue
            bodies = [array(reading, file, rank, ranks, loaded=True) for rank in range(ranks)]
            _, after = _through(bodies, [], batches // ranks, look)
            _note(result, "loaded", ranks, base, after)  # the same processes, now without data
    finally:
        shutil.rmtree(folder)
    return result


def _through(
    bodies: list[Body], others: list[Child], batches: int, look: Callable[[list[int]], Memory]
) -> tuple[Memory, Memory]:
    """Memory at the ranks' first batch, and after each has read `batches`."""
    with forked(*bodies) as ranks:
        for child in ranks:
            child.hear(PATIENCE)
        pids = [child.pid for child in (*ranks, *others)]
        settle(pids)
        base = look(pids)
        for child in ranks:
            child.tell([0, batches - 1])
        for child in ranks:
            child.hear(PATIENCE)
        settle(pids)
        return base, look(pids)


def _note(result: MemoryUsed, side: str, ranks: int, base: Memory, after: Memory) -> None:
    result.base[side][ranks] = base.rest
    result.beyond[side][ranks] = after._replace(rest=after.rest - base.rest)


def settle(pids: list[int]) -> Seconds:
    """Wait until these processes and their descendants are idle; returns their CPU seconds so far.

    Raises `Failed`.
    """
    deadline, before = time.monotonic() + PATIENCE, -1.0
    while (used := _cpu(pids)) - before > 0.01:
        if time.monotonic() > deadline:
            raise Failed("processes do not come to rest")
        before = used
        time.sleep(0.2)
    return used


def _cpu(pids: list[int]) -> Seconds:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in family(pids))
