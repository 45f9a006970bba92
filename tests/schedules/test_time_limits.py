"""The law of time can be broken, on each rung: by a machine that waits longer than its settings say."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from tests.schedules.test_membership_schedules import job

from regrow.agent.history import NodeHistory
from regrow.core.ids import Rank, StepNo
from regrow.core.job import JobSpec
from regrow.core.messages.succession import NodeReport, ReportNode
from regrow.membership.incident import RUNGS
from regrow.membership.recovery.worst_case import worst_cases
from regrow_lab.sim.faults import SimFault, SimRequest
from regrow_lab.sim.invariants import InvariantBroken
from regrow_lab.sim.script import Doing, SimScript
from regrow_lab.sim.world import World

ONE, OTHER = Rank(1), Rank(0)
BODY = SimFault("body", ONE, Doing.COMPUTING, nth=2, after=0.2)
KILL = SimFault("kill", ONE, Doing.COMPUTING, nth=2)
REFUTED = SimFault("refuted", OTHER, Doing.COMPUTING)
NEVER_FORMED = SimFault("hang", OTHER, Doing.FORMING, nth=2)
NEVER_BUILT = SimFault("hang", ONE, Doing.BUILDING, nth=4)
GONE = SimFault("node", ONE, Doing.COMPUTING, nth=2, back=None)
FORMS_LATE = {"form_deadline": 50_000.0, "hang_floor": 50_000.0}
ELASTIC: dict[str, Any] = {"min_replicas": 1, "max_replicas": 4}


@dataclass(frozen=True)
class Late:
    """Fault of a job, and the deadline that is longer in the machine. `law`: the one that catches it."""

    law: str
    spec: JobSpec
    injected: list[SimFault]
    longer: dict[str, Any] = field(default_factory=dict)
    """In the machine's settings."""
    patched: dict[str, float] = field(default_factory=dict)
    mute: str = ""
    """The node whose agent tells nobody what it holds, late or not."""
    requests: list[SimRequest] = field(default_factory=list)
    slots: int | None = None

    def world(self, *, longer: bool) -> World:
        machine = msgspec.structs.replace(self.spec, **self.longer) if longer else self.spec
        return World(
            machine,
            script=SimScript(until=StepNo(40), patience=1e6),
            injected=self.injected,
            requests=self.requests,
            slots=self.slots,
            promised=self.spec,
        )

    def run(self, *, longer: bool) -> World:
        report = NodeHistory.report

        def unless_mute(history: NodeHistory, asked: ReportNode) -> NodeReport:
            told = report(history, asked)
            return told if asked.node != self.mute else msgspec.structs.replace(told, number=0)  # to another question

        with ExitStack() as stack:
            stack.enter_context(patch.object(NodeHistory, "report", unless_mute))
            for name, value in self.patched.items() if longer else ():
                stack.enter_context(patch(f"{'regrow_lab' if name.startswith('sim.') else 'regrow'}.{name}", value))
            world = self.world(longer=longer)
            world.run()
        return world


