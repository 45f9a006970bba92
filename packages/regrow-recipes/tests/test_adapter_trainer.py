"""Decisions of the adapter for Hugging Face's `Trainer`: its schedule, its book, its deliveries."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from regrow.core.errors import UsageError
from regrow.core.process.extras import install_line
from regrow_recipes.adapters import private_names
from regrow_recipes.adapters.accelerate import _Recoverable as RecoverableAccelerator
from regrow_recipes.adapters.trainer.book import merged, shared
from regrow_recipes.adapters.trainer.deliveries import Deliveries
from regrow_recipes.adapters.trainer.loop import Recoverable
from regrow_recipes.adapters.trainer.loop import _refuse as refuse
from regrow_recipes.adapters.trainer.schedule import Schedule


@pytest.mark.parametrize(
    ("samples", "drop_last", "per_epoch"),
    [(48, False, 4), (50, False, 5), (50, True, 4), (5, True, 1), (None, False, 0)],
)
def test_an_epoch_has_as_many_updates_as_the_stock_trainers(
    samples: int | None, drop_last: bool, per_epoch: int
) -> None:
    plan = Schedule.of(samples, batch_size=2, microbatches=6, drop_last=drop_last)
    assert plan.per_epoch == per_epoch


def test_epochs_end_with_their_last_update() -> None:
    plan = Schedule(microbatches=1, per_epoch=3)
    assert [plan.ends_epoch(number) for number in range(6)] == [False, False, True] * 2
    assert plan.epoch_after(3, of=100) == 1 + 1 / 3
    endless = Schedule(microbatches=1, per_epoch=0)
    assert not endless.ends_epoch(99)
    assert endless.epoch_after(49, of=100) == 0.5


def test_what_a_clock_says_is_no_part_of_what_ranks_share_and_is_kept_by_who_has_it() -> None:
    mine = [{"loss": 1.0, "step": 2}, {"eval_loss": 2.0, "eval_runtime": 0.3, "step": 2}]
    told = [*map(shared, mine), {"loss": 0.5, "step": 4}]
    assert told[1] == {"eval_loss": 2.0, "step": 2}
    assert merged(mine, told) == [*mine, told[2]]
    assert merged(mine, [told[0], {"eval_loss": 9.0, "step": 2}])[1] == {"eval_loss": 9.0, "step": 2}


class Control:
    """Orders of callbacks."""

    def __init__(self) -> None:
        self.should_log = False


class Handler:
    """As transformers', as far as deliveries go."""

    def __init__(self, *callbacks: Any) -> None:
        self.callbacks = list(callbacks)

    def call_event(self, event: str, args: Any, state: Any, control: Control, **_: Any) -> Control:
        for callback in self.callbacks:
            callback(event, control)
        return control


class Decides(list[str]):
    """Notes what it hears, and asks for a line in the log."""

    def __call__(self, event: str, control: Control) -> None:
        self.append(event)
        control.should_log = True


class Stateful(Decides):
    """One whose state is put back."""


def deliver(handler: Any, event: str) -> bool:
    control: Control = handler.call_event(event, None, None, Control())
    return control.should_log


def test_an_event_is_heard_once_and_its_orders_are_given_each_time() -> None:
    plain, stateful = Decides(), Stateful()
    handler = Handler(plain, stateful)
    deliveries = Deliveries(handler, each_time=(Stateful,))
    for _ in range(2):
        with deliveries.once("between", 3):
            assert deliver(handler, "on_step_end")
            assert deliver(handler, "on_log")
    assert plain == ["on_step_end", "on_log"]
    assert stateful == ["on_step_end", "on_log"] * 2


def test_a_step_that_has_begun_is_not_heard_again_when_what_was_before_it_runs_once_more() -> None:
    plain = Decides()
    handler = Handler(plain)
    deliveries = Deliveries(handler, each_time=())
    for scope, step in [("between", 3), ("step", 4), ("between", 3), ("step", 4), ("between", 4), ("step", 5)]:
        with deliveries.once(scope, step):
            deliver(handler, f"{scope} {step}")
    assert plain == ["between 3", "step 4", "between 4", "step 5"]


def test_nobody_hears_of_a_rehearsal() -> None:
    plain = Decides()
    handler = Handler(plain)
    deliveries = Deliveries(handler, each_time=())
    with deliveries.silent(), deliveries.once("step", 0):
        assert not deliver(handler, "on_step_begin")
    assert plain == []


