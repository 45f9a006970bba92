"""Arrays that a script carries from body to body: put back with a step, and handed to newcomers, as numbers are."""

from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from regrow.train.script.callers import script_frames
from regrow.train.values.arrays import packed, unpacked
from regrow.train.values.plain import take_over
from regrow.train.values.variables import Variables

carried: Any = None


class Steps:
    """Gives steps as the loop does, from a rehearsal on; `at` is called as the script asks for one."""

    def __init__(self, steps: int, shared: Callable[[], set[int]] = set) -> None:
        self.variables, self.steps = Variables(shared), steps
        self.at: dict[int, Callable[[], None]] = {}
        self.encoded: dict[str, bytes] = {}
        self.taken: dict[str, Any] = {}

    def __iter__(self) -> Iterator[int]:
        self.variables.follow(script_frames)
        for number in range(-1, self.steps):
            self.variables.requests_step()
            self.at.get(number, lambda: None)()
            if number == 0:
                self.variables.put_back(self.taken)  # behind the rehearsal
            self.taken = self.variables.take()
            self.variables.enters()
            yield number
        self.encoded = self.variables.encoded()


def flag(number: int) -> torch.Tensor:
    """Nothing, until step 2."""
    return torch.full((3,), float(number if number >= 2 else 0))


def rebound(steps: Steps) -> Any:
    done = torch.zeros(3)
    for number in steps:
        done = done + flag(number)
    return done


def in_place(steps: Steps) -> Any:
    done = torch.zeros(3)
    alias = done
    for number in steps:
        done[:] = done + flag(number)
    assert alias is done
    return done


