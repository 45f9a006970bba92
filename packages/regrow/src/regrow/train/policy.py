"""Applies a policy to the optimizers of a script."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from regrow.step.policy import Policy


class Scaled:
    """Multiplies the learning rates by the policy's factor while an optimizer updates, and restores them afterwards.

    So nothing that is saved, hydrated or compared contains the factor: a newcomer need not receive it, the schedule's
    own numbers are the same in all worlds, and rounding does not add up over changes.

    Args:
        policy: gives the factor.
        optimizers: optimizers whose rates are scaled.
        replicas: returns the number of replicas, which changes only between two steps.
    """

    def __init__(
        self, policy: Policy, optimizers: Iterable[torch.optim.Optimizer], replicas: Callable[[], int]
    ) -> None:
        self._policy, self._replicas = policy, replicas
        self._own: dict[int, list[Any]] = {}
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda optimizer, *_: self._scale(optimizer))
            optimizer.register_step_post_hook(lambda optimizer, *_: self._restore(optimizer))

    @property
    def factor(self) -> float:
        """Factor of the learning rates now."""
        return self._policy.factor(self._replicas())

    def setting(self, name: str) -> Any:
        """A named value of the policy for the present world. Raises `UsageError` for an unknown name."""
        return self._policy.setting(name, self._replicas())

    def _scale(self, optimizer: torch.optim.Optimizer) -> None:
        factor = self.factor
        if factor == 1.0:
            return
        own = []
        for group in optimizer.param_groups:
            rate = group["lr"]
            own.append(rate.clone() if isinstance(rate, torch.Tensor) else rate)
            if isinstance(rate, torch.Tensor):
                rate.mul_(factor)
            else:
                group["lr"] = rate * factor
        self._own[id(optimizer)] = own

    def _restore(self, optimizer: torch.optim.Optimizer) -> None:
        own = self._own.pop(id(optimizer), None)
        if own is None:
            return
        for group, rate in zip(optimizer.param_groups, own, strict=True):
            if isinstance(rate, torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
