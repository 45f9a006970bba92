"""Schedules drawn from a number, so that the number is enough to repeat a run."""

import random
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from regrow.core.ids import JobId, Rank, StepNo
from regrow.core.job import JobSpec
from regrow.core.messages.vocabulary import Warmth
from regrow_lab.sim.faults import SimFault, SimRequest
from regrow_lab.sim.network import NetworkConditions
from regrow_lab.sim.schedule import Promised, SimSchedule
from regrow_lab.sim.script import IN_STEP, Doing, SimScript

_MOMENTS: list[Doing | None] = [
    *(doing for doing in Doing if doing is not Doing.DEAD),
    *sorted(IN_STEP),
    *sorted(IN_STEP),
    None,
]
_MENDABLE = ("kill", "kill", "body", "hang", "stall", "slow", "node", "freeze", "disk")
_ALL = ("kill", "hang", "stall", "slow", "raise", "body", "exit", "node", "freeze", "disk")
_REPLACING = (
    *("kill", "kill", "kill", "refuted", "refuted", "alone", "memory"),
    *("hang", "body", "node", "freeze", "disk", "defect", "late defect"),
)
_MOST_DEFECTS = 2
"""With more in a minute the coordinator gives up."""
_MOST_FAULTS, _MOST_REQUESTS = 8, 6
_Of = TypeVar("_Of")


def draw(seed: int) -> SimSchedule:
    """The schedule of this number: one that must reach its last step, one with an elastic world, or any other."""
    rng = random.Random(f"schedule {seed}")
    kind = rng.choice(("mendable", "mendable", "elastic", "any"))
    elastic, mendable = kind == "elastic", kind != "any"
    spec = _elastic_job(rng) if elastic else _job(rng, mendable)
    spec = msgspec.structs.replace(spec, checkpoint_every=_one(rng, (0.0, 0.5, 2.0)) if spec.durable else 0.0)
    backs: tuple[float | None, ...] = (0.0, 1.0, 20.0) if mendable else (None, 1.0, 20.0, 700.0)
    injected = [_drawn_fault(rng, _MENDABLE if mendable else _ALL, backs) for _ in range(rng.randint(0, _MOST_FAULTS))]
    requests = [_request(rng) for _ in range(rng.randint(0, _MOST_REQUESTS))] if elastic else []
    return SimSchedule(
        spec,
        script=SimScript(until=StepNo(20), build=1.0, after=0.3) if elastic else SimScript(until=StepNo(6)),
        weather=_weather(rng, fair=mendable),
        injected=injected,
        requests=requests,
        slots=rng.randint(2, 5) if elastic else None,
        seed=seed,
        promise=Promised.THE_LAST_STEP if mendable else Promised.AN_END,
    )


def draw_replacing(seed: int) -> SimSchedule:
    """A schedule with refuted or failing newcomers, state left in agents' memory, and requests to stop the job."""
    rng = random.Random(f"replacing {seed}")
    mendable = rng.random() < 0.6
    spec = _job(rng, mendable)
    every = _one(rng, (0.0, 0.5, 2.0)) if spec.durable else 0.0
    spec = msgspec.structs.replace(spec, checkpoint_every=every, max_restarts=None)
    backs: tuple[float | None, ...] = (0.0, 1.0, 20.0) if mendable else (None, 1.0, 20.0, 700.0)
    hows = _REPLACING if mendable else (*_REPLACING, "raise", "exit")
    injected = [_drawn_fault(rng, hows, backs) for _ in range(rng.randint(0, _MOST_FAULTS))]
    if rng.random() < 0.5:
        shown = SimFault(_one(rng, ("refuted", "alone")), Rank(0), Doing.COMPUTING, nth=rng.randint(1, 3))
        lost = Rank(rng.randrange(spec.world))
        killed = SimFault("kill", lost, _one(rng, sorted(IN_STEP)), nth=rng.randint(1, 5), after=0.01)
        injected = [shown, killed, *injected[:4]]
    defects = [fault for fault in injected if "defect" in fault.how]
    injected = [fault for fault in injected if fault not in defects[_MOST_DEFECTS:]]
    stop = SimRequest(_one(rng, ("stop", "signals")), rng.uniform(0.0, 20.0), grace=_one(rng, (0.0, 0.5, 5.0, 60.0)))
    script = SimScript(
        until=StepNo(_one(rng, (6, 20))),
        build=1.0,
        after=0.3,
        parts=_one(rng, (0, 0, 2, spec.world)),
        fails=_one(rng, (0, 0, 1, 2, -1)),
    )
    return SimSchedule(
        spec,
        script=script,
        weather=_weather(rng, fair=mendable),
        injected=injected,
        requests=[stop] if rng.random() < 0.4 else [],
        seed=seed,
        promise=Promised.THE_LAST_STEP if mendable else Promised.AN_END,
    )


