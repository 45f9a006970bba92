"""Changes of a cut-off body in objects around protected modules are put back; objects of threads are left alone."""

import collections
import gc
import queue
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from regrow.train.attributes.hanging import HangingAttributes, of_modules
from regrow.train.state.protected import ProtectedState


class Count:
    """An object of a script's own."""

    def __init__(self) -> None:
        self.number, self.seen, self.names = 0, {1, 2}, {"a": [1]}


class Wrapper(nn.Module):
    """With all that a wrapper may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self._queued = False
        self.count, self.counts = Count(), [Count()]
        self.waiting: collections.deque[int] = collections.deque([1])
        self.handle: Any = None


def attributes_of(module: nn.Module) -> HangingAttributes:
    return ProtectedState([module]).attributes


def flag(module: Wrapper) -> None:
    module._queued = True


def container_of_an_object(module: Wrapper) -> None:
    module.count.seen.add(3)
    module.count.names["a"].append(2)
    module.count.names["b"] = []


def object_in_a_list(module: Wrapper) -> None:
    module.counts[0].number += 1
    module.counts.append(Count())


def made_and_removed(module: Wrapper) -> None:
    module.pending = 3  # type: ignore[assignment]
    del module.handle
    module.waiting.clear()


@pytest.mark.parametrize("half", [flag, container_of_an_object, object_in_a_list, made_and_removed])
def test_all_that_a_half_body_leaves_is_put_back_in_its_place(half: Any) -> None:
    module = Wrapper()
    left, count, names, waiting = attributes_of(module), module.count, module.count.names, module.waiting
    for _ in range(2):
        left.take()
        half(module)
        left.put_back()
        assert module._queued is False and module.handle is None and not hasattr(module, "pending")
        assert module.count is count and count.seen == {1, 2} and count.names is names and names == {"a": [1]}
        assert module.waiting is waiting and list(waiting) == [1]
        assert [each.number for each in module.counts] == [0]


def test_what_was_changed_between_two_bodies_stays() -> None:
    module = Wrapper()
    left = attributes_of(module)
    left.take()
    module.count.number, module._queued = 7, True
    left.take()
    module.count.number = 9
    left.put_back()
    assert (module.count.number, module._queued) == (7, True)


@pytest.mark.parametrize("how", ["method", "partial", "closure"])
def test_objects_that_only_hooks_know_are_found(how: str) -> None:
    net, count = nn.Linear(3, 2), Count()

    def closure(_: Any) -> None:
        count.number += 1

    class Bound(Count):
        def method(self, _: Any) -> None:
            self.number += 1

    bound = Bound()
    hook = {"method": bound.method, "partial": partial(Bound.method, bound), "closure": closure}[how]
    net.weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    left = attributes_of(net)
    left.take()
    net(torch.ones(3)).sum().backward()
    assert bound.number + count.number == 1
    left.put_back()
    assert bound.number + count.number == 0


def body(net: Any, value: float) -> None:
    net.weight.main_grad.add_(value)


@pytest.mark.parametrize(
    ("start", "rest"), [(0.0, 0.0), (1.0, 1.0), (0.0, 5.0)], ids=["zeros", "values", "values later"]
)
def test_gradients_of_a_place_of_their_own_are_put_back(start: float, rest: float) -> None:
    net: Any = nn.Linear(3, 2)
    net.weight.main_grad = torch.full((2, 3), start)
    left = attributes_of(net)
    for number in range(8):
        left.take()
        before = net.weight.main_grad.clone()
        body(net, 1.0)
        if number:  # the first one is the rehearsal, which is whole
            left.put_back()
            assert torch.equal(net.weight.main_grad, before), number
            body(net, 1.0)
        net.weight.main_grad.fill_(rest + number if rest == 5 else rest)


def test_what_no_body_writes_is_not_copied_and_an_output_that_is_kept_is_not_kept_longer() -> None:
    module: Any = Wrapper()
    module.table = torch.ones(5)
    module.last = module.net(torch.ones(3))
    left = attributes_of(module)
    left.take()
    left.take()
    assert all(each._copy is None for each in left._tensors.values())
    graph = weakref.ref(module.last)
    module.last = None
    gc.collect()
    assert graph() is None
    left.put_back()
    assert module.last is None


def test_objects_of_threads_and_of_libraries_are_left_alone() -> None:
    class Logger(Count):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    module: Any = Wrapper()
    module.logger, module.queue = Logger(), queue.Queue()
    left = attributes_of(module)
    left.take()
    module.logger.number = 4
    module.queue.put(1)
    left.put_back()
    assert module.logger.number == 4 and module.queue.qsize() == 1


def test_the_rollback_of_a_body_puts_it_back() -> None:
    module = Wrapper()
    state = ProtectedState([module, torch.optim.SGD(module.parameters(), lr=0.1)])
    state.begin()
    flag(module)
    state.rollback()
    assert module._queued is False
    of_modules({}, {}, list).put_back()  # nothing was taken
