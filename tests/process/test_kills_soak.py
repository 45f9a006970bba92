"""A thousand kills drawn at random, in trains of many to a job: every job ends as if nobody had been killed.

`REGROW_SOAK_KILLS` says how many kills there are in sum, `REGROW_SOAK_SEED` which. A failure names its train, which can
be run again alone: the kills of a train depend on its mode, its place and the seed.
"""

import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from tests.process.launching import Site, site
from tests.process.training import Fault, Outcome, assert_equal, train

from regrow.core.messages.vocabulary import FaultHow, FaultStage

KILLS = int(os.environ.get("REGROW_SOAK_KILLS", "1000"))
SEED = int(os.environ.get("REGROW_SOAK_SEED", "1"))
MOST = 64
"""Kills of one train."""
PATIENCE = 1200.0
EVALUATED = 3
"""Steps from one restartable function to the next."""
S = FaultStage
STEP = (S.DATA, S.BEGIN, S.FORWARD, S.BACKWARD, S.REDUCE, S.UPDATE, S.COMMIT, S.AFTER)


@dataclass(frozen=True)
class Mode:
    """A kind of world.

    Attributes:
        stages: where a single kill may strike.
        replicas: for each rank those that hold the same shard, and must not die together with it: there is no other.
        lost: how many committed steps a kill may cost; None: none, where somebody lives who has committed them.
        roll: whether survivors can be killed while they roll forward.
        share: how large a part of all kills is its own.
    """

    script: str
    world: int
    stages: tuple[FaultStage, ...]
    flags: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    nodes: int = 1
    replicas: dict[int, set[int]] = field(default_factory=dict)
    lost: int | None = None
    roll: bool = False
    share: float = 0.3

    def others(self, rank: int) -> list[int]:
        """Ranks that may die at the same time."""
        return [other for other in range(self.world) if other != rank and other not in self.replicas.get(rank, ())]


PARALLEL = "train_parallel.py"
MODES = {
    "ddp": Mode("train_small.py", 3, STEP),
    "ddp-between": Mode(
        "train_between.py", 3, (*STEP, S.BETWEEN, S.BETWEEN), extra=("--habits", "between,guarded,restartable")
    ),
    "fsdp2-copies": Mode(
        PARALLEL,
        4,
        (*STEP, S.VOTE),
        ("--buddy-every", "1"),
        extra=("--mode", "fsdp2", "--layers", "1"),
        nodes=2,
        lost=1,
        share=0.2,
    ),
    "hsdp": Mode(
        PARALLEL,
        4,
        (*STEP, S.VOTE),
        extra=("--mode", "hsdp", "--layers", "1"),
        replicas={0: {2}, 1: {3}, 2: {0}, 3: {1}},
        roll=True,
        share=0.2,
    ),
}


@dataclass
class Train:
    """Faults to strike a job.

    Attributes:
        spared: faults that need not strike, since another of the same step may keep all ranks from coming to it again.
    """

    faults: list[Fault]
    spared: set[Fault]
    steps: int

    @property
    def kills(self) -> int:
        """Least number of kills."""
        return len([fault for fault in self.faults if fault.how == FaultHow.SIGKILL and fault not in self.spared])