def test_a_framework_that_is_missing_is_told_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(UsageError, match="needs trl, which is not installed") as told:
        private_names.framework("trl", extra="trl")
    assert told.value.hint == install_line("trl", package="regrow-recipes")


def test_a_version_on_which_nothing_was_run_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    private_names._note_version.cache_clear()
    monkeypatch.setattr("importlib.metadata.version", lambda _: "4.57.0")
    with caplog.at_level(logging.WARNING, "regrow"):
        for _ in range(2):
            private_names.framework("accelerate", extra="trainer")
    assert [record.getMessage() for record in caplog.records] == [
        "regrow's adapter was tested with accelerate 1.15.0, and this is 4.57.0: the adapter uses "
        "private names, which any version may change"
    ]
    private_names._note_version.cache_clear()


def asked(*, resume: object = None, trial: object = None, sharded: bool = False, **arguments: Any) -> None:
    args = SimpleNamespace(**{"auto_find_batch_size": False, "fsdp": [], "deepspeed": None} | arguments)
    refuse(SimpleNamespace(args=args, is_distributed_loading_by_transformers=sharded), resume, trial)


@pytest.mark.parametrize(
    ("what", "name", "cure"),
    [
        ({"resume": True}, "resume_from_checkpoint", "--resume"),
        ({"trial": object()}, "a search for hyper-parameters", "one job for each trial"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size", "a batch size that fits"),
        ({"fsdp": ["full_shard"]}, "fsdp", "use DDP"),
        ({"deepspeed": "ds.json"}, "deepspeed", "use DDP"),
        ({"sharded": True}, "a model that was sharded while it was loaded", "use DDP"),
    ],
)
def test_what_a_trainer_cannot_have_is_refused_by_name(what: dict[str, Any], name: str, cure: str) -> None:
    with pytest.raises(UsageError, match=f"cannot have {name}") as refused:
        asked(**what)
    assert cure in str(refused.value)


def test_a_trainer_whose_batch_is_no_mapping_is_refused_by_a_sentence() -> None:
    class GRPOTrainer(Recoverable):
        def __init__(self) -> None:
            """No Trainer is behind it, as none is asked for anything before the refusal."""

    micro: Any = SimpleNamespace(batch=[{"prompt": "one"}], last=True)
    with pytest.raises(UsageError, match="GRPOTrainer cannot train through faults: .* but a list"):
        GRPOTrainer()._forward_backward(micro, None)


def test_what_it_can_have_is_not_refused() -> None:
    asked()


class Session:
    """As far as an Accelerator asks it."""

    world_size, rank, seed = 2, 0, 0

    def protect(self, *_: Any) -> None:
        """Nothing."""

    def keep_world(self, _: str) -> None:
        """Nothing."""

    def steps(self, loader: Any, *, until: int, microbatches: int = 0) -> list[SimpleNamespace]:
        return [SimpleNamespace(asked=(until, microbatches), number=5, committed=True)]


def accelerator(monkeypatch: pytest.MonkeyPatch, *, accumulates: int = 2) -> Any:
    made: Any = object.__new__(RecoverableAccelerator)
    made.scaler, made.session, made._accumulates, made._protected = None, Session(), accumulates, []
    monkeypatch.setattr(RecoverableAccelerator, "_set_place", lambda _: None)
    return made


def test_a_step_of_one_batch_has_no_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    loader: Any = DataLoader(range(50), batch_size=4)  # type: ignore[arg-type]
    made = accelerator(monkeypatch, accumulates=1)
    (step,) = made.steps(loader, epochs=3)
    assert step.asked == (21, 0)
    assert list(made.batches("a batch")) == ["a batch"]


def test_a_training_of_accelerate_ends_after_so_many_updates_or_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    loader: Any = DataLoader(range(50), batch_size=4)  # type: ignore[arg-type]
    made = accelerator(monkeypatch)
    assert [step.asked for step in made.steps(loader, until=9)] == [(9, 4)]
    assert [step.asked for step in made.steps(loader, epochs=3)] == [(12, 4)]
    assert made.epoch == 1
    ends = [made.ends_epoch(SimpleNamespace(number=number, committed=True)) for number in (2, 3, 7, 8)]
    assert ends == [False, True, True, False]
    assert not made.ends_epoch(SimpleNamespace(number=3, committed=False)), "it must run again"
    for missing in (made.steps(loader), made.steps(lambda step: step, epochs=3)):
        with pytest.raises(UsageError, match="give until=, or epochs="):
            next(missing)
