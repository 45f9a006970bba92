"""Decisions of the Lightning adapter: its refusals, its listeners, its book."""

import importlib.util
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regrow.core.errors import UsageError
from regrow.core.process.extras import install_line
from regrow_recipes.adapters import private_names
from regrow_recipes.adapters.fitting.book import _decoded as decoded
from regrow_recipes.adapters.fitting.book import _encoded as encoded
from regrow_recipes.adapters.fitting.callback_calls import CallbackCalls
from regrow_recipes.adapters.lightning import _ClosureFirst as ClosureFirst
from regrow_recipes.adapters.lightning import _refuse as refuse


class Callback:
    """As Lightning's, as far as hearing goes."""

    def on_train_batch_end(self, *_: Any) -> None:
        """Nothing."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}


class Listener(Callback):
    """Counts what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_train_batch_end(self, word: str) -> None:
        self.heard.append(word)

    def on_before_optimizer_step(self, word: str) -> None:
        self.heard.append(word)


class Remembering(Listener):
    """Has a state, which is put back before what follows a step runs again."""

    def state_dict(self) -> dict[str, Any]:
        return {"heard": self.heard}


def test_who_keeps_no_state_hears_of_a_step_once_and_who_does_each_time() -> None:
    plain, remembering = Listener(), Remembering()
    hearing = CallbackCalls([plain, remembering], Callback)
    for _ in range(2):
        with hearing.once("between", 4):
            for callback in (plain, remembering):
                callback.on_train_batch_end("a")
                callback.on_train_batch_end("b")
    assert plain.heard == ["a", "b"]
    assert remembering.heard == ["a", "b", "a", "b"]
    with hearing.once("between", 5):
        plain.on_train_batch_end("c")
    assert plain.heard == ["a", "b", "c"]


def test_hooks_on_gradients_run_with_each_body_and_none_in_a_rehearsal() -> None:
    plain = Listener()
    hearing = CallbackCalls([plain], Callback)
    for _ in range(2):
        with hearing.once("body", 0):
            plain.on_before_optimizer_step("g")
    with hearing.silent():
        plain.on_before_optimizer_step("never")
        plain.on_train_batch_end("never")
    assert plain.heard == ["g", "g"]


@pytest.mark.parametrize("value", [torch.tensor(0.1), torch.tensor([1.5, float("inf")], dtype=torch.float64)])
def test_tensors_of_callbacks_are_told_exactly(value: torch.Tensor) -> None:
    told = decoded(encoded(value))
    assert told.dtype == value.dtype
    assert torch.equal(told, value)


def test_what_a_callback_keeps_and_cannot_tell_is_named() -> None:
    with pytest.raises(UsageError, match="a callback's state holds a object"):
        encoded(object())


def trainer(**other: Any) -> SimpleNamespace:
    strategy = type("DDPStrategy", (), {})()
    asked = {"overfit_batches": 0.0, "reload_dataloaders_every_n_epochs": 0, "scaler": None, "strategy": strategy}
    when = {"check_val_every_n_epoch": 1, "val_check_interval": 1.0}
    return SimpleNamespace(**asked | when | {"callbacks": []} | other)


@pytest.mark.parametrize(
    ("made", "automatic", "path", "says"),
    [
        (trainer(), False, None, "manual optimization .*session.epochs"),
        (trainer(), True, "last.ckpt", "ckpt_path .*--resume"),
        (trainer(overfit_batches=2), True, None, "overfit_batches"),
        (trainer(scaler=object()), True, None, "bf16-mixed"),
        (trainer(strategy=SimpleNamespace()), True, None, "the strategy SimpleNamespace"),
        (trainer(check_val_every_n_epoch=None), True, None, "interval of validation"),
        (
            trainer(callbacks=[type("Mine", (type("Timer", (), {}),), {})()]),
            True,
            None,
            "Mine, which stops each rank by",
        ),
    ],
)
def test_what_could_not_go_on_through_a_fault_is_refused(made: Any, automatic: bool, path: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        refuse(made, SimpleNamespace(automatic_optimization=automatic), path)


def test_what_can_is_not() -> None:
    refuse(trainer(), SimpleNamespace(automatic_optimization=True), None)


def test_the_closure_runs_before_the_optimizer_steps_and_gradients_are_clipped_between() -> None:
    order: list[str] = []

    class Plugin(ClosureFirst):
        def _after_closure(self, model: Any, optimizer: Any) -> None:
            order.append("clip")

    def closure() -> int:
        order.append("closure")
        return 7

    optimizer = SimpleNamespace(step=lambda **_: order.append("step"))
    assert Plugin().optimizer_step(optimizer, None, closure) == 7
    assert order == ["closure", "clip", "step"]


def test_without_lightning_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=re.escape(install_line("lightning", package="regrow-recipes"))):
        private_names.lightning()
