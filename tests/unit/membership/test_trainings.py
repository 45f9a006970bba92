"""Several trainings in a script: what the coordinator decides between two, and what a script may name and tell."""

from typing import Any

import pytest
import torch
from tests.unit.membership.membership_job import Job

from regrow.agent.history import NodeHistory
from regrow.core.errors import UsageError
from regrow.core.ids import Generation, NodeId, Rank, StepNo, WorkerId
from regrow.core.messages import facts, orders
from regrow.core.messages.copies import CopiesHeld, ForgetCopies, KeptCopy
from regrow.core.messages.succession import ReportNode
from regrow.core.messages.trainings import FinishedTraining
from regrow.core.records import GenerationFormed, StepCommitted
from regrow.membership.machine import Membership
from regrow.membership.recovery.held_copies import HeldCopies
from regrow.membership.states import Closing, Restarting
from regrow.membership.succession.written import MemoryWriter, read
from regrow.observe.order_proof import prove
from regrow.observe.proof import Verdict
from regrow.observe.reads import RunRecords
from regrow.observe.run_story import places
from regrow.train.session import Session
from regrow.train.worker.standalone import StandaloneWorker

FIRST = FinishedTraining("first", b"\xc0", StepNo(5))


class Followed(Job):
    """A job whose agent remembers what it has heard."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self.history, self._remembered = NodeHistory(NodeId("n0")), 0
        super().__init__(*given, **more)

    def tell(self, fact: Any, after: float = 0.01) -> Any:
        self.history.sent(fact)
        commands = super().tell(fact, after)
        for order in self.said[self._remembered :]:
            self.history.ordered(order)  # type: ignore[arg-type]
        self._remembered = len(self.said)
        return commands

    def successor(self, *, knowing: bool) -> Membership:
        """Another coordinator; `knowing`: it has the newest memory, else that of before the training's end."""
        memory = self.machine.remember()
        if not knowing:
            memory.finished = []
        back, _ = read(MemoryWriter(lambda: (memory, [NodeId("n0")])).write(), 0.0)
        other = Membership(self.machine.spec, memory=back)
        joined = facts.NodeJoined(NodeId("n0"), "host", 2, "store0")
        self.said = list(
            other.take_over([joined], {joined.node: self.history.report(ReportNode(joined.node, 1))}, [], 1e4)
        )
        return other


def at_the_end_of_the_first(*, met: int = 2) -> Followed:
    """Two ranks have run all 5 steps of a first training of several, and `met` of them have come to its body's end."""
    job = Followed(2)
    for rank in job.ranks:
        job.ready(job.of(rank), 0, training="first")
    job.joined().stepped(4)
    for rank in job.ranks:
        job.tell(facts.WorkerFinished(job.of(rank), job.machine.generation, StepNo(5), True))
    assert isinstance(job.machine.state, Closing)
    for rank in range(met):
        job.tell(facts.WorkerFinished(job.of(rank), job.machine.generation, StepNo(5), training=FIRST))
    return job


def in_the_second() -> Followed:
    """As above, and workers for the second training have been started."""
    job = at_the_end_of_the_first()
    for rank in job.ranks:
        job.exited(job.of(rank), 0)
    return job


def spawned(job: Job) -> list[tuple[int, list[FinishedTraining]]]:
    return [(each.rank, each.finished) for each in job.all(orders.SpawnWorker)]


def test_when_all_have_finished_a_training_they_end_by_themselves_and_others_begin_the_next() -> None:
    job = at_the_end_of_the_first(met=1)
    assert isinstance(job.machine.state, Closing) and len(spawned(job)) == 2
    job.tell(facts.WorkerFinished(job.of(1), job.machine.generation, StepNo(5), training=FIRST))
    released = [each.worker for each in job.all(orders.ReleaseWorker) if not each.goes_on]
    assert released == [job.of(0), job.of(1)] and job.all(orders.FenceWorker) == []
    assert job.all(ForgetCopies) == [ForgetCopies(NodeId("n0"))]
    old = [job.of(rank) for rank in job.ranks]
    job.exited(job.of(0), 0)
    assert len(spawned(job)) == 2, "one of the finished training is still there"
    job.exited(job.of(1), -9)  # all have met: how it ends makes no difference
    assert spawned(job) == [(0, []), (1, []), (0, [FIRST]), (1, [FIRST])]
    assert not set(old) & {job.of(0), job.of(1)}


