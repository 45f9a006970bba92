"""Completions of a generating trainer, as protected state (decision 0111)."""

import functools
import importlib
import json
import logging
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash

from regrow.core.errors import UsageError
from regrow.hydration.codec import decode, encode
from regrow.train.doubts import doubt
from regrow_recipes.adapters import private_trl
from regrow_recipes.adapters.private_trl import Completions

if TYPE_CHECKING:
    from regrow.train.session import Session

_PLAIN = "plain"
_Parts = dict[str, list[torch.Tensor]]
"""Bytes as tensors, by digest of the whole: restoring never overwrites a tensor that a snapshot may refer to."""
_LARGE_BYTES = 256 << 20
_log = logging.getLogger("regrow")


class Rollouts:
    """State of a generation that later steps need: completions of all ranks, counters, logged texts.

    Completions differ between ranks, so no replica could restore them: if they outlive the step that made them, ranks
    exchange them in that step, and each keeps all.

    Args:
        trainer: the trainer.
        session: of this process.
    """

    def __init__(self, trainer: Any, session: "Session") -> None:
        self._trainer, self._session = trainer, session
        self._accumulated: int = trainer.args.gradient_accumulation_steps
        self._outlive = self._accumulated % (trainer.args.steps_per_generation * trainer.num_iterations) != 0
        self._judges = private_trl.Judge.all_of(trainer)
        self._left: list[list[str]] = []
        """For each reward, the containers missing from the state that was just received."""
        self._kept: _Parts = {}
        self._stale = False
        self._known: Completions | None = None
        self._text: tuple[list[object], _Parts] = [], {}

    def begin(self, *, rehearsal: bool = False) -> None:
        """Start a body: give the trainer this rank's completions of an earlier step, if there are any."""
        if self._stale:
            found = None
            for parts in self._kept.values():
                found = unpacked(parts[self._session.rank].numpy().tobytes(), self._trainer.args.device)
            private_trl.put_completions(self._trainer, found)
            self._stale = False
        self._known = private_trl.completions(self._trainer)
        self.enter("step", self._trainer.state.global_step, rehearsal=rehearsal)

    def enter(self, place: str, number: int, *, rehearsal: bool = False) -> None:
        """Enter the body of a step, or the time after it, possibly again."""
        lefts = self._left if self._left and not rehearsal else [[] for _ in self._judges]
        for judge, left in zip(self._judges, lefts, strict=True):
            if lost := judge.enter(place, number, left=left, rehearsal=rehearsal):
                doubt(self._session, lost)
        self._left = self._left if rehearsal else []

    def share(self, forwards: int) -> None:
        """Exchange the state that the next steps need, after this rank's `forwards` forward passes. A collective."""
        private_trl.sum_times(self._trainer, forwards)
        made = private_trl.completions(self._trainer)
        if made is None or made is self._known or not self._outlive:
            return
        parts = _exchanged(_tensor(packed(made)), self._session.world_size, self._trainer.args.device)
        self._kept = _by_digest(parts)
        if (size := sum(part.nbytes for part in parts)) > _LARGE_BYTES:
            _tell_size(size >> 20)

    def state_dict(self) -> dict[str, Any]:
        """Values equal on all ranks: completions by rank, and texts as one.

        Large values are uint8 tensors, which are sent in pieces; plain values would all be in one message.
        """
        own = {
            "completions": {digest: list(parts) for digest, parts in self._kept.items()},
            "logged": self._logged(),
            "rewards": [each.state() for each in self._judges],
            "left": [each.left() for each in self._judges],
        }
        return private_trl.progress(self._trainer) | own

    def load_state_dict(self, received: Mapping[str, Any]) -> None:
        """Restore the state of another rank, or an earlier one of this rank."""
        private_trl.put_progress(self._trainer, dict(received))
        for judge, state in zip(self._judges, received["rewards"], strict=True):
            judge.put(state)
        self._left = [list(names) for names in received["left"]]
        self._kept, self._stale = dict(received["completions"]), True
        for (text,) in received["logged"].values():
            private_trl.put_logged(self._trainer, json.loads(text.numpy().tobytes()))
        self._text = [], {}

    def _logged(self) -> _Parts:
        if not self._trainer.log_completions:
            return {}
        marks = private_trl.marks(self._trainer)
        known = self._text[0]
        if len(known) != len(marks) or not all(map(operator.is_, known, marks)) or not marks:
            try:
                text = json.dumps(private_trl.logged(self._trainer))
            except TypeError as error:
                raise UsageError(
                    f"log_completions under regrow keeps only strings and numbers: {error}",
                    hint="set log_completions=False",
                ) from error
            self._text = marks, _by_digest([_tensor(text.encode())])
        return self._text[1]


@functools.cache
def _tell_size(mebibytes: int) -> None:
    _log.warning("each rank keeps the completions of all ranks until the next generation: %d MiB", mebibytes)


def packed(made: Completions) -> bytes:
    """Encode completions: tensors with their exact bits, without a device. Raises `StateError` for other values."""
    tensors = dict[str, torch.Tensor]()

    def lift(_: str, tensor: torch.Tensor) -> str:
        name = str(len(tensors))
        tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return name

    plain = encode(made, path="completions", lift=lift)
    tensors[_PLAIN] = torch.frombuffer(bytearray(plain), dtype=torch.uint8)
    return bytes(_safetensors().save(tensors))


def unpacked(data: bytes, device: Any) -> Completions:
    """Decode the bytes of `packed` to a device. Raises `StateError` for anything else."""
    tensors = _safetensors().load(data)
    found: Any = decode(tensors[_PLAIN].numpy().tobytes(), resolve=lambda name: tensors[name].to(device))
    return list(found)


def _safetensors() -> Any:
    return importlib.import_module("safetensors.torch")  # a dependency of transformers


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)  # never empty: it has a header, or braces


def _by_digest(parts: list[torch.Tensor]) -> _Parts:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part.numpy().data)
    return {digest.hexdigest(): parts}


def _exchanged(mine: torch.Tensor, world: int, device: Any) -> list[torch.Tensor]:
    """The bytes of each rank, in order of rank, in host memory."""
    if world == 1:
        return [mine]
    size = torch.tensor([len(mine)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(world)]
    dist.all_gather(sizes, size)
    lengths = [int(each) for each in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(mine)] = mine
    padded = padded.to(device)
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded)
    return [part[:length].to("cpu", copy=True) for part, length in zip(parts, lengths, strict=True)]