def swapped(steps: Steps) -> Any:
    def step(seen: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return seen, seen + flag(number)

    done = torch.zeros(3)
    for number in steps:
        _, done = step(done, number)
    return done


def by_numpy(steps: Steps) -> Any:
    done = np.zeros(3)
    for number in steps:
        done = done * 2 + flag(number).numpy()
    return done


def large(steps: Steps) -> Any:
    table, seen = np.zeros((300, 100)), torch.zeros(300, 1000)
    for number in steps:
        table, seen = table + number, seen + table.sum()
    return [table, seen]


def mask(steps: Steps) -> Any:
    ended = np.zeros(5, dtype=bool)
    for number in steps:
        ended[max(number, 0)] = not ended.all() and number >= 0
    return ended


def one_of_numpy(steps: Steps) -> Any:
    reward: Any = 0.0
    for number in steps:
        reward += np.float32(number + 2)
    return reward


def pair(steps: Steps) -> Any:
    hidden: Any = None
    for number in steps:
        if hidden is None:
            hidden = (torch.zeros(2), torch.ones(2))
        hidden = (hidden[0] + number, hidden[1] * 2)
    return hidden


def items(steps: Steps) -> Any:
    memory = [torch.zeros(2), torch.ones(2, dtype=torch.bfloat16)]
    for number in steps:
        memory[0] = memory[0] + number + memory[1]
    return memory


def by_name(steps: Steps) -> Any:
    memory: dict[str, Any] = {"mean": np.zeros(2), "count": 0}
    for number in steps:
        memory["mean"] = memory["mean"] + number
        memory["count"] += 1
    return memory


def recent(steps: Steps) -> Any:
    last = deque([torch.zeros(1)], maxlen=2)
    for number in steps:
        last.append(last[-1] * 2 + number)
    return last


def with_a_graph(steps: Steps) -> Any:
    weight, hidden = torch.ones(2, requires_grad=True), torch.zeros(2)
    for number in steps:
        hidden = hidden.detach()
        hidden = hidden * weight + number
    return hidden.detach()


def of_the_module(steps: Steps) -> Any:
    global carried
    carried = torch.zeros(2)

    def add(number: int) -> None:
        global carried
        carried = carried * 2 + number

    for number in steps:
        add(number)
    return carried


def of_a_function_around(steps: Steps) -> Any:
    kept = torch.zeros(2)

    def add(number: int) -> None:
        nonlocal kept
        kept = kept * 2 + number

    for number in steps:
        add(number)
    return kept


KINDS = [
    *(rebound, in_place, swapped, by_numpy, large, mask, one_of_numpy, pair, items, by_name, recent, with_a_graph),
    *(of_the_module, of_a_function_around),
]


class Undone(Steps):
    """Without a rehearsal."""

    def __iter__(self) -> Iterator[int]:
        yield from range(self.steps)


@pytest.mark.parametrize("script", KINDS)
def test_the_rehearsal_and_a_body_that_runs_again_leave_no_trace_in_them(script: Callable[[Steps], Any]) -> None:
    class Again(Steps):
        def __iter__(self) -> Iterator[int]:
            for number in super().__iter__():
                yield number
                if number in (1, 3):
                    self.variables.put_back(self.taken)
                    yield number

    assert packed(script(Again(4))) == packed(script(Undone(4)))


@pytest.mark.parametrize("script", KINDS)
def test_a_newcomer_gets_them(script: Callable[[Steps], Any]) -> None:
    there, here = Steps(3), Steps(5)
    script(there)

    class Newcomer(Steps):
        def __iter__(self) -> Iterator[int]:
            for number in super().__iter__():
                if number in (-1, 3, 4):
                    yield number

    here = Newcomer(5)
    here.at[3] = lambda: here.variables.receive(there.encoded)
    assert packed(script(here)) == packed(script(Undone(5)))


def test_memory_of_protected_tensors_is_not_written_through_a_variable() -> None:
    weight = torch.zeros(3)
    steps = Steps(2, lambda: {weight.untyped_storage().data_ptr()})

    def run() -> None:
        view = weight[:2]
        for number in steps:
            view += number + 2

    run()
    assert weight.tolist() == [6.0, 6.0, 0.0]

    def run_by_numpy() -> None:
        view = weight.numpy()[1:]
        for number in steps:
            view += number + 2

    run_by_numpy()
    assert weight.tolist() == [6.0, 12.0, 6.0]


def test_what_others_have_sent_is_not_written_over_while_a_script_still_does_what_follows_its_step() -> None:
    there, here, buffer = Steps(3), Steps(2), SimpleNamespace(stored=torch.zeros(2))

    def train(steps: Steps, memory: torch.Tensor) -> torch.Tensor:
        ring = memory
        for number in steps:
            if steps is here and number == 0:
                steps.variables.receive(there.encoded)
                assert buffer.stored.tolist() == [9.0, 9.0]
                steps.variables.postpone()
            ring += number + 2
        return ring

    train(there, torch.zeros(2))
    seen: list[float] = []
    here.at[1] = lambda: seen.extend(buffer.stored.tolist())
    train(here, buffer.stored)
    assert seen == [9.0, 9.0]


def test_constants_are_copied_once_and_told_to_nobody() -> None:
    table, done = torch.zeros(4, 1 << 10), torch.zeros(1)
    steps, copies = Steps(3), []

    def look() -> None:
        (space,) = (values for values in steps.variables.take().values() if "table" in values)
        copies.append(space["table"])

    steps.at.update({1: look, 2: look})
    for number in steps:
        done = done + table.sum() + number
    assert copies[0] is copies[1]
    places = {place.partition("\n")[2] for place in steps.encoded}
    assert "done" in places and "table" not in places


def test_a_text_that_is_nested_too_deeply_leaves_no_variable_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_deep(_: object) -> None:
        raise RecursionError

    monkeypatch.setattr("regrow.train.script.read_first.read_first", too_deep)
    steps = Steps(3)
    rebound(steps)
    assert {"done", "number"} <= {place.partition("\n")[2] for place in steps.encoded} and steps.variables.notes == []


def test_an_array_that_is_made_together_with_an_object_stays_with_it() -> None:
    made: Any = None
    output: Any = None
    for _ in Steps(1):
        if made is None:
            assert output is None
            made, output = object(), torch.ones(2)
        assert output is not None


@pytest.mark.parametrize(
    "value",
    [torch.zeros(0), torch.ones(2, 3, dtype=torch.bool), torch.ones((), dtype=torch.complex64), torch.ones(2).half()],
)
def test_a_tensor_travels_with_its_kind_and_shape(value: torch.Tensor) -> None:
    came = unpacked(packed([value]))
    assert isinstance(came, list) and torch.equal(came[0], value) and came[0].dtype is value.dtype
    assert came[0].shape == value.shape


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda each: each,
    "list": lambda each: [each, 3],
    "pair": lambda each: (each, each),
    "by name": lambda each: {"first": each, "inside": [each]},
    "recent": lambda each: deque([each], maxlen=2),
}


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_of_protected_memory_stays_one_in_a_newcomer(kind: str, *, in_place: bool) -> None:
    weight = torch.ones(4)
    here = VIEWS[kind](weight.view(2, 2))
    there = VIEWS[kind](torch.zeros(2, 2))
    taken = take_over(here, there, in_place=in_place, shared=lambda: {weight.untyped_storage().data_ptr()})
    weight.fill_(5)
    found = [each for each in leaves(taken) if isinstance(each, torch.Tensor)]
    assert found and all(each.eq(5).all() for each in found)


def leaves(value: Any) -> list[Any]:
    inside = list(value.values()) if isinstance(value, dict) else value
    return [leaf for each in inside for leaf in leaves(each)] if isinstance(inside, list | tuple | deque) else [value]
