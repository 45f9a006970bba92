"""The transaction of one worker's step: where its state stands, whatever happens."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.core.ids import NO_STATE, Generation, StepNo
from regrow.step.machine import (
    Aborted,
    Adopted,
    Committed,
    Computing,
    Empty,
    Halted,
    Idle,
    Ready,
    Resumed,
    Stopped,
    Transaction,
    Updating,
)

G = Generation


def at(step: int) -> Transaction:
    machine = Transaction()
    machine.resume(StepNo(step))
    return machine


def computing(step: int) -> Transaction:
    machine = at(step)
    assert machine.begin()
    return machine


def updating(step: int) -> Transaction:
    machine = computing(step)
    assert machine.update()
    return machine


def test_a_newcomer_has_no_state_and_begins_nothing() -> None:
    machine = Transaction()
    assert (machine.state, machine.step, machine.state_at) == (Empty(), NO_STATE, NO_STATE)
    assert not machine.begin()


def test_a_newcomer_stands_where_it_is_hydrated_to() -> None:
    machine = Transaction()
    assert machine.resume(StepNo(7)) == Resumed(StepNo(7))
    assert machine.state == Idle(StepNo(7))


def test_a_step_that_ends_well_moves_the_state_by_one() -> None:
    machine = updating(3)
    assert machine.commit() == Committed(StepNo(3))
    assert machine.state == Idle(StepNo(4))


def test_a_body_without_an_update_commits_too() -> None:
    machine = computing(3)
    assert machine.commit() == Committed(StepNo(3))
    assert machine.state_at == 4


def test_in_a_sharded_world_a_body_without_an_update_commits_only_when_it_has_voted() -> None:
    machine = Transaction()
    machine.resume(StepNo(3), sharded=True)
    assert machine.begin()
    assert machine.commit() == Aborted(StepNo(3))
    assert machine.state_at == 3
    machine.resume(StepNo(3), sharded=True)
    assert machine.begin() and machine.ready() and machine.update()
    assert machine.commit() == Committed(StepNo(3))


class ShardedRank:
    """A rank whose body may make no update: it goes through the gate at its end all the same."""

    def __init__(self, updates: bool) -> None:
        self.machine, self.updates, self.voted = Transaction(), updates, False
        self.machine.resume(StepNo(3), sharded=True)
        self.machine.begin()

    def go_on(self, all_voted: bool) -> None:
        machine = self.machine
        if isinstance(machine.state, Computing):
            if machine.halted is None and not self.updates and isinstance(machine.commit(), Committed):
                return  # a machine that lets it commit so has no need of a vote
            if isinstance(machine.state, Stopped):
                machine.resume(StepNo(3), sharded=True)
                machine.begin()
            self.voted = machine.ready()
        elif isinstance(machine.state, Ready) and all_voted and machine.update():
            machine.commit()


@given(
    st.lists(st.booleans(), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["go", "go", "go", "fail", "halt"])), max_size=40),
)
def test_no_rank_of_a_sharded_world_is_past_a_step_that_another_can_not_do(
    updates: list[bool], orders: list[tuple[int, str]]
) -> None:
    ranks = [ShardedRank(each) for each in updates]
    for at, order in orders:
        rank = ranks[at % len(ranks)]
        match order:
            case "go":
                rank.go_on(all(each.voted for each in ranks))
            case "fail" if isinstance(rank.machine.state, Computing):
                rank.machine.fail()
            case "halt":
                for each in ranks:
                    each.machine.halt(G(1))
    if any(rank.machine.state == Idle(StepNo(4)) for rank in ranks):
        assert all(rank.voted for rank in ranks), "one is past the step, and another lacks what it needs for it"


def test_nothing_is_said_of_the_state_while_an_update_runs() -> None:
    assert updating(3).state_at is None


def test_a_second_call_of_the_optimizer_in_one_body_belongs_to_the_same_update() -> None:
    machine = updating(3)
    assert machine.update()
    assert machine.state == Updating(StepNo(3))


def test_no_update_begins_between_two_steps() -> None:
    assert not at(3).update()


def test_a_halt_in_a_body_is_answered_at_its_end() -> None:
    machine = computing(3)
    assert machine.halt(G(1)) == Halted(None)
    machine.fail()
    assert machine.state_at == 3


def test_a_worker_that_has_all_its_gradients_rolls_forward_though_the_generation_is_over() -> None:
    machine = computing(3)
    machine.halt(G(1))
    assert machine.update()
    assert machine.commit() == Committed(StepNo(3))
    assert machine.state_at == 4


def test_a_body_without_an_update_does_not_commit_once_the_generation_is_over() -> None:
    machine = computing(3)
    machine.halt(G(1))
    assert machine.commit() == Aborted(StepNo(3))
    assert machine.state == Stopped(StepNo(3), StepNo(3))


def test_no_step_begins_once_the_generation_is_halted() -> None:
    machine = at(3)
    machine.halt(G(1))
    assert not machine.begin()


def test_an_update_that_has_begun_is_finished_and_committed_though_the_generation_is_over() -> None:
    machine = updating(3)
    assert machine.halt(G(1)) == Halted(None)
    assert machine.commit() == Committed(StepNo(3))
    assert machine.halt(G(1)) == Halted(StepNo(4))
    assert not machine.begin()


def test_an_error_before_the_update_leaves_the_state_where_it_was() -> None:
    machine = computing(3)
    assert machine.fail() == Aborted(StepNo(3))
    assert machine.state_at == 3


def test_an_error_in_the_update_leaves_no_state() -> None:
    machine = updating(3)
    machine.fail()
    assert machine.state_at == NO_STATE


def test_a_second_error_does_not_move_what_the_first_has_left() -> None:
    machine = updating(3)
    machine.fail()
    machine.fail()
    assert machine.state == Stopped(StepNo(3), NO_STATE)


def test_a_stopped_step_runs_again_when_the_new_generation_starts_with_it() -> None:
    machine = computing(3)
    machine.fail()
    assert machine.resume(StepNo(3)) == Resumed(StepNo(3))
    assert machine.begin()


def test_a_stopped_step_that_others_had_committed_is_adopted() -> None:
    machine = computing(3)
    machine.fail()
    assert machine.resume(StepNo(4)) == Adopted(StepNo(3))


def test_a_worker_between_two_steps_adopts_nothing() -> None:
    assert at(3).resume(StepNo(4)) == Resumed(StepNo(4))


def test_newer_state_takes_the_place_of_the_own_as_a_whole() -> None:
    machine = computing(3)
    machine.fail()
    machine.halt(G(1))
    assert machine.replace()
    machine.replaced(StepNo(4))
    assert machine.state_at == 4
    assert machine.resume(StepNo(4)) == Adopted(StepNo(3))


def test_who_goes_back_to_an_older_state_stands_there_and_adopts_nothing() -> None:
    machine = at(8)
    machine.fail()
    machine.halt(G(1))
    assert machine.replace()
    stood = machine.state_at
    machine.replaced(StepNo(4))
    assert (stood, machine.state_at) == (None, 4)
    assert machine.resume(StepNo(4)) == Resumed(StepNo(4))
    assert machine.begin()
    assert machine.step == 4


def test_a_halt_told_again_or_late_does_not_reach_back() -> None:
    machine = at(3)
    machine.halt(G(5))
    machine.halt(G(2))
    assert machine.halted == G(5)


@pytest.mark.parametrize("step", [0, 1, 9])
def test_a_new_generation_takes_back_the_halt(step: int) -> None:
    machine = at(step)
    machine.halt(G(1))
    machine.resume(StepNo(step))
    assert machine.halted is None
    assert machine.begin()


@given(st.lists(st.sampled_from(["begin", "update", "commit", "fail", "halt", "resume", "ahead"]), max_size=60))
def test_a_state_that_was_told_holds_until_a_new_generation_and_no_attempt_commits_twice(
    orders: list[str],
) -> None:
    machine, generation, attempt = Transaction(), 1, 0
    said: StepNo | None = None
    commits: Counter[tuple[int, int]] = Counter()
    for order in orders:
        match order:
            case "begin":
                attempt += machine.begin()
            case "update":
                began = not isinstance(machine.state, Updating)
                assert not (machine.update() and began and said is not None), "an update after the state was told"
            case "commit":
                outcome = machine.commit()
                if isinstance(outcome, Committed):
                    commits[outcome.step, attempt] += 1
            case "fail":
                machine.fail()
            case "halt":
                told = machine.halt(G(generation)).state_at
                assert said is None or told == said
                said = told
            case _:
                standing = machine.state_at
                if standing is None:
                    continue  # nobody forms a generation before this worker has said where its state stands
                machine.resume(StepNo(max(0, standing) + (order == "ahead")))
                said, generation = None, generation + 1
        if said is not None:
            assert machine.state_at == said, f"{order} moved the state that was told"
    assert not commits or max(commits.values()) == 1


def ready_at(step: int) -> Transaction:
    transaction = Transaction()
    transaction.resume(StepNo(step))
    assert transaction.begin()
    assert transaction.ready()
    return transaction


def test_a_ready_worker_updates_when_all_have_voted() -> None:
    transaction = ready_at(4)
    assert transaction.update()
    assert transaction.commit() == Committed(StepNo(4))


def test_a_ready_worker_says_where_it_stands_at_once_and_stays_there() -> None:
    transaction = ready_at(4)
    assert transaction.halt(Generation(1)) == Halted(StepNo(4))
    assert transaction.is_ready
    assert not transaction.update()
    assert transaction.state_at == 4


def test_a_ready_worker_rolls_forward_when_the_step_has_happened() -> None:
    transaction = ready_at(4)
    transaction.halt(Generation(1))
    assert not transaction.roll_forward(StepNo(4))
    assert transaction.roll_forward(StepNo(5))
    assert transaction.state_at is None
    assert transaction.commit() == Committed(StepNo(4))
    assert transaction.state_at == 5


def test_a_ready_worker_that_gives_up_keeps_its_state() -> None:
    transaction = ready_at(4)
    transaction.halt(Generation(1))
    assert transaction.fail() == Aborted(StepNo(4))
    assert transaction.state_at == 4 and not transaction.is_ready


def test_only_a_body_can_be_ready() -> None:
    transaction = Transaction()
    transaction.resume(StepNo(4))
    assert not transaction.ready()


def test_who_has_begun_to_update_does_not_roll_forward() -> None:
    transaction = ready_at(4)
    transaction.update()
    transaction.halt(Generation(1))
    assert not transaction.roll_forward(StepNo(5))
