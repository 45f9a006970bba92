"""Records all that a body computes, in order, while it runs; the rank and its shadow use the same code."""

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from regrow.comm.observers import Done
from regrow.core.errors import GenerationHalted
from regrow.core.process.own_code import is_own_file
from regrow.devices import accelerators
from regrow.train.attributes.kept_values import position
from regrow.train.graphs.kinds import OF_LIBRARIES
from regrow.train.proving.digesting import digest_array, digest_bytes, digest_tensor, digest_text
from regrow.train.proving.trace import Computation, Computed, Trace
from regrow.train.script.source import is_script

_IN_PLACE = frozenset({"allreduce", "allreduce_coalesced", "reduce", "send", "broadcast"})
_RECEIVES = frozenset({"recv", "recv_anysource", "barrier"})
_SENDS = frozenset({"send", "barrier"})
_ENGINE = os.path.join("torch", "autograd", "graph.py")
_OF_OPTIMIZERS = (".param_groups", ".state", "parameter groups")
_DEEP = 8
_MOST_ITEMS = 4096


class Answers(Protocol):
    """Destination, or source, of the answers of collectives."""

    def take(self, key: str, outputs: list[torch.Tensor], *, backward: bool) -> bool:
        """Take the answer of a call from these tensors, or put it there. False: they do not hold the rank's answer."""
        ...


