"""A worker's part in its job: the same calls, in the same order, whether it is supervised or alone."""

import inspect
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch

from regrow.core.errors import GenerationHalted
from regrow.core.ids import Generation, StepNo, WorkerId
from regrow.core.messages import facts, orders
from regrow.core.messages.vocabulary import Role
from regrow.core.phase import Phase
from regrow.train.session import Session
from regrow.train.state.frozen import FrozenState
from regrow.train.state.protected import ProtectedState
from regrow.train.worker import assembly as assembling
from regrow.train.worker import rejoin as rejoining
from regrow.train.worker import supervised as supervising
from regrow.train.worker.participation import AttemptBody, Participation, WaitingRoom, WorkerGroups
from regrow.train.worker.rejoin import Rejoin
from regrow.train.worker.standalone import StandaloneWorker
from regrow.train.worker.supervised import SupervisedWorker


def supervised() -> SupervisedWorker:
    link = MagicMock()
    link.env.rank, link.env.local_rank, link.env.world, link.env.worker = 0, 0, 1, WorkerId("w")
    link.env.spec.unit, link.env.spec.trial_steps, link.env.patience = 1, 0, 0.0
    groups = MagicMock(refused=False)
    groups.broke.return_value = False
    member = SupervisedWorker(link, groups)
    member.control.resume(Generation(0), StepNo(0))
    recovery = MagicMock(restart_index=0, sharded=False, sampler=None, comparison=None)
    member.body.recovery = recovery
    member._rejoin = Rejoin(link, member.control, recovery, state(), MagicMock(), None)
    return member


def state() -> ProtectedState:
    model = torch.nn.Linear(2, 1)
    return ProtectedState([model, torch.optim.SGD(model.parameters(), lr=0.1)], {})


@pytest.fixture(params=[supervised, lambda: StandaloneWorker(0, 0, 1)], ids=["supervised", "standalone"])
def member(request: pytest.FixtureRequest) -> Participation:
    return cast(Participation, request.param())


def asked(protocol: type) -> dict[str, inspect.Signature | None]:
    """Members of a protocol: methods with their signatures, and attributes."""
    methods = {name: value for name, value in vars(protocol).items() if not name.startswith("_")}
    found = {name: inspect.signature(value) if inspect.isfunction(value) else None for name, value in methods.items()}
    return found | dict.fromkeys(inspect.get_annotations(protocol))


