"""Faults of `chaos.py`: their kinds, their frequencies, and their implementation."""

import os
import random
import signal
import time
from contextlib import suppress

from chaos_jobs import HOSTS, WORLD, Job, Stuck

PAUSE_S, WEATHER_S, CUT_S, RECOVERY_S = 5.0, 3.0, 20.0, 90.0
DELAY_S, LOSS = 0.2, 0.05
DECK = {
    "rank killed": 24,
    "two ranks killed": 2,
    "rank hangs": 2,
    "agent killed": 1,
    "agent paused": 2,
    "coordinator paused": 1,
    "coordinator killed": 1,
    "host killed": 2,
    "coordinator's host killed": 1,
    "link cut": 1,
    "link cut one way": 1,
    "200 ms delay": 1,
    "5 % loss": 1,
}
"""Number of faults of each kind among 40."""
QUICK_DECK = {**dict.fromkeys(DECK, 1), "rank killed": 4}


def plan(seed: int, faults: int, *, quick: bool) -> list[str]:
    """Draw `faults` kinds in an order from the seed, with the frequencies of the table."""
    draw, deck = random.Random(seed), QUICK_DECK if quick else DECK
    cards: list[str] = []
    while len(cards) < faults:
        fresh = [kind for kind, count in deck.items() for _ in range(count)]
        draw.shuffle(fresh)
        cards += fresh
    return cards[:faults]


def strike(job: Job, kind: str, draw: random.Random) -> None:
    """Inject one fault, and undo it as a cluster would: links come back."""
    rank, coordinator = draw.randrange(WORLD), job.coordinator
    other = (rank + draw.randrange(1, WORLD)) % WORLD
    away = draw.choice(sorted({job.host_of(rank) for rank in range(WORLD)} - {coordinator}))
    match kind:
        case "rank killed":
            os.kill(job.progress.pids[rank], signal.SIGKILL)
        case "two ranks killed":
            first, second = job.progress.pids[rank], job.progress.pids[other]
            os.kill(first, signal.SIGKILL)
            time.sleep(draw.uniform(0.0, 0.3))
            with suppress(ProcessLookupError):  # under torchrun all processes of a host may have ended by then
                os.kill(second, signal.SIGKILL)
        case "rank hangs":
            os.kill(job.progress.pids[rank], signal.SIGSTOP)
        case "agent paused" | "coordinator paused":
            pid = job.agent(away) if kind == "agent paused" else job.launcher(coordinator)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(PAUSE_S)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        case "agent killed":
            os.kill(job.agent(away), signal.SIGKILL)
        case "coordinator killed":
            os.kill(job.launcher(coordinator), signal.SIGKILL)
        case "host killed" | "coordinator's host killed":
            job.network.kill(away if kind == "host killed" else coordinator)
        case "link cut" | "link cut one way":
            _cut(job, away, one_way=kind != "link cut")
        case "200 ms delay" | "5 % loss":
            job.network.weather(**({"delay": DELAY_S} if kind == "200 ms delay" else {"loss": LOSS}))
            time.sleep(WEATHER_S)
            job.network.weather()


def _cut(job: Job, host: int, *, one_way: bool) -> None:
    """Cut a host's link until the job continues without that host, or until a time limit."""
    before, others = job.progress.newest, [other for other in range(HOSTS) if other != host]
    if one_way:
        for other in others:
            job.network.lose(host, other)
    else:
        job.network.cut(host)
    try:
        with suppress(Stuck):
            job.wait(before + 10, CUT_S)
    finally:
        if one_way:
            for other in others:
                job.network.find(host, other)
        else:
            job.network.join(host)