def _job(rng: random.Random, mendable: bool) -> JobSpec:
    nodes = rng.randint(1, 3)
    return JobSpec(
        JobId("sim"),
        nproc=rng.randint(1, 4 if nodes == 1 else 2),
        nodes=nodes,
        standbys=rng.randint(0, 2),
        warmth=_one(rng, list(Warmth)),
        max_faults=10_000 if mendable else _one(rng, (3, 100)),
        window=3600.0,
        max_restarts=None if mendable else _one(rng, (None, 0, 3)),
        durable=mendable or rng.random() < 0.5,
        build_deadline=300.0,
    )


def _elastic_job(rng: random.Random) -> JobSpec:
    nodes = rng.randint(1, 3)
    nproc = rng.randint(1, 2 if nodes == 1 else 1)
    replicas = nproc * nodes
    return JobSpec(
        JobId("sim"),
        nproc=nproc,
        nodes=nodes,
        standbys=rng.randint(0, 1),
        warmth=_one(rng, list(Warmth)),
        max_faults=10_000,
        window=3600.0,
        max_restarts=None,
        durable=True,
        build_deadline=300.0,
        min_replicas=rng.randint(1, replicas),
        max_replicas=replicas + rng.randint(0, 3),
        change_pause=_one(rng, (0.0, 0.0, 5.0)),
        leave_deadline=20.0,
    )


def _drawn_fault(rng: random.Random, hows: Sequence[str], backs: Sequence[float | None]) -> SimFault:
    return SimFault(
        _one(rng, hows),
        rank=_one(rng, (None, *map(Rank, range(4)))),
        doing=_one(rng, _MOMENTS),
        nth=rng.randint(1, 7),
        after=_one(rng, (0.0, 0.001, 0.01, 0.1, 0.5, 3.0)),
        back=_one(rng, backs),
    )


def _request(rng: random.Random) -> SimRequest:
    return SimRequest(
        _one(rng, ("scale", "scale", "node", "drain")),
        after=rng.uniform(0.0, 15.0),
        replicas=rng.randint(0, 6),
        node=rng.randint(0, 3),
        grace=_one(rng, (0.5, 5.0, 60.0)),
        slots=rng.randint(1, 3),
        back=_one(rng, (0.0, 3.0, 20.0)),
        stay=_one(rng, (None, None, None, 0.1, 100.0)),
    )


def _weather(rng: random.Random, *, fair: bool) -> NetworkConditions:
    return NetworkConditions(
        delay=_one(rng, (0.0, 0.002, 0.1)),
        slow=_one(rng, (0.0, 0.05)),
        slow_by=3.0 if fair else _one(rng, (5.0, 40.0, 200.0)),
        repeated=_one(rng, (0.0, 0.1, 0.5, 0.9)),
        lost=0.0 if fair else _one(rng, (0.0, 0.02, 0.1)),
        late_exit=_one(rng, (0.0, 0.5, 8.0)),
        overtaking_exit=_one(rng, (0.0, 0.5)),
    )


def _one(rng: random.Random, of: Sequence[_Of]) -> _Of:
    return of[rng.randrange(len(of))]
