"""Several trainings in one script: those that are finished are left out, and their results are the same everywhere.

A worker runs one training from its beginning, whether it starts the training or comes in later: so whatever a body
leaves behind in a process can make no difference. See decision 0105.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from regrow.core.errors import StateError, UsageError
from regrow.core.messages.trainings import FinishedTraining
from regrow.data.seeding import seed_everything
from regrow.hydration.codec import decode, encode
from regrow.train.loop import StepLoop
from regrow.train.worker.participation import Participation

_ROOM = 64 << 10
"""Bytes of all names and results together: each worker is started with them, in its environment."""
_FRAME = 64
"""Of them, what each training takes besides its name and result."""
_LEAST = 64
"""Room for a result, at the least."""


class OneTraining:
    """One of the trainings of a script. As a text it is its name.

    Attributes:
        name: as given to `session.trainings`.
    """

    def __init__(self, name: str, room: int) -> None:
        self.name, self._room = name, room
        self.encoded = encode(None)
        """The result, as it is told."""

    def __str__(self) -> str:
        return self.name

    @property
    def result(self) -> Any:
        """Set it in the body, after the steps. The one of rank 0 counts, for all ranks, when the body has ended.

        None, numbers, texts, bytes, lists, tuples and dicts of them, and small numpy arrays. Setting raises
        `UsageError` for anything else, and for what is too large: 64 KiB are there for all trainings together.
        """
        return decode(self.encoded)

    @result.setter
    def result(self, value: Any) -> None:
        try:
            encoded = encode(value, path="result")
        except StateError as error:
            raise UsageError(
                f"the result of {self.name} cannot be told to other workers: {error}",
                hint="let it be numbers and texts: tensor.item(), tensor.tolist(), or the name of a file",
            ) from error
        if len(encoded) > self._room:
            raise UsageError(
                f"the result of {self.name} has {len(encoded):,} bytes, and there is room for {self._room:,}",
                hint="write it to a file, and let the name of that file be the result",
            )
        self.encoded = encoded


class Trainings:
    """The trainings of one script, in sequence.

    Args:
        member: how this process takes part in a job.
        names: of all trainings.
        seed: with which each begins.
        loop: gives the loop of the present training.
        renew: makes the session ready for another one in this process.
    """

    def __init__(
        self,
        member: Participation,
        names: Sequence[str],
        *,
        seed: int,
        loop: Callable[[], StepLoop],
        renew: Callable[[], None],
    ) -> None:
        self._member, self._seed, self._loop, self._renew = member, seed, loop, renew
        self._names = list(names)
        if isinstance(names, str) or not all(self._names):
            raise UsageError("session.trainings() is given names", hint='session.trainings(["fold-0", "fold-1"])')
        if len(set(self._names)) < len(self._names):
            raise UsageError("two trainings have one name", hint="give each a name of its own")
        taken = sum(len(name.encode()) + _FRAME for name in self._names)
        self._room = (_ROOM - taken) // max(1, len(self._names))
        if self._room < _LEAST:
            raise UsageError(
                f"a script cannot have {len(self._names):,} trainings", hint="divide them among several jobs"
            )
        if len(self._names) > 1 and member.one_training:
            raise UsageError(
                f"a script with several trainings writes no durable checkpoints, and {member.one_training}",
                hint="leave it out, or make each training a job of its own with a folder of its own",
            )
        self._results = {each.name: each.result for each in member.finished}

    @property
    def results(self) -> dict[str, Any]:
        """Results of the finished trainings, by name, in their order."""
        return {name: decode(encoded) for name, encoded in self._results.items()}

    def run(self) -> Iterator[OneTraining]:
        """Those that are still to be run. Raises `UsageError` where one has no steps."""
        finished = [each.name for each in self._member.finished]
        if finished != self._names[: len(finished)]:
            raise UsageError(
                f"the job has finished the trainings {', '.join(finished)}, and this worker's script has "
                f"{', '.join(self._names)}",
                hint="let their names be the same whenever the script runs: not of a clock, and not drawn",
            )
        for name in self._names[len(finished) :]:
            self._member.training = name
            seed_everything(self._seed)
            training = OneTraining(name, self._room)
            yield training
            if not self._loop().started:
                raise UsageError(
                    f"the training {name} has no steps",
                    hint="leave out of session.trainings() what is not to be trained",
                )
            self._agree(training)
            if name != self._names[-1]:
                ended = FinishedTraining(name, self._results[name], self._member.step)
                self._loop().after.ends_training(ended)
                self._member.turn(ended)
                self._renew()

    def _agree(self, training: OneTraining) -> None:
        """All ranks take the result of rank 0. After a fault they do so again, as after what else follows the steps."""
        own = training.encoded

        def take() -> None:
            training.encoded = self._results[training.name] = self._of_rank_0(own)

        self._loop().regions.between(f"the result of {training.name}", take)

    def _of_rank_0(self, encoded: bytes) -> bytes:
        if self._member.world == 1:
            return encoded
        size = torch.tensor([len(encoded)])
        dist.broadcast(size, 0)
        content = torch.zeros(int(size), dtype=torch.uint8)
        if self._member.rank == 0:
            content.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
        dist.broadcast(content, 0)
        return content.numpy().tobytes() if self._member.rank != 0 else encoded