LATE = {
    "a rank that hangs": Late(
        "hangs", job(2), [SimFault("hang", ONE, Doing.COMPUTING, nth=2)], {"hang_floor": 50_000.0}
    ),
    "retry: the groups": Late("retry", job(2), [BODY, NEVER_FORMED], FORMS_LATE),
    "retry: a survivor that does not halt": Late(
        "retry",
        job(3),
        [BODY, SimFault("hang", OTHER, Doing.HALTING)],
        {"hang_floor": 50_000.0},
    ),
    "standby: the proof that it lives": Late(
        "standby",
        job(2, standbys=1),
        [SimFault("hang", None, Doing.READY), SimFault("kill", ONE, Doing.COMPUTING, nth=12)],
        patched={"membership.recovery.proof_of_life.PROOF_S": 50_000.0},
    ),
    "fork: the newcomer": Late("fork", job(2), [KILL, NEVER_BUILT], {"build_deadline": 50_000.0}),
    "node: who comes onto it": Late(
        "node",
        job(1, nodes=2),
        [msgspec.structs.replace(GONE, back=20.0), NEVER_BUILT],
        {"build_deadline": 50_000.0},
    ),
    "shrink: the groups of those who are left": Late(
        "shrink", job(1, nodes=3, **ELASTIC), [GONE, NEVER_FORMED], FORMS_LATE
    ),
    "grow: the groups with those who come": Late(
        "grow",
        job(2, **ELASTIC),
        [NEVER_FORMED],
        FORMS_LATE,
        requests=[SimRequest("scale", 5.0, replicas=3)],
        slots=3,
    ),
    "preempt: the groups without those who go": Late(
        "preempt",
        job(1, nodes=3, **ELASTIC),
        [NEVER_FORMED],
        FORMS_LATE,
        requests=[SimRequest("drain", 5.0, node=2, back=None)],
    ),
    "all: the survivor that is to leave its state": Late(
        "all",
        job(2),
        [REFUTED, KILL, SimFault("hang", OTHER, Doing.HALTED)],
        patched={"membership.recovery.all_again.KEEP_S": 50_000.0},
    ),
    "all: the workers that start with it": Late(
        "all", job(2), [REFUTED, KILL, SimFault("hang", ONE, Doing.BUILDING, nth=4)], {"build_deadline": 50_000.0}
    ),
    "restart: all workers": Late(
        "restart",
        job(2, durable=True),
        [
            SimFault("kill", OTHER, after=5.0),
            SimFault("kill", ONE, after=5.0),
            SimFault("hang", ONE, Doing.BUILDING, nth=6),
        ],
        {"build_deadline": 50_000.0},
    ),
    "restart: the checkpoint that is being written": Late(
        "restart",
        job(2, durable=True, checkpoint_every=1.0),
        [
            SimFault("disk", OTHER, after=8.0, lasts=1e6),
            SimFault("kill", OTHER, after=12.0),
            SimFault("kill", ONE, after=12.0),
        ],
        patched={"membership.checkpoints.WRITE_S": 50_000.0},
    ),
    "end: a node that does not come back": Late("end", job(1, nodes=2), [GONE], {"node_deadline": 50_000.0}),
    "end: the state that is saved before": Late(
        "end",
        job(1, nodes=2, checkpoint_every=1e6),
        [GONE, SimFault("disk", OTHER, after=8.0, lasts=1e6)],
        patched={"membership.checkpoints.WRITE_S": 50_000.0},
    ),
    "coordinator: agents that do not come": Late(
        "election",
        job(1, nodes=4, durable=True),
        [
            SimFault("coordinator", OTHER, Doing.COMPUTING, nth=2),
            SimFault("node", ONE, Doing.COMPUTING, nth=2, after=0.5, back=500.0),
        ],
        patched={"sim.coordinator.ARRIVE_S": 50_000.0},
    ),
    "defect: an agent that does not tell what it holds": Late(
        "reports",
        job(1, nodes=2),
        [SimFault("defect", ONE, Doing.COMPUTING, nth=2)],
        {"node_deadline": 50_000.0},
        mute="n1",
    ),
}


@pytest.mark.parametrize("what", LATE)
def test_a_machine_that_waits_longer_than_its_settings_say_breaks_the_law(what: str) -> None:
    case = LATE[what]
    with pytest.raises(InvariantBroken, match=rf"{case.law}\b.* in time"):
        case.run(longer=True)


@pytest.mark.parametrize("what", LATE)
def test_the_same_happens_within_the_law_where_the_machine_keeps_them(what: str) -> None:
    world = LATE[what].run(longer=False)
    assert world.laws.opened, "something has gone wrong"


def test_every_rung_of_the_ladder_has_a_worst_case_and_is_shown_to_be_able_to_break_it() -> None:
    assert set(RUNGS) <= worst_cases(job(1), factor=1.0).keys()
    assert set(RUNGS) <= {what.partition(":")[0] for what in LATE}