def test_the_steps_of_the_job_go_on_counting_and_the_last_training_ends_the_job() -> None:
    job = in_the_second()
    for rank in job.ranks:
        job.ready(job.of(rank), 5, training="second")
    job.joined().stepped(5)
    formed = job.last(GenerationFormed)
    assert (formed.step, formed.began, formed.training) == (5, 5, "second")
    for goes_on in (True, False):
        for rank in job.ranks:
            job.tell(facts.WorkerFinished(job.of(rank), job.machine.generation, StepNo(6), goes_on))
    for rank in job.ranks:
        job.exited(job.of(rank), 0)
    assert job.end.code == 0


def test_a_rank_that_dies_while_it_builds_the_second_has_all_build_it_again() -> None:
    job = in_the_second()
    job.exited(job.of(0), -9)
    job.exited(job.of(1), -9)
    assert job.end_codes == []
    assert spawned(job)[-2:] == [(0, [FIRST]), (1, [FIRST])]


def test_a_worker_that_does_not_leave_a_finished_training_is_told_again_and_ended_in_the_end() -> None:
    job = at_the_end_of_the_first()
    job.exited(job.of(0), 0)
    while not (fenced := job.all(orders.FenceWorker)):
        job.wait()
    assert [each.worker for each in fenced] == [job.of(1)]
    assert len([each for each in job.all(orders.ReleaseWorker) if each.worker == job.of(1)]) > 3
    job.exited(job.of(1), -9)
    assert len(spawned(job)) == 4


def test_an_error_of_the_script_as_it_leaves_a_training_ends_the_job() -> None:
    job = at_the_end_of_the_first()
    job.exited(job.of(0), 1)
    assert job.end.code == 1


def test_a_stop_between_two_trainings_is_no_end_of_the_script() -> None:
    job = at_the_end_of_the_first()
    job.tell(facts.StopRequested("SIGTERM"))
    assert job.end.code == 75


@pytest.mark.parametrize("knowing", [True, False])
def test_another_coordinator_lets_workers_of_a_finished_training_end(knowing: bool) -> None:
    job = at_the_end_of_the_first()
    other = job.successor(knowing=knowing)
    assert isinstance(other.state, Restarting) and other.remember().finished == [FIRST]
    for rank in (0, 1):
        other.handle(facts.WorkerExited(WorkerId(f"n0.w{rank}"), 0, 1e4), 1e4 + 1)
    assert [each.rank for each in other.roster.placed()] == [0, 1] and not isinstance(other.state, Restarting)


def test_another_coordinator_that_was_told_of_the_end_lets_those_end_that_have_not_heard_of_it() -> None:
    job = at_the_end_of_the_first()
    for life in job.history.report(ReportNode(NodeId("n0"), 1)).workers:
        job.history._lives[life.worker].released = False
    assert isinstance(job.successor(knowing=True).state, Restarting)


def test_copies_of_an_earlier_training_are_not_gone_back_to() -> None:
    held = HeldCopies(lambda: StepNo(5))
    held.ask(Generation(2), [NodeId("n0")])
    copies = [KeptCopy(Rank(0), "all", StepNo(step)) for step in (4, 5, 6)]
    held.apply(CopiesHeld(NodeId("n0"), Generation(2), copies))
    assert [copy.step for copy in held.held[NodeId("n0")]] == [6]


