"""Code behind a body that was cut off finds the variables that the last whole body has bound."""

import contextlib
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from regrow.train.script.body_bindings import BodyBindings


class CutOff(Exception):
    """Error of a halted collective."""


class Body:
    """The context manager of a step, as far as variables are concerned."""

    def __init__(self, bindings: BodyBindings) -> None:
        self._bindings = bindings

    def __enter__(self) -> None:
        self._bindings.enters(sys._getframe(1))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        self._bindings.leaves(sys._getframe(1), whole=error is None)
        return error is not None


def train(body: Body, number: float, halt: bool = False) -> torch.Tensor:
    with body:
        if halt:
            raise CutOff
        loss = torch.tensor(number, requires_grad=True) * 2
    return loss


def test_a_function_returns_what_the_last_whole_body_has_bound() -> None:
    body = Body(BodyBindings())
    train(body, 3.0)
    assert train(body, 4.0).item() == 8.0
    again = train(body, 5.0, halt=True)
    assert again.item() == 8.0
    assert not again.requires_grad, "the graph of a step must not live on"


def test_without_a_whole_body_before_nothing_is_made_up() -> None:
    with pytest.raises(UnboundLocalError):
        train(Body(BodyBindings()), 1.0, halt=True)


def test_what_is_taken_away_after_each_step_is_there_after_a_body_that_was_cut_off() -> None:
    body, lines = Body(BodyBindings()), "with body:\n if halt:\n  raise error\n loss = 7\nseen.append(loss)\ndel loss\n"
    code, seen = compile(lines, "script", "exec"), list[int]()
    module: dict[str, Any] = {"body": body, "halt": False, "error": CutOff, "seen": seen}
    for halt in (False, True):
        module["halt"] = halt
        exec(code, module)
    assert seen == [7, 7]


def test_what_was_bound_before_the_body_or_in_it_before_the_cut_stays() -> None:
    body = Body(BodyBindings())

    def run(first: int, halt: bool) -> tuple[int, int, int]:
        count = first
        with body:
            count += 1
            early = first
            if halt:
                raise CutOff
            late = first
        return count, early, late

    assert run(1, False) == (2, 1, 1)
    assert run(10, True) == (11, 10, 1)


def test_variables_that_inner_functions_use_are_bound_too() -> None:
    body = Body(BodyBindings())

    def run(number: int, halt: bool) -> int:
        def tell() -> int:
            return loss

        with body:
            if halt:
                raise CutOff
            loss = number
        return tell()

    assert run(4, False) == 4
    assert run(5, True) == 4


class Output(OrderedDict[str, Any]):
    """As Hugging Face's: a dictionary with attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def returned(make: Callable[[], Any]) -> Any:
    body = Body(BodyBindings())

    def run(halt: bool) -> Any:
        with body:
            if halt:
                raise CutOff
            made = make()
        return made

    run(False)
    return run(True)


def test_large_tensors_live_on_as_zeros_without_memory() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def make() -> Output:
        logits = torch.ones(100, 50, dtype=torch.bfloat16)
        made.append(weakref.ref(logits))
        return Output(loss=torch.tensor(2.0), logits=logits, hidden=(logits, None))

    output = returned(make)
    assert made[0]() is None
    assert type(output) is Output
    assert output.loss.item() == 2.0
    for tensor in (output.logits, output.hidden[0]):
        assert tensor.shape == (100, 50) and tensor.dtype == torch.bfloat16
        assert tensor.untyped_storage().nbytes() == 2


def test_what_enters_the_body_for_the_script_is_left_alone() -> None:
    body = Body(BodyBindings())

    def run(halt: bool) -> int:
        with contextlib.ExitStack() as stack:
            stack.enter_context(body)
            if halt:
                raise CutOff
        return 1

    assert run(False) == run(True) == 1


def test_a_dictionary_that_does_more_than_to_keep_values_is_not_copied() -> None:
    written: list[str] = []

    class Log(dict[str, int]):
        def __setitem__(self, key: str, value: int) -> None:
            written.append(key)
            super().__setitem__(key, value)

    with pytest.raises(UnboundLocalError):
        returned(lambda: Log(loss=1))
    assert written == []


def test_an_object_of_the_scripts_own_is_not_kept() -> None:
    class Thing:
        def __copy__(self) -> "Thing":
            raise RuntimeError("not to be copied")

    with pytest.raises(UnboundLocalError):
        returned(Thing)