class Recorder:
    """Records one body. May be called from any thread.

    Args:
        trace: the trace that is filled.
        answers: destination or source of the answers of collectives.
        over: returns True if the body is to be given up, by an error in its next collective.
    """

    def __init__(self, trace: Trace, answers: Answers, *, over: Callable[[], bool] = lambda: False) -> None:
        self.trace = trace
        trace.threads = torch.get_num_threads()
        self.paused = False
        self.failed = ""
        self._answers, self._over = answers, over
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._forward_foreign = self._any_foreign = False
        """`_any_foreign`: some answer was not the rank's. `_forward_foreign`: some answer in a forward pass was not."""
        self._hooks: list[Any] = []

    # --- events -------------------------------------------------------------------------------------------------

    def record(self, group: int, rank: int, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Done | None:
        """Record a collective: see `Tape.record`. Raises `GenerationHalted` if the body is to be given up."""
        if self.paused:
            return None
        if self._over():
            raise GenerationHalted("this proof is no longer needed")
        backward, where = _caller()
        parts = [] if name in _RECEIVES else _given(name, args, options, rank)
        with self._lock:
            key = f"{group}.{self._counts[f'g{group}']}"
            self._counts[f"g{group}"] += 1
        place = "the reduction of gradients" if backward else f"{name}{where}"
        try:
            digest = digest_text("|".join([name, *(str(digest_tensor(part)) for part in parts)]))
            self._add(Computation.GIVEN, key, digest, f"what is given to {place}", backward=backward)
        except Exception as error:  # noqa: BLE001  training does not depend on this
            self._fail(error)
            return None

        def done() -> None:
            try:
                outputs = [] if name in _SENDS else list(_tensors(args[0] if args else ()))
                known = self._answers.take(key, outputs, backward=backward)
                with self._lock:
                    self._any_foreign |= not known
                    self._forward_foreign |= not known and not backward
            except Exception as error:  # noqa: BLE001  a transport's thread must not end by it
                self._fail(error)

        return done

    def batch(self, batch: object, what: str = "the batch") -> None:
        """Record the input of the body."""
        for path, value in _leaves(batch, what):
            if isinstance(value, torch.Tensor):
                self._note(Computation.BATCH, path, partial(digest_tensor, value), path)
            elif isinstance(value, np.ndarray):
                self._note(Computation.BATCH, path, partial(digest_array, value), path)
            elif isinstance(value, int | float | str | bytes | bool | None):
                self._note(Computation.BATCH, path, partial(digest_text, repr(value)), path, repr(value)[:60])

    def logged(self, numbers: Mapping[str, torch.Tensor | float]) -> None:
        """Record numbers that the script has logged."""
        for name, value in numbers.items():
            number = float(value.detach() if isinstance(value, torch.Tensor) else value)
            digest, label = partial(digest_text, number.hex()), f"`{name}` that the step logs"
            self._note(Computation.LOGGED, self._again(f"log {name}"), digest, label, f"{number:.9g}")

    def watch(self, parameters: Mapping[str, torch.Tensor], modules: Iterable[tuple[str, nn.Module]] = ()) -> None:
        """Record gradients as they are computed, and these modules' outputs, from now on."""
        for name, parameter in parameters.items():
            if parameter.requires_grad and parameter.is_leaf:
                try:
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook(name)))  # type: ignore[no-untyped-call]
                except RuntimeError:  # torch knows no such hook for this kind of tensor
                    continue
        for name, module in modules:
            self._hooks.append(module.register_forward_hook(self._output(name)))

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def look(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None and not self.paused:
                key, digest = self._again(f"gradient {name}"), partial(digest_tensor, gradient)
                self._note(Computation.GRADIENT, key, digest, f"the gradient of {name}", backward=True)

        return look

    def _output(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, _: Any, output: Any) -> None:
            if self.paused:
                return
            digest = partial(_digest_all, list(_tensors(output)))
            label = f"the output of {name} ({type(module).__name__})"
            self._note(Computation.OUTPUT, self._again(f"output {name}"), digest, label)

        return look

    def ended(self, changed: Callable[[], tuple[Mapping[str, int], Mapping[str, int]]]) -> None:
        """Complete the record after a body without an error.

        Args:
            changed: returns digests of the tensors and of the Python state that updates may have changed.
        """
        self.stop()
        for name, digest in _generators():
            self._note(Computation.DRAWN, name, digest, f"what is drawn from {name}")
        if self._any_foreign:
            return
        try:
            tensors, python = changed()
        except Exception as error:  # noqa: BLE001  anything that the script's objects raise
            self._fail(error)
            return
        for name, number in tensors.items():
            self._add(Computation.UPDATED, name, number, f"{name} after the update")
        for name, number in python.items():
            # An object of the script may keep a clock, or values that each process has for itself.
            kind = Computation.UPDATED if name.endswith(_OF_OPTIMIZERS) else Computation.LOGGED
            self._add(kind, f"after {name}", number, f"{name} after the update")

    def stop(self) -> None:
        """Stop recording."""
        self.paused = True
        while self._hooks:
            self._hooks.pop().remove()

    # --- entries ------------------------------------------------------------------------------------------------

    def _again(self, name: str) -> str:
        with self._lock:
            self._counts[name] += 1
            return f"{name}#{self._counts[name]}"

    def _note(
        self,
        kind: Computation,
        key: str,
        digest: Callable[[], int],
        label: str,
        text: str = "",
        *,
        backward: bool = False,
    ) -> None:
        try:
            self._add(kind, key, digest(), label, text, backward=backward)
        except Exception as error:  # noqa: BLE001  training does not depend on this
            self._fail(error)

    def _add(
        self, kind: Computation, key: str, digest: int, label: str, text: str = "", *, backward: bool = False
    ) -> None:
        with self._lock:
            free = not self._forward_foreign and (backward or not self._any_foreign)
            self.trace.entries.append(Computed(kind, key, digest, label, text, free, backward))

    def _fail(self, error: Exception) -> None:
        self.failed = self.failed or f"{type(error).__name__}: {error}"


def _digest_all(tensors: list[torch.Tensor]) -> int:
    return digest_text("|".join(str(digest_tensor(each)) for each in tensors))


def _digest_device_generator() -> int:
    state = accelerators.random_state()
    return 0 if state is None else digest_bytes(state.cpu().numpy().tobytes())


def _generators() -> Iterator[tuple[str, Callable[[], int]]]:
    for name, generator in zip(("numpy's", "Python's", "torch's"), OF_LIBRARIES, strict=True):
        yield f"{name} generator", partial(_drawn, generator)
    if accelerators.in_use() is not None:
        yield "the device's generator", _digest_device_generator


def _drawn(generator: Any) -> int:
    return digest_bytes(position(generator))


def _caller() -> tuple[bool, str]:
    """True if autograd makes this call, as for DDP's reducer; else False, and the script's line that makes it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and is_own_file(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.endswith(_ENGINE):
        return True, ""
    at: FrameType | None = frame
    while at is not None and not is_script(at.f_code.co_filename):
        at = at.f_back
    return False, "" if at is None else f" ({os.path.basename(at.f_code.co_filename)}:{at.f_lineno})"


def _given(name: str, args: tuple[Any, ...], options: Mapping[str, Any], rank: int) -> list[torch.Tensor]:
    if name == "broadcast" and getattr(args[1] if len(args) > 1 else options.get("opts"), "rootRank", rank) != rank:
        return []
    return list(_tensors(args[0 if name in _IN_PLACE else 1] if len(args) > (name not in _IN_PLACE) else ()))


def _tensors(value: Any, deep: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif deep < _DEEP and isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each, deep + 1)
    elif deep < _DEEP and isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each, deep + 1)


def _leaves(value: object, path: str, deep: int = 0) -> Iterator[tuple[str, object]]:
    if isinstance(value, list | tuple | dict) and deep < _DEEP:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for at, (key, each) in enumerate(items):
            if at >= _MOST_ITEMS:
                break
            yield from _leaves(each, f"{path}[{key!r}]", deep + 1)
    else:
        yield path, value
