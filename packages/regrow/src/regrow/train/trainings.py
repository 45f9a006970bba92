"""Several trainings in one script: finished ones are skipped, and their results are the same on all ranks.

Each worker runs one training from its beginning, whether it starts the training or joins later, so nothing that a body
leaves behind in a process can affect the next one. See decision 0105.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from regrow.core.errors import StateError, UsageError
from regrow.core.messages.trainings import FinishedTraining
from regrow.data.seeding import seed_everything
from regrow.hydration.codec import decode, encode
from regrow.train.loop import StepLoop
from regrow.train.worker.participation import Participation

_ROOM, _FRAME, _LEAST = 64 << 10, 64, 64
"""Bytes of all names and results, which workers get as they start; overhead of a training; minimum for a result."""


class OneTraining:
    """One of the trainings of a script. As a string it is its `name`."""

    def __init__(self, name: str, room: int) -> None:
        self.name, self._room, self.encoded = name, room, encode(None)

    def __str__(self) -> str:
        return self.name

    @property
    def result(self) -> Any:
        """Result, which the body sets after the steps; all ranks get rank 0's when the body has ended. None if not set.

        Numbers, strings, lists, tuples and dicts of them; 64 KiB for all trainings. Raises `UsageError` for all else.
        """
        return decode(self.encoded)

    @result.setter
    def result(self, value: Any) -> None:
        try:
            encoded = encode(value, path="result")
        except StateError as error:
            raise UsageError(
                f"the result of {self.name} cannot be sent to other workers: {error}",
                hint="let it be numbers and texts: tensor.item(), tensor.tolist(), or the name of a file",
            ) from error
        if len(encoded) > self._room:
            raise UsageError(
                f"the result of {self.name} has {len(encoded):,} bytes, and there is room for {self._room:,}",
                hint="write it to a file, and let the name of that file be the result",
            )
        self.encoded = encoded


class Trainings:
    """The trainings of one script, in sequence. `begin`: returns the loop of the next one in this process."""

    def __init__(
        self, worker: Participation, names: Sequence[str], begin: Callable[[], StepLoop], *, seed: int
    ) -> None:
        self._worker, self._begin, self._seed = worker, begin, seed
        self._names, alone = list(names), worker.training.alone
        if isinstance(names, str) or not all(self._names) or len(set(self._names)) < len(self._names):
            raise UsageError("trainings have names, each its own", hint='session.trainings(["fold-0", "fold-1"])')
        taken = sum(len(name.encode()) + _FRAME for name in self._names)
        self._room = (_ROOM - taken) // max(1, len(self._names))
        if self._room < _LEAST:
            raise UsageError(f"{len(self._names):,} trainings are too many", hint="divide them among several jobs")
        if len(self._names) > 1 and alone:
            raise UsageError(
                f"a script with several trainings writes no durable checkpoints, and {alone}",
                hint="leave it out, or make each training a job of its own with a folder of its own",
            )
        self._results = {each.name: each.result for each in worker.training.finished}

    @property
    def results(self) -> dict[str, Any]:
        """Results of the finished trainings, by name, in their order."""
        return {name: decode(encoded) for name, encoded in self._results.items()}

    def run(self) -> Iterator[OneTraining]:
        """The trainings still to be run. Raises `UsageError` if one has no steps."""
        finished, worker = list(self._results), self._worker
        if finished != self._names[: len(finished)]:
            raise UsageError(
                f"the job has finished {', '.join(finished)}, and this worker's trainings are {', '.join(self._names)}",
                hint="let their names be the same whenever the script runs: not of a clock, and not drawn",
            )
        for name in self._names[len(finished) :]:
            worker.training.name = name
            seed_everything(self._seed)
            training, loop = OneTraining(name, self._room), self._begin()
            yield training
            if not loop.started:
                raise UsageError(f"the training {name} has no steps", hint="leave its name out of session.trainings()")
            # Restartable, since a fault may interrupt the exchange.
            loop.restartables.between(f"the result of {name}", partial(self._agree, training, training.encoded))
            if name != self._names[-1]:
                loop.after.end(FinishedTraining(name, self._results[name], worker.step))
                worker.turn()

    def _agree(self, training: OneTraining, own: bytes) -> None:
        training.encoded = self._results[training.name] = own if self._worker.world == 1 else self._of_rank_0(own)

    def _of_rank_0(self, encoded: bytes) -> bytes:
        size = torch.tensor([len(encoded)])
        dist.broadcast(size, 0)
        content = torch.zeros(int(size), dtype=torch.uint8)
        if self._worker.rank == 0:
            content.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
        dist.broadcast(content, 0)
        return content.numpy().tobytes()
