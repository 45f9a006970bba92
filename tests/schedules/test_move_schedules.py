"""Moves of ranks among all that can go wrong: every promise of a job holds with them as without."""

import random
from collections import Counter

import msgspec
import pytest

from regrow.core.ids import JobId, Rank, StepNo
from regrow.core.job import JobSpec
from regrow.core.messages.vocabulary import Warmth
from regrow.core.records import IncidentClosed, IncidentOpened, Noted
from regrow.membership.orders import AnswerScale
from regrow_lab.sim.draws import draw
from regrow_lab.sim.faults import SimFault, SimRequest
from regrow_lab.sim.network import NetworkConditions
from regrow_lab.sim.schedule import SimSchedule
from regrow_lab.sim.script import Doing, SimScript
from regrow_lab.sim.world import World

_STAGES = (Doing.BUILDING, Doing.READY, Doing.COMPUTING, Doing.HALTED, Doing.FORMING, Doing.HYDRATING, Doing.WAITING)
"""Activities of workers while ranks move, in each of which some are killed."""


def with_moves(number: int) -> SimSchedule:
    """The schedule of a number in a job with a spare node, some of whose nodes or ranks are to move."""
    drawn, rng = draw(number), random.Random(f"moves {number}")
    spec = msgspec.structs.replace(drawn.spec, nodes=drawn.spec.nodes + 1, spares=1)
    moves = [
        SimRequest(
            "move",
            after=rng.uniform(0.0, 15.0),
            node=rng.randrange(spec.nodes),
            rank=rng.choice((None, None, Rank(rng.randrange(4)))),
        )
        for _ in range(rng.randint(1, 5))
    ]
    kills = [
        SimFault(
            "kill", rng.choice((None, *map(Rank, range(4)))), rng.choice(_STAGES), nth=rng.randint(1, 6), after=0.01
        )
        for _ in range(rng.randint(0, 3))
    ]
    script = msgspec.structs.replace(drawn.script, until=StepNo(25), build=rng.choice((0.2, 1.0)))
    requests, injected = [*drawn.requests, *moves], [*drawn.injected, *kills]
    return msgspec.structs.replace(drawn, spec=spec, script=script, requests=requests, injected=injected)


def run(number: int) -> World:
    schedule = with_moves(number)
    schedule.run(world := schedule.world())
    return world


@pytest.mark.parametrize("hundred", [0, *(pytest.param(hundred, marks=pytest.mark.full) for hundred in (1, 2))])
def test_jobs_whose_ranks_move_come_to_their_ends(hundred: int) -> None:
    seen: Counter[str] = Counter()
    for number in range(100 * hundred, 100 * hundred + 100):
        lines = [line for _, line in run(number).log]
        begun = {line.incident for line in lines if isinstance(line, IncidentOpened) and line.kind == "move"}
        ended = {line.incident for line in lines if isinstance(line, IncidentClosed) and line.kind == "move"}
        seen += Counter({"moved": len(ended), "became a fault": len(begun - ended)})
    assert seen["moved"] > 30 and seen["became a fault"] > 5, seen


def test_ranks_of_a_node_follow_one_of_their_replica_whose_newcomers_fail_there() -> None:
    """Whatever else strikes; and where nothing does they stand together again on the spare."""
    followed = 0
    for seed in range(60):
        rng = random.Random(f"islands {seed}")
        spec = JobSpec(JobId("islands"), 2, 2, 0, Warmth.BUILT, 100, 3600.0, None, True, unit=2)
        kills = [
            SimFault("kill", Rank(rng.randrange(4)), rng.choice(_STAGES), nth=rng.randint(4, 20), after=0.01)
            for _ in range(seed % 3)
        ]
        injected = [SimFault("kill", Rank(1), Doing.COMPUTING, nth=3), *kills]
        script = SimScript(until=StepNo(40), build=0.5, parts=2, fails=3)
        room = SimRequest("node", after=0.0, slots=2)
        schedule = SimSchedule(spec, script=script, injected=injected, requests=[room], seed=seed)
        schedule.run(world := schedule.world())
        texts = [line.text for _, line in world.log if isinstance(line, Noted)]
        followed += any("follows rank 1 of their replica" in text for text in texts)
        if not kills:
            roster = world.machine.roster
            homes = [roster.workers[roster.places[Rank(rank)]].node for rank in range(4)]
            assert homes[0] == homes[1] != homes[2] == homes[3]
            moves = [line for _, line in world.log if isinstance(line, IncidentClosed) and line.kind == "move"]
            assert [(move.faults, move.steps_lost) for move in moves] == [(0, 0)]
    assert followed > 20


def test_a_drain_close_to_a_move_never_stops_the_training_for_those_who_end_late() -> None:
    """Ranks leave by plan: nobody says that a node was lost, and their slots are taken as soon as they have ended."""
    moved = 0
    for seed in range(40):
        rng = random.Random(f"behind {seed}")
        spec = JobSpec(JobId("behind"), 2, 3, 0, Warmth.BUILT, 100, 3600.0, None, True, spares=1)
        first, second = SimRequest("move", after=rng.uniform(0.0, 5.0), node=1), rng.uniform(0.0, 10.0)
        drain = SimRequest("drain", after=first.after + second, node=rng.randrange(3), grace=60.0)
        schedule = SimSchedule(
            spec,
            SimScript(until=StepNo(60), build=0.5),
            NetworkConditions(late_exit=8.0),
            requests=[first, drain],
            seed=seed,
        )
        schedule.run(world := schedule.world())
        lines = [line for _, line in world.log]
        assert not [
            line.text for line in lines if isinstance(line, Noted) and ("lost" in line.text or "wait" in line.text)
        ]
        closed = [line for line in lines if isinstance(line, IncidentClosed)]
        assert {(line.faults, line.steps_lost, line.kind in ("move", "preempt")) for line in closed} <= {(0, 0, True)}
        assert all(line.total < 4.0 for line in closed), "none of them stands until others have ended"
        moved += {line.kind for line in closed} == {"move", "preempt"}
    assert moved > 10


def test_a_move_outlives_the_coordinator_that_had_accepted_it() -> None:
    """It is lost with its node, which has no ranks, while newcomers build; the next one moves them."""
    accepted = moved = 0
    for seed in range(30):
        rng = random.Random(f"accepted {seed}")
        spec = JobSpec(JobId("accepted"), 2, 4, 0, Warmth.BUILT, 100, 3600.0, None, True, spares=2)
        asked = SimRequest("move", after=rng.uniform(3.5, 6.0), node=1)
        loss = SimFault("coordinator", Rank(0), after=asked.after + rng.uniform(0.01, 1.5), back=2.0)
        script = SimScript(until=StepNo(80), build=2.0)
        schedule = SimSchedule(spec, script=script, injected=[loss], requests=[asked], seed=seed)
        schedule.run(world := schedule.world())
        lines = [line for _, line in world.log]
        moved += sum(isinstance(line, IncidentClosed) and line.kind == "move" for line in lines)
        if any(isinstance(line, AnswerScale) and line.accepted for line in lines):
            accepted += 1
            roster = world.machine.roster
            assert {roster.workers[name].node for name in roster.places.values()}.isdisjoint({"n1"}), seed
    assert accepted > 15 and moved > 10, (accepted, moved)