def drawn(mode: Mode, draw: random.Random, kills: int) -> Train:
    """Kills one to four steps apart: of one rank, of two in a step, or again while the first is being mended.

    Never so that all who have a piece of the state are gone together: a newcomer has it for certain two steps on.
    """
    train, step = Train([], set(), 0), 2
    alone: int | None = None
    while train.kills < kills:
        apart = draw.choice((1, 2, 2, 3, 4))
        # Right behind a kill, one of another that is no holder's last.
        behind = apart == 1 and alone is not None
        step += apart if behind else max(2, apart)
        rank = draw.choice([alone, *mode.others(alone)]) if behind and alone is not None else draw.randrange(mode.world)
        # A newcomer may have its first batch before it hears of its faults.
        stages = [stage for stage in mode.stages if not behind or stage not in (S.DATA, S.BETWEEN)]
        way = draw.choices(("single", "pair", "again", "roll"), (60, 20, 16, 4 if mode.roll else 0))[0]
        first, second = draw.choice(stages), draw.choice(stages)
        if way != "again" and S.BETWEEN in (first, second):
            step += -step % EVALUATED
        other = draw.choice(mode.others(rank))
        alone = None
        if way == "single" or behind:
            alone = rank
            train.faults.append(Fault(rank, step, first))
        elif way == "pair":
            pair = [Fault(rank, step, first), Fault(other, step, second)]
            train.faults += pair
            train.spared |= set(pair)
        elif way == "again":
            stage = draw.choice((S.FORM, S.HYDRATE))
            # Who has no part in filling a shard would die in a later recovery, and perhaps with the last holder.
            next_rank = rank if stage is S.HYDRATE and mode.replicas else draw.choice([rank, other])
            train.faults += [Fault(rank, step, S.REDUCE), Fault(next_rank, step, stage)]
        else:
            train.faults += [Fault(0, step, S.VOTE, FaultHow.PAUSE), Fault(0, step, S.ROLL), Fault(3, step, S.COMMIT)]
    # The last ones are mended by others, and whoever waits for a recovery or for an evaluation finds one.
    train.faults += [Fault(rank, step + 3 + 2 * rank, S.REDUCE) for rank in range(mode.world)]
    train.steps = step + 2 * mode.world + 12
    return train


def trains() -> list[tuple[str, int, int]]:
    """(mode, place, kills) of all trains."""
    found = []
    for name, mode in MODES.items():
        kills = math.ceil(KILLS * mode.share)
        count = math.ceil(kills / MOST)
        found += [(name, place, math.ceil(kills / count)) for place in range(count)]
    return found


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("soak")) as made:
        made.patience = PATIENCE
        yield made
        made.assert_nothing_left()


def run(here: Site, name: str, mode: Mode, steps: int, faults: list[Fault], flags: tuple[str, ...] = ()) -> Outcome:
    return train(
        here,
        name,
        *mode.flags,
        *flags,
        world=mode.world,
        steps=steps,
        faults=faults,
        extra=mode.extra,
        script=mode.script,
        nodes=mode.nodes,
    )


@pytest.mark.soak
@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize(("name", "place", "kills"), trains())
def test_random_kills_leave_no_trace_in_the_result(
    here: Site, record_property: Callable[[str, object], None], name: str, place: int, kills: int
) -> None:
    mode, job = MODES[name], f"{name}-{SEED}-{place}"
    plan = drawn(mode, random.Random(f"{name} {SEED} {place}"), kills)
    calm = run(here, f"calm-{job}", mode, plan.steps, [])
    assert calm.code == 0, calm.output
    flags = ("--max-faults", "100000", "--standby", str(place % 2))
    struck = run(here, f"struck-{job}", mode, plan.steps, plan.faults, flags)

    told = f"the train {job} (REGROW_SOAK_KILLS={KILLS} REGROW_SOAK_SEED={SEED}) of {plan.faults}"
    happened = {int(fault.fault.removeprefix("plan-")) - 1 for fault in struck.ledger.injected}
    missed = [fault for at, fault in enumerate(plan.faults) if at not in happened]
    assert [fault for fault in missed if fault not in plan.spared] == [], f"{told}: {struck.output}"
    happened_steps = {fault.step for at, fault in enumerate(plan.faults) if at in happened}
    assert {fault.step for fault in missed} <= happened_steps, f"of a pair at least one strikes: {told}"
    killed = sum(plan.faults[at].how == FaultHow.SIGKILL for at in happened)
    assert killed >= kills
    # What an incident of several faults may cost is told below.
    try:
        assert_equal(struck, calm, faults=len(plan.faults), missed=len(missed), lost=mode.lost and len(plan.faults))
    except AssertionError as error:
        error.add_note(told)
        raise
    assert all(incident.steps_lost <= (mode.lost or 1) * incident.faults for incident in struck.ledger.incidents), told
    assert {incident.rung for incident in struck.ledger.incidents} <= {"fork", "standby", "retry"}, told
    record_property("killed", killed)
    record_property("steps", plan.steps)
    record_property("incidents", len(struck.ledger.incidents))
    record_property("steps_lost", struck.ledger.steps_lost)
    record_property("recovery_median", struck.ledger.recovery_median)
