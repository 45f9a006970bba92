"""The coordinator's remedy for a situation, found by simulating the situation.

The state machine is that of production, on a virtual clock, in a world of a few nodes: its rung depends on the lost and
the available workers, but not on the number of ranks. So each situation is simulated once, and decided by the code.
"""

from functools import cache

from regrow.core.errors import RegrowError
from regrow.core.ids import JobId, Rank, Seconds, StepNo
from regrow.core.job import JobSpec
from regrow.core.messages.vocabulary import Warmth
from regrow.core.records import IncidentClosed
from regrow_lab.fleet.deciding import Remedy, Situation, Trouble
from regrow_lab.sim.faults import SimFault, SimRequest
from regrow_lab.sim.script import Doing, SimScript
from regrow_lab.sim.world import World

_NODES, _RANKS = 4, 2
_STRUCK = Rank(3)
_AT_STEP = 20
_STEPS = StepNo(200)
_AWAY: Seconds = 50.0
"""Absence of a lost node: shorter than the job, and longer than any stage."""
_MOST_EVENTS = 5_000_000


def precedent(situation: Situation) -> Remedy:
    """The coordinator's remedy. Raises `RegrowError` if it ends the job."""
    trouble = situation.trouble
    survives = situation.survives and trouble is not Trouble.JOB
    gone = trouble in (Trouble.NODE, Trouble.DRAIN)
    asked = situation._replace(
        survives=survives, spare=situation.spare and gone, standby=situation.standby and not gone and survives
    )
    return _asked(asked)


@cache
def _asked(situation: Situation) -> Remedy:
    trouble, gone = situation.trouble, situation.trouble in (Trouble.NODE, Trouble.DRAIN)
    replicas = _NODES if situation.survives else 1
    """With one replica, a part of the state is lost with any worker."""
    elastic = situation.elastic and replicas > 1
    spec = JobSpec(
        job=JobId("asked"),
        nproc=_RANKS,
        nodes=_NODES + situation.spare,
        standbys=int(situation.standby),
        warmth=Warmth.BUILT,
        max_faults=1000,
        window=3600.0,
        max_restarts=None,
        durable=True,
        unit=_RANKS * _NODES // replicas,
        spares=int(situation.spare),
        node_deadline=1e6,
        min_replicas=1 if elastic else None,
        max_replicas=replicas if elastic else None,
    )
    script = SimScript(until=_STEPS, parts=spec.unit)
    world = World(spec, script=script, injected=_injected(situation), requests=_requests(situation), seed=1)
    end = world.run(most=_MOST_EVENTS)
    closed = [fact for _, fact in world.log if isinstance(fact, IncidentClosed)]
    if end.code or not closed:
        raise RegrowError(
            f"a simulated coordinator does not recover from this: {situation}: {end.diagnosis or 'it did nothing'}",
            hint="please report it with the scenario",
        )
    found = closed[-1] if trouble is Trouble.GROW else closed[0]
    return Remedy(
        rung=found.rung,
        waits=gone and found.total >= _AWAY / 2,
        resizes=found.before != found.after,
        from_checkpoint=found.rung == "restart",
    )


def _injected(situation: Situation) -> list[SimFault]:
    def fault(how: str, rank: Rank) -> SimFault:
        return SimFault(how, rank=rank, doing=Doing.COMPUTING, nth=_AT_STEP, back=_AWAY)

    match situation.trouble:
        case Trouble.WORKER:
            return [fault("kill", _STRUCK)]
        case Trouble.HANG:
            return [fault("hang", _STRUCK)]
        case Trouble.NODE | Trouble.GROW:
            return [fault("node", _STRUCK)]
        case Trouble.JOB:
            return [fault("kill", Rank(rank)) for rank in range(_RANKS * _NODES)]
        case Trouble.DRAIN:
            return []


def _requests(situation: Situation) -> list[SimRequest]:
    return (
        [SimRequest("drain", after=30.0, node=1, grace=5.0, back=_AWAY)] if situation.trouble is Trouble.DRAIN else []
    )