def check(protocol: type, made: Any) -> None:
    names = asked(protocol)
    assert names
    for name, signature in names.items():
        assert hasattr(made, name), name
        if signature is not None:
            _, *parameters = signature.parameters.values()
            given = [1 for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
            named = {p.name: 1 for p in parameters if p.kind is p.KEYWORD_ONLY}
            inspect.signature(getattr(made, name)).bind(*given, **named)


def test_whatever_a_loop_asks_is_there_and_can_be_called_so(member: Participation) -> None:
    check(Participation, member)
    check(AttemptBody, member.body)
    check(WaitingRoom, member.waiting)
    check(WorkerGroups, member.groups)


def test_it_begins_alone_before_step_0(member: Participation) -> None:
    assert (member.rank, member.local_rank, member.world, member.unit) == (0, 0, 1, 1)
    assert (member.step, member.halted, member.restart_index, member.trial_steps) == (0, False, 0, 0)
    assert member.holds_initial_state or member.rehearses


@pytest.mark.parametrize(("role", "newcomer"), [(Role.RANK, False), (Role.JOINER, True), (Role.STANDBY, True)])
def test_who_comes_to_a_training_that_runs_knows_it_before_anything_is_built(role: Role, newcomer: bool) -> None:
    member = supervised()
    member._link.env.role = role  # type: ignore[misc]
    assert Session(member, seed=0).newcomer is newcomer


def test_a_script_alone_is_no_newcomer() -> None:
    assert not Session(StandaloneWorker(0, 0, 1), seed=0).newcomer


def test_a_step_goes_from_its_begin_to_its_commit(member: Participation) -> None:
    protected = state()
    exchanged: list[str] = []
    for number in (StepNo(0), StepNo(1)):
        assert member.pass_boundary()
        member.waiting.checkpoint()
        member.fetches(number)
        member.show_read(number, None)
        protected.begin()
        assert member.body.begin_step(number, protected)
        member.body.enter()
        member.body.before_update(lambda: exchanged.append("buffers"))
        member.body.stepped(protected.optimizers()[0])
        member.body.left()
        assert member.body.commit(lambda: exchanged.append("buffers"))
        assert member.step == number + 1 and not member.body.entered
    assert exchanged == (["buffers"] * 2 if member.rehearses else [])


def test_an_error_in_a_body_leaves_the_step_where_it_was(member: Participation) -> None:
    protected = state()
    protected.begin()
    assert member.body.begin_step(StepNo(0), protected)
    member.body.enter()
    handled = member.body.abort(RuntimeError("of the script"), protected)
    assert handled == member.rehearses, "alone, the error is the script's"
    assert member.step == 0 and not member.body.entered


def test_a_body_that_the_script_leaves_is_given_up(member: Participation) -> None:
    protected = state()
    protected.begin()
    assert member.body.begin_step(StepNo(0), protected)
    member.body.enter()
    member.body.abandon()
    assert member.step == 0 and not member.body.entered and not member.body.complete


def test_a_function_between_two_steps_changes_no_step(member: Participation) -> None:
    member.expect_after_steps(1)
    assert member.body.enter_restartable(1, None)
    member.body.leave_restartable(2)
    member.place_after_step(0)
    assert member.step == 0
    assert member.compare() and member.waiting.take_change() is None


def test_what_is_told_of_the_script_reaches_whoever_supervises_it(member: Participation) -> None:
    member.note_of_script("a note")
    member.send(facts.WorkerNoted(WorkerId("w"), "another"))
    if isinstance(member, SupervisedWorker):
        sent = cast(Any, member)._link.send.call_args_list
        assert [call.args[0].text for call in sent] == ["a note", "another"]


# --- a supervised worker ------------------------------------------------------------------------------------------


def in_a_body_that_has_ended(member: SupervisedWorker) -> None:
    """Without an update: what comes next is the commit."""
    protected = state()
    protected.begin()
    assert member.body.begin_step(StepNo(0), protected)
    member.body.enter()
    member.body.left()


@pytest.mark.parametrize("cut_off", ["a collective failed", "a collective was refused", "a forward was cut off"])
def test_a_body_without_an_update_that_has_swallowed_what_cut_it_off_is_not_committed(cut_off: str) -> None:
    member = supervised()
    in_a_body_that_has_ended(member)
    groups = cast(Any, member).groups
    groups.broke.return_value = cut_off == "a collective failed"
    groups.refused = cut_off == "a collective was refused"
    member.body.interrupt.struck = cut_off == "a forward was cut off"
    with pytest.raises(GenerationHalted):
        member.body.commit(lambda: None)
    assert member.step == 0


def test_a_body_without_an_update_that_nothing_has_cut_off_is() -> None:
    member = supervised()
    in_a_body_that_has_ended(member)
    assert member.body.commit(lambda: None)
    assert member.step == 1


def test_who_fetches_a_batch_is_seen_to_do_so() -> None:
    member = supervised()
    member.fetches(StepNo(3))
    cast(Any, member)._link.board.enter.assert_called_with(Phase.DATA, step=3, generation=0)


def test_who_is_halted_in_the_middle_of_its_own_work_says_so_and_again_when_it_waits() -> None:
    member = supervised()
    sent = cast(Any, member)._link.send

    def stood() -> list[bool]:
        return [each.args[0].stands for each in sent.call_args_list if isinstance(each.args[0], facts.WorkerHalted)]

    member.control._halt(orders.HaltGeneration(WorkerId("w"), Generation(0), "a fault"))
    assert stood() == [False], "it computes something of the script's"
    with member.control._at_rest():
        assert stood() == [False, True]


def test_what_is_enqueued_is_waited_for_at_the_gate_and_before_state_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    class Late:
        enqueues = True

        def wait(self, meanwhile: Any = None) -> None:
            waited.append("for the device")

    frozen: list[Any] = []

    def freezing(state: ProtectedState, wait: Any) -> FrozenState:
        frozen.append(wait)
        return FrozenState(state, wait)

    late = Late()
    monkeypatch.setattr(supervising, "accelerator_of", lambda tensors: late)
    monkeypatch.setattr(assembling, "FrozenState", freezing)
    for name in ("HydrationServer", "Recovery"):
        monkeypatch.setattr(assembling, name, MagicMock())
    monkeypatch.setattr(facts, "WorkerReady", MagicMock())
    member = supervised()
    env = cast(Any, member)._link.env
    cast(Any, member).groups.count = 1
    env.spec.digest_every, env.spec.audit, env.checkpoint_dir = 0, False, None
    member.arrive(state(), "")
    assert frozen == [late.wait]
    member.body.recovery = MagicMock(sharded=False)
    protected = state()
    protected.begin()
    assert member.body.begin_step(StepNo(0), protected)
    member.body.enter()
    waited.clear()
    member.body.before_update(lambda: None)
    assert waited == ["for the device"]


def test_an_error_of_a_connection_of_the_scripts_own_is_not_told_where_a_death_explains_it() -> None:
    member = supervised()
    member.body.awaits_causes = True
    protected = state()
    protected.begin()
    member.body.begin_step(StepNo(0), protected)
    halt = orders.HaltGeneration(WorkerId("w"), Generation(0), "rank 1 was killed")
    member.body.interrupt.await_set = lambda most: member.control._halt(halt)  # type: ignore[method-assign]
    member.body.abort(ConnectionError("the neighbour is gone"), protected)
    sent = [call.args[0] for call in cast(MagicMock, member._link).send.call_args_list]
    assert [each for each in sent if isinstance(each, facts.WorkerFaulted)] == []
    assert [each.state_at for each in sent if isinstance(each, facts.WorkerHalted)] == [0]


@pytest.mark.parametrize("planned", [True, False])
def test_old_groups_are_given_up_only_when_nobody_uses_them_any_more(planned: bool) -> None:
    """Before a planned change others may still be in the step before."""
    happened: list[str] = []
    recovery, control = MagicMock(), MagicMock(released=None)
    recovery.groups.halted, recovery.groups.serves.return_value = not planned, False
    form = MagicMock(change=None)

    def await_form() -> MagicMock:
        happened.append("all have stopped")
        return form

    control.await_form.side_effect = await_form
    recovery.join.side_effect = lambda _: happened.append("groups are formed")
    room = Rejoin(MagicMock(), control, recovery, state(), MagicMock(), None)
    room.rejoin(lambda: happened.append("given up"))
    first = ["all have stopped", "given up"] if planned else ["given up", "all have stopped", "given up"]
    assert happened == [*first, "groups are formed"]


def test_who_leaves_gives_up_its_groups_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejoining, "end_soon", lambda _: None)  # this process is not the worker
    given_up: list[bool] = []
    recovery, control = MagicMock(), MagicMock()
    recovery.groups.halted, control.await_form.return_value = False, None
    room = Rejoin(MagicMock(), control, recovery, state(), MagicMock(), None)
    with pytest.raises(SystemExit):
        room.rejoin(lambda: given_up.append(True))
    assert given_up == [True]