def test_steps_are_told_by_the_names_of_their_trainings() -> None:
    first = GenerationFormed(0.0, Generation(1), StepNo(0), {}, "first")
    second = GenerationFormed(1.0, Generation(2), StepNo(5), {}, "second", StepNo(5))
    assert [places([second, first])(StepNo(step)) for step in (4, 5)] == ["step 4 of first", "step 0 of second"]
    assert places([])(StepNo(4)) == "step 4"


def test_the_order_of_samples_of_several_trainings_is_not_said_to_be_proven() -> None:
    formed = GenerationFormed(0.0, Generation(1), StepNo(0), {"0": WorkerId("w")}, "first")
    committed = StepCommitted(1.0, StepNo(0), Rank(0), WorkerId("w"), Generation(1), 0.1, {})
    proof = prove([RunRecords("job", [formed, committed])])
    assert proof.verdict is Verdict.UNPROVEN and "several trainings" in proof.reasons[-1]


# --- what a script names and tells ------------------------------------------------------------------------------------


@pytest.fixture
def session() -> Session:
    return Session(StandaloneWorker(0, 0, 1), seed=5)


def train(session: Session, until: int) -> float:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.protect(model, optimizer)
    numbers = []
    for step in session.steps(lambda number: torch.full((1, 2), float(number)), until=until):
        with step as x:
            optimizer.zero_grad()
            model(x + torch.rand(1)).sum().backward()
            optimizer.step()
            numbers.append(step.number)
    assert numbers == list(range(until))
    return float(next(model.parameters()).detach().sum())


def test_trainings_of_a_script_alone_begin_at_step_0_with_the_same_random_numbers(session: Session) -> None:
    for training in session.trainings(["one", "two", "three"]):
        training.result = train(session, 2 if str(training) == "two" else 3)
    results = session.results
    assert list(results) == ["one", "two", "three"]
    assert results["one"] == results["three"] != results["two"]


def test_a_training_that_is_finished_is_left_out_and_its_result_known(session: Session) -> None:
    session._worker.training.finished = [FinishedTraining("one", b"\x07", StepNo(9))]
    assert [str(each) for each in _first(session.trainings(["one", "two"]))] == ["two"]
    assert session.results == {"one": 7}


def test_names_that_change_are_refused_by_who_comes_later(session: Session) -> None:
    session._worker.training.finished = [FinishedTraining("lr=0.17", b"\xc0", StepNo(9))]
    with pytest.raises(UsageError, match=r"has finished lr=0.17, and this worker's trainings are lr=0.23"):
        _first(session.trainings(["lr=0.23"]))


@pytest.mark.parametrize("names", ["fold", ["a", "a"], ["a", ""], [str(number) for number in range(2000)]])
def test_names_that_cannot_be_are_refused(session: Session, names: Any) -> None:
    with pytest.raises(UsageError, match=r"names|2,000 trainings"):
        session.trainings(names)


def test_results_are_values_that_can_be_told(session: Session) -> None:
    for training in session.trainings(["one"]):
        train(session, 1)
        with pytest.raises(UsageError, match=r"tensor.item\(\)"):
            training.result = torch.zeros(3)
        with pytest.raises(UsageError, match="let the name of that file be the result"):
            training.result = "x" * 70_000
        training.result = {"loss": 0.1, "best": ("a.pt", 3)}
    assert session.results == {"one": {"loss": 0.1, "best": ("a.pt", 3)}}


def test_a_training_without_steps_and_a_second_sequence_are_refused(session: Session) -> None:
    with pytest.raises(UsageError, match="the training one has no steps"):
        list(session.trainings(["one"]))
    with pytest.raises(UsageError, match="called twice"):
        session.trainings(["two"])


def test_several_are_refused_at_once_where_there_are_durable_checkpoints(session: Session) -> None:
    session._worker.training.alone = "the job was started with --checkpoint-dir"
    with pytest.raises(UsageError, match="started with --checkpoint-dir"):
        session.trainings(["one", "two"])
    session.trainings(["one"])


def _first(trainings: Any) -> list[Any]:
    return [next(trainings)]
