"""Injects faults on demand into a worker. Nothing here runs unless a fault was armed."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook, register_module_full_backward_pre_hook

from regrow.agent.workers.link import WorkerLink
from regrow.comm.groups import Groups
from regrow.comm.observers import CallObserver
from regrow.core.exit_codes import ON_DEMAND
from regrow.core.ids import Seconds, StepNo
from regrow.core.messages import facts
from regrow.core.messages.vocabulary import FaultHow, FaultSpec, FaultStage
from regrow.hydration.shards import is_distributed, local

PAUSE_S: Seconds = 10.0
"""Longest pause: a paused rank waits for another rank's fault, which is to strike meanwhile."""
_GLANCE_S: Seconds = 0.01


class FaultInjector(CallObserver):
    """Causes armed faults at their stages.

    Args:
        link: reports each fault before it strikes.
        groups: used to strike in the middle of a reduction.
        parameters: returns the protected parameters; a hook on one of them strikes in the backward pass.
        halted: returns True if the generation is over for this worker, which ends a pause.
    """

    in_hooks = True

    def __init__(
        self, link: WorkerLink, groups: Groups, parameters: Callable[[], list[torch.Tensor]], halted: Callable[[], bool]
    ) -> None:
        self._link, self._groups, self._parameters, self._halted = link, groups, parameters, halted
        self._armed: dict[str, FaultSpec] = {}
        self._hooks: list[Any] = []
        self._step = StepNo(-1)
        self._received: FaultStage | None = None

    @property
    def armed(self) -> bool:
        """True if a fault is armed."""
        return bool(self._armed)

    def arm(self, *specs: FaultSpec) -> None:
        """Arm these faults; each is disarmed when it strikes."""
        for spec in specs:
            self._armed[spec.fault] = spec

    def replace(self, specs: list[FaultSpec]) -> None:
        """Arm these faults and no others."""
        self._armed = {spec.fault: spec for spec in specs}

    def enter(self, step: StepNo) -> None:
        """Set the hooks for faults that strike from within torch, before a step's body runs."""
        self._step = step
        if self._due(FaultStage.FORWARD):
            self._hooks.append(register_module_forward_pre_hook(lambda *_: self.inject(FaultStage.FORWARD, step)))
        if self._due(FaultStage.BACKWARD):
            self._hooks += self._in_backward(step)
        if self._due(FaultStage.REDUCE):
            self._receive(FaultStage.REDUCE)

    def enter_between(self, step: StepNo) -> None:
        """Prepare for faults in a restartable function between two steps, which is about to run."""
        self._step = step
        if self._due(FaultStage.BETWEEN):
            self._receive(FaultStage.BETWEEN)

    def answered(self, name: str) -> None:
        """Called when a collective has returned, while a fault at that stage is due: see `CallObserver.answered`."""
        stage = self._received
        if stage is not None and (stage is FaultStage.BETWEEN or "reduce" in name):
            self.inject(stage, self._step)

    def _receive(self, stage: FaultStage) -> None:
        if self._received is None:
            self._groups.observers = (*self._groups.observers, self)
        self._received = stage

    def _in_backward(self, step: StepNo) -> list[Any]:
        # A frozen parameter has no gradient to hook.
        trained = [parameter for parameter in self._parameters() if parameter.requires_grad]
        middle = len(trained) // 2
        if not trained or is_distributed(trained[middle]):
            # The forward runs on the gathered parameter, so no gradient reaches a hook on the shard.
            return [register_module_full_backward_pre_hook(lambda *_: self.inject(FaultStage.BACKWARD, step))]
        # The middle parameter may get no gradient in this body, as in an average of weights; the next one does.
        return [
            parameter.register_hook(lambda grad: self.inject(FaultStage.BACKWARD, step))  # type: ignore[no-untyped-call]
            for parameter in trained[: middle + 1]
        ]

    def leave(self) -> None:
        """Remove the hooks after the body."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._received is not None:
            self._groups.observers = tuple(each for each in self._groups.observers if each is not self)
            self._received = None

    def _due(self, stage: FaultStage) -> FaultSpec | None:
        if not self._armed:
            return None
        return next((spec for spec in self._armed.values() if self._applies(spec, stage)), None)

    def _applies(self, spec: FaultSpec, stage: FaultStage) -> bool:
        if stage in (FaultStage.FORM, FaultStage.HYDRATE, FaultStage.ROLL):
            # A recovery belongs to no exact step: strike in the first one at the step or after it.
            return spec.stage is stage and (spec.step is None or self._step >= spec.step)
        if stage is FaultStage.BETWEEN:
            return spec.stage is stage and (spec.step is None or self._step >= spec.step)
        at_once = spec.stage is FaultStage.NOW and stage is FaultStage.FORWARD
        return (spec.stage is stage or at_once) and spec.step in (None, self._step)

    def inject(self, stage: FaultStage, step: StepNo) -> None:
        """Cause the fault that is due at this stage of this step, if there is one."""
        self._step = step
        spec = self._due(stage)
        if spec is None:
            return
        del self._armed[spec.fault]
        self._link.send(facts.FaultFired(self._link.env.worker, spec.fault, step, time.monotonic()))
        if spec.how is FaultHow.BITFLIP:
            flip_bit(self._parameters())
        elif spec.how is FaultHow.PAUSE:
            self._pause()
        else:
            _suffer(spec.how)

    def _pause(self) -> None:
        until = time.monotonic() + PAUSE_S
        while not self._halted() and time.monotonic() < until:
            time.sleep(_GLANCE_S)


def _suffer(how: FaultHow) -> None:
    match how:
        case FaultHow.SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultHow.SIGSTOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case FaultHow.EXIT:
            os._exit(ON_DEMAND)
        case FaultHow.EXCEPTION:
            raise RuntimeError("fault on demand")
        case FaultHow.OOM_LIKE:
            raise torch.OutOfMemoryError("fault on demand: out of memory")
    return None


_BIT = {torch.float64: (6, 0x02), torch.float32: (2, 0x10), torch.bfloat16: (0, 0x10), torch.float16: (0, 0x80)}
"""A high bit of the mantissa for each type: byte of the element, and mask."""


def flip_bit(parameters: list[torch.Tensor]) -> None:
    """Flip one bit of the largest element of the middle parameter like faulty memory: no hook or version shows it.

    Of a `DTensor` the local piece is used; parameters without a local piece do not count.
    """
    here = [local(parameter).data for parameter in parameters]
    usable = [tensor for tensor in here if tensor.numel() and tensor.dtype in _BIT and tensor.is_contiguous()]
    if not usable:
        return
    tensor = usable[len(usable) // 2]
    byte, mask = _BIT[tensor.dtype]
    at = int(tensor.abs().argmax()) * tensor.element_size() + byte
    tensor.view(-1).view(torch.uint8)[at] ^= mask
