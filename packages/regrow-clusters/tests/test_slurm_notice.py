"""Reaction of a gang's nodes to Slurm's notice: the job ends with its state, whoever has the coordinator."""

from regrow.core.errors import CoordinatorGone
from regrow.core.ids import Seconds
from regrow_clusters.slurm.notice import GangNotice


class AskedCoordinator:
    """Remembers what it was asked. `moved`: it was elected; `silent`: it does not answer."""

    def __init__(self, *, moved: bool = True, silent: bool = False) -> None:
        self.moved, self.silent = moved, silent
        self.asked: list[tuple[str, Seconds]] = []

    def stop(self, reason: str, *, patience: Seconds) -> None:
        if self.silent:
            raise CoordinatorGone("nobody answers")
        self.asked.append((reason, patience))


def notice(coordinator: AskedCoordinator) -> tuple[GangNotice, list[float]]:
    now = [100.0]
    return GangNotice(coordinator, "n1", 25.0, lambda: now[0]), now


def test_an_elected_coordinator_is_asked_once_to_end_the_job_and_no_node_leaves_before() -> None:
    asked = AskedCoordinator()
    told, now = notice(asked)
    assert not told.pass_on()
    now[0] = 124.0
    assert not told.pass_on()
    assert asked.asked == [("Slurm takes n1 back", 25.0)]
    now[0] = 130.0
    assert told.pass_on(), "it has not ended in its time"


def test_where_nobody_else_was_elected_the_launcher_is_told_at_once() -> None:
    asked = AskedCoordinator(moved=False)
    assert notice(asked)[0].pass_on()
    assert asked.asked == []


def test_a_coordinator_that_does_not_answer_is_asked_again_for_a_moment_and_then_each_node_leaves_by_itself() -> None:
    asked = AskedCoordinator(silent=True)
    told, now = notice(asked)
    assert not told.pass_on()
    now[0] = 105.0
    assert told.pass_on()
    now[0], asked.silent = 106.0, False
    assert not told.pass_on(), "another one answers by now"
    assert len(asked.asked) == 1
