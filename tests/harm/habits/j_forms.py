"""Forms of public projects: wrappers, optimizers, environments and averages of one's own."""

import copy
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from tests.harm.frame import Trial, backward, ddp, mlp, mse
from tests.harm.habits.f_modules import train
from tests.harm.table import habit
from torch import nn

STRUCK = ((0, 2, "reduce"), (1, 4, "backward"), (2, 6, "reduce"), (1, 10, "update"))


class Bucket:
    """Some parameters whose gradients are reduced together, when all of them are there."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = set(parameters)
        self.order = parameters
        self.sum = torch.zeros(sum(each.numel() for each in parameters))
        self.reset()

    def reset(self) -> None:
        self.ready: set[nn.Parameter] = set()
        self.handle: Any = None
        self.sum.zero_()

    def mark(self, parameter: nn.Parameter) -> None:
        assert parameter not in self.ready, "a gradient comes twice"
        self.ready.add(parameter)
        if self.ready == self.parameters:
            assert self.handle is None
            self.handle = dist.all_reduce(self.sum, async_op=True)


class Manager:
    """The buckets of a module. Each parameter has its place in one as `main_grad`."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.buckets = [Bucket(parameters[:2]), Bucket(parameters[2:])]
        self.at = {each: bucket for bucket in self.buckets for each in bucket.order}
        for bucket in self.buckets:
            start = 0
            for each in bucket.order:
                each.main_grad = bucket.sum[start : start + each.numel()].view_as(each)  # type: ignore[attr-defined]
                start += each.numel()

    def wait(self) -> None:
        for bucket in self.buckets:
            assert bucket.handle is not None, "not all gradients are there"
            bucket.handle.wait()
            bucket.sum /= dist.get_world_size()


class OwnWrapper(nn.Module):
    """picotron's and nanotron's way: hooks, a callback once a backward, gradients in a place of their own."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.require_backward_grad_sync = True
        self._callback_is_set = False
        self.manager = Manager(list(net.parameters()))
        for each in net.parameters():
            each.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self._callback_is_set:
            self._callback_is_set = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
        if self.require_backward_grad_sync:
            self.manager.at[parameter].mark(parameter)

    def _end(self) -> None:
        self._callback_is_set = False
        if self.require_backward_grad_sync:
            self.manager.wait()
            for each in self.manager.at:
                each.grad = each.main_grad.clone()  # type: ignore[attr-defined]

    def reset(self) -> None:
        for bucket in self.manager.buckets:
            bucket.reset()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(x)
        return y


@habit("a data parallel wrapper of one's own: buckets, a callback queued once a backward, `main_grad`", faults=STRUCK)
def own_wrapper(t: Trial) -> dict[str, Any]:
    model = OwnWrapper(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            (x, last_x), (y, last_y) = x.chunk(2), y.chunk(2)
            model.require_backward_grad_sync = False
            first = mse(model(x), y) / 2
            backward(first)
            model.require_backward_grad_sync = True
            last = mse(model(last_x), last_y) / 2
            step.log(loss=first.detach() + last.detach())
            backward(last)
            optimizer.step()
            optimizer.zero_grad()
            model.reset()
    return {"model": model.net, "optimizer": optimizer}


@habit("gradients reduced by hooks of an object that is no module, which counts them", faults=STRUCK)
def own_reducer(t: Trial) -> dict[str, Any]:
    net = mlp()

    class Reducer:
        def __init__(self) -> None:
            self.count, self.seen = 0, list[int]()
            for at, each in enumerate(net.parameters()):
                each.register_post_accumulate_grad_hook(functools.partial(self.ready, at))  # type: ignore[no-untyped-call]

        def ready(self, at: int, _: nn.Parameter) -> None:
            self.count += 1
            self.seen.append(at)
            if self.count == len(list(net.parameters())):
                for each in net.parameters():
                    dist.all_reduce(each.grad)
                    each.grad /= dist.get_world_size()  # type: ignore[operator]
                assert len(set(self.seen)) == self.count
                self.count = 0
                self.seen.clear()

    Reducer()
    return train(t, net, torch.optim.AdamW(net.parameters(), lr=1e-2))


def clip(t: Trial, gather: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Two towers, and a temperature that is learnt."""
    images, texts = mlp(1, 8, 6), mlp(2, 8, 6)
    scale = nn.Parameter(torch.tensor(1.0))
    parameters = [*images.parameters(), *texts.parameters(), scale]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    t.session.protect(optimizer, images=images, texts=texts)
    for step in t.steps():
        with step as (x, _):
            mine = images(x), texts(x.flip(1))
            all_images, all_texts = (gather(nn.functional.normalize(each, dim=1)) for each in mine)
            alike = scale.exp() * all_images @ all_texts.T
            at = torch.arange(len(alike))
            loss = (nn.functional.cross_entropy(alike, at) + nn.functional.cross_entropy(alike.T, at)) / 2
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            for each in parameters:
                dist.all_reduce(each.grad)
            optimizer.step()
    return {"images": images, "texts": texts, "scale": scale, "optimizer": optimizer}


