"""Forms of public projects: wrappers, optimizers, environments and averages of one's own."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from tests.harm.frame import Trial, backward, mlp, mse
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
            model.require_backward_grad_sync = False
            backward(mse(model(x[:2]), y[:2]) / 2)
            model.require_backward_grad_sync = True
            loss = mse(model(x[2:]), y[2:])
            step.log(loss=loss)
            backward(loss / 2)
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
