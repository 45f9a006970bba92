"""Report of a worker on its state: equal to its replicas' if the state is, and otherwise which part differs."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from regrow.core.ids import StepNo
from regrow.core.messages import facts
from regrow.core.messages.replicas import StateSampled
from regrow.core.messages.vocabulary import Member
from regrow.train.state.protected import ProtectedState
from regrow.train.worker import replica_digests
from regrow.train.worker.replica_digests import Sampler, digests


class Notes:
    """An object of a script's with several fields."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def state_dict(self) -> dict[str, Any]:
        return self.fields

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fields = state


def state(**fields: Any) -> tuple[ProtectedState, torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    return ProtectedState([model, optimizer], {"notes": Notes(**fields)} if fields else {}), model, optimizer


def looks(made: ProtectedState, step: int | None) -> dict[str, int]:
    tensors, python = digests(made, frozenset(), sample=None if step is None else StepNo(step))
    return tensors | python


@pytest.mark.parametrize("step", [None, 16, 17])
def test_equal_states_look_the_same(step: int | None) -> None:
    first = looks(state(seen=3)[0], step)
    assert first == looks(state(seen=3)[0], step)
    assert first and (step is None or len([name for name in first if "[" in name]) <= 16)


def test_a_field_of_an_object_is_named() -> None:
    one, other = looks(state(seen=3, is_main=True)[0], 16), looks(state(seen=3, is_main=False)[0], 16)
    assert {name for name in one if one[name] != other[name]} == {"notes.is_main"}


def test_a_setting_of_an_optimizer_is_named() -> None:
    one, (made, _, optimizer) = looks(state()[0], 16), state()
    optimizer.param_groups[0]["lr"] = 0.5
    assert {name for name, value in looks(made, 16).items() if one[name] != value} == {"optim.param_groups"}


def test_one_bit_of_a_tensor_is_found_by_the_whole_look_and_by_samples_in_time() -> None:
    one, (made, model, _) = state()[0], state()
    model[0].weight.data.view(torch.int32)[5, 7] ^= 1  # type: ignore[index]
    whole = {name for name, value in looks(made, None).items() if looks(one, None)[name] != value}
    assert whole == {"model.0.weight"}
    found = [step for step in range(16, 16 * 65, 16) if looks(one, step) != looks(made, step)]
    assert 10 < len(found) < 64


# --- when it is said ------------------------------------------------------------------------------------------------


def sampler(made: ProtectedState) -> tuple[Sampler, list[Any]]:
    said: list[Any] = []
    link = SimpleNamespace(env=SimpleNamespace(worker="w"), send=said.append)
    sampling = Sampler(cast(Any, link), cast(Any, SimpleNamespace(generation=1)), made, own=list)
    return sampling, said


def form(sampling: Sampler, *holdings: str, step: int = 0, again: bool = False) -> None:
    members = [SimpleNamespace(holding=each) for each in holdings]
    sampling.join(cast(Any, SimpleNamespace(members=cast(list[Member], members), step=step)), again=again)


def test_all_is_looked_at_after_a_recoverys_first_step_and_at_the_end_and_some_now_and_then() -> None:
    sampling, said = sampler(state()[0])
    form(sampling, "h", "h", step=5, again=True)
    for step in range(5, 40):
        sampling.tick(StepNo(step), last=False)
    sampling.tick(StepNo(40), last=True)
    assert all(isinstance(each, StateSampled) for each in said)
    assert [each.step for each in said if each.whole] == [6, 40]
    assert [each for each in said if not each.whole]


def test_after_a_recovery_all_is_looked_at_once_a_part_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_digests, "_PART_BYTES", 100_000)
    said = [after_recovery(made) for made in (state()[0], with_one_bit_more(state()))]
    whole = [[each for each in every if each.whole] for every in said]
    assert [each.step for each in whole[0]] == list(range(6, 14)) and said[0][-1].whole is False
    names = [name for each in whole[0] for name in each.tensors]
    assert len(names) == len(set(names)) and "model.0.weight[99200:199200]" in names
    unlike = [
        name
        for one, other in zip(*whole, strict=True)
        for name in one.tensors
        if one.tensors[name] != other.tensors[name]
    ]
    assert unlike == ["model.0.weight[99200:199200]"]


def test_after_a_recovery_python_state_is_looked_at_where_there_are_no_tensors() -> None:
    said = after_recovery(ProtectedState([], {"notes": Notes(seen=3)}))
    assert [(each.step, each.tensors) for each in said if each.whole] == [(6, {})] and said[0].python


def test_many_ranks_tell_of_a_part_some_steps_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_digests, "_PART_BYTES", 300_000)
    said = after_recovery(state()[0], world=2001)
    assert [each.step for each in said if each.whole] == [6, 9, 12]


def test_what_the_first_updates_have_made_is_told_once_and_apart_from_what_was_there_before() -> None:
    made, _, optimizer = state()
    kept = dict(optimizer.state)
    optimizer.state.clear()
    sampling, said = sampler(made)
    form(sampling, "h", "h")
    sampling.tick(StepNo(0), last=False)
    sampling.tick(StepNo(1), last=False)  # some rank may have made its update, though not this one
    optimizer.state.update(kept)  # as behind a scaler whose first scale overflows
    for step in range(2, 16):
        sampling.tick(StepNo(step), last=False)
    assert [(each.step, each.whole, bool(each.made)) for each in said] == [(1, False, False), (2, False, True)]
    assert {name.split(".")[0] for name in said[1].made} == {"optim"}
    assert {name.split(".")[0] for name in said[1].tensors} == {"model"}


def test_of_large_tensors_that_updates_have_made_some_blocks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_digests, "_MADE_BYTES", 1000)
    one, other = state(), state()
    other[2].state[other[1][0].weight]["exp_avg"][-1, -1] += 1  # type: ignore[index]
    looks = [digests(made[0], frozenset(), made=True)[0] for made in (one, other)]
    unlike = [name for name in looks[0] if looks[0][name] != looks[1][name]]
    assert len(unlike) == 1 and unlike[0].startswith("optim.0.weight.exp_avg[")


def with_one_bit_more(made: tuple[ProtectedState, torch.nn.Module, torch.optim.Optimizer]) -> ProtectedState:
    made[1][0].weight.data.view(-1).view(torch.uint8)[150_000] ^= 1  # type: ignore[index]
    return made[0]


def after_recovery(made: ProtectedState, world: int = 2) -> list[StateSampled]:
    sampling, said = sampler(made)
    form(sampling, *["h"] * world, step=5, again=True)
    for step in range(5, 40):
        sampling.tick(StepNo(step), last=False)
    return said


def test_a_worker_without_a_replica_looks_at_nothing() -> None:
    sampling, said = sampler(state()[0])
    form(sampling, "one half", "the other")
    sampling.tick(StepNo(16), last=True)
    assert said == []


def test_state_that_cannot_be_looked_at_is_told_once_and_harms_nobody() -> None:
    sampling, said = sampler(state(hook=lambda: None)[0])
    form(sampling, "h", "h")
    for step in (16, 32):
        sampling.tick(StepNo(step), last=True)
    assert [type(each) for each in said] == [facts.WorkerNoted]
    assert "notes.hook" in said[0].text