@habit("CLIP: negatives of all ranks by an `all_gather` with gradients", differs="the more ranks, the more negatives")
def clip_gathered(t: Trial) -> dict[str, Any]:
    return clip(t, lambda mine: torch.cat(with_gradients.all_gather(mine)))  # type: ignore[no-untyped-call]


@habit("CLIP: negatives of all ranks without gradients, its own put in their place", differs="as above")
def clip_own_gradients_alone(t: Trial) -> dict[str, Any]:
    def gather(mine: torch.Tensor) -> torch.Tensor:
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine.detach().contiguous())
        every[dist.get_rank()] = mine
        return torch.cat(every)

    return clip(t, gather)


class Counting:
    """An average of weights as detectors have it: how many updates there were decides how much counts."""

    def __init__(self, net: nn.Module) -> None:
        self.ema, self.updates = copy.deepcopy(net).requires_grad_(False), 0

    @torch.no_grad()
    def update(self, net: nn.Module) -> None:
        self.updates += 1
        keep = 0.99 * (1 - math.exp(-self.updates / 5))
        for mine, other in zip(self.ema.parameters(), net.parameters(), strict=True):
            mine.mul_(keep).add_(other, alpha=1 - keep)


def averaged(t: Trial, average: Counting, net: nn.Module, protected: Any) -> dict[str, Any]:
    model = ddp(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer, ema=protected)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            average.update(net)
    return {"model": model, "optimizer": optimizer, "ema": average.ema, "updates": average.updates}


@habit("EMA in an object that counts its updates in a plain attribute, its copy of the weights protected")
def ema_that_counts(t: Trial) -> dict[str, Any]:
    net = mlp()
    average = Counting(net)
    return averaged(t, average, net, average.ema)


@habit("the same, the object protected, whose `state_dict` has the copy and not the count")
def ema_that_counts_and_saves_its_copy(t: Trial) -> dict[str, Any]:
    class Saving(Counting):
        def state_dict(self) -> Any:
            return self.ema.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self.ema.load_state_dict(state)

    net = mlp()
    average = Saving(net)
    return averaged(t, average, net, average)


class Walk:
    """An environment whose steps draw from a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.place, self.steps = np.zeros(8, np.float32), 0

    def reset(self) -> np.ndarray:
        self.place = np.array([self.random.gauss(0, 1) for _ in range(8)], np.float32)
        self.steps = 0
        return self.place

    def step(self, action: float) -> tuple[np.ndarray, float, bool]:
        self.place = self.place + np.float32(0.1 * action + 0.1 * self.random.gauss(0, 1))
        self.steps += 1
        return self.place, -float(np.abs(self.place).mean()), self.steps >= 7


class Vector:
    """In the form of gymnasium's vectors: a library's class that holds the script's environments."""

    def __init__(self, envs: list[Walk]) -> None:
        self.envs = envs
        self.seen = np.stack([each.reset() for each in envs])

    def reset(self) -> np.ndarray:
        self.seen = np.stack([each.reset() for each in self.envs])
        return self.seen

    def step(self, actions: list[float]) -> tuple[np.ndarray, list[float]]:
        rewards = []
        for at, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
            self.seen[at], reward, done = env.step(action)
            rewards.append(reward)
            if done:
                self.seen[at] = env.reset()
        return self.seen, rewards


Vector.__module__ = "vectors.of_a_library"


def ppo(t: Trial, envs: Any, **named: Any) -> dict[str, Any]:
    """A rollout and two updates on it in a body."""
    net = mlp(1, 8, 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    t.session.protect(net, optimizer, **named)
    for step in t.steps():
        with step:
            seen, rewards = [], []
            for _ in range(5):
                seen.append(torch.from_numpy(envs.seen.copy()))
                with torch.no_grad():
                    actions = net(seen[-1]).squeeze(1).tolist()
                rewards += envs.step(actions)[1]
            step.log(reward=sum(rewards))
            for _ in range(2):
                loss = mse(net(torch.cat(seen)).squeeze(1), torch.tensor(rewards))
                optimizer.zero_grad()
                backward(loss)
                for each in net.parameters():
                    dist.all_reduce(each.grad)
                optimizer.step()
    return {"model": net, "optimizer": optimizer}


@habit(
    "PPO whose environments, in a library's vector, change in the body",
    refused="changes `envs` (Vector: its",
    instead='`state_dict` for them, and `protect(envs=envs, part=f"rank{session.rank}")` with `--buddy-every`',
)
def ppo_unprotected(t: Trial) -> dict[str, Any]:
    envs = Vector([Walk(10 * t.session.rank + at) for at in range(3)])
    return ppo(t, envs)


@habit(
    "PPO whose environments have `state_dict`, places and generators in it, the same on all ranks",
    differs="each rank adds its gradients to the others'",
)
def ppo_protected(t: Trial) -> dict[str, Any]:
    class Kept(Vector):
        def state_dict(self) -> dict[str, Any]:
            state = [[each.random.getstate(), each.place.copy(), each.steps] for each in self.envs]
            return {"envs": state, "seen": self.seen.copy()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"].copy()
            for each, (drawn, place, steps) in zip(self.envs, state["envs"], strict=True):
                each.random.setstate(drawn)
                each.place, each.steps = place.copy(), steps

    envs = Kept([Walk(at) for at in range(3)])
    return ppo(t, envs, games=envs)
