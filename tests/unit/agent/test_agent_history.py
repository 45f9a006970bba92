"""History of an agent's workers, for a coordinator that takes over."""

from regrow.agent.history import NodeHistory
from regrow.core.ids import Generation, NodeId, Rank, StepNo, WorkerId
from regrow.core.messages import facts, orders
from regrow.core.messages.succession import ReportNode, WorkerPast
from regrow.core.messages.vocabulary import Role

NODE, WORKER = NodeId("n1"), WorkerId("n1.w0")


def formed(generation: int, step: int = 0) -> orders.FormGeneration:
    return orders.FormGeneration(WORKER, Generation(generation), Rank(0), 0, StepNo(step), [], [], [], [], None)


def halted_in(generation: int) -> NodeHistory:
    history = NodeHistory(NODE)
    history.ordered(orders.SpawnWorker(NODE, WORKER, Role.RANK, Rank(0), 0, 1, Generation(1), 0, False))
    history.ordered(formed(generation))
    history.sent(facts.WorkerResumed(WORKER, Generation(generation)))
    history.ordered(orders.HaltGeneration(WORKER, Generation(generation), "a fault"))
    history.sent(facts.WorkerHalted(WORKER, Generation(generation), StepNo(4)))
    return history


def past(history: NodeHistory) -> WorkerPast:
    (one,) = history.report(ReportNode(NODE, 1)).workers
    return one


def test_a_worker_that_is_told_of_its_generation_again_has_halted_in_it_all_the_same() -> None:
    history = halted_in(2)
    before = past(history)
    assert before.halted is not None and before.halting and before.stands
    history.ordered(formed(2))
    assert past(history) == before


def test_a_worker_that_is_told_of_a_generation_that_is_over_stays_in_the_newer_one() -> None:
    history = halted_in(2)
    before = past(history)
    history.ordered(formed(1))
    assert past(history) == before


def test_a_worker_that_enters_the_next_generation_has_not_halted_in_that() -> None:
    history = halted_in(2)
    history.ordered(formed(3, step=4))
    now = past(history)
    assert (now.generation, now.halted, now.halting, now.stands) == (3, None, False, False)
