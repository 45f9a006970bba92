"""torchtitan's `Trainer` under regrow. Untested: written by reading it, and run against a stand-in alone.

    from regrow_recipes.adapters.torchtitan import recoverable

    trainer = recoverable(Trainer)(config, loader=regrow.DataLoader(samples, batch_size=local_batch_size))

`train_step` stays torchtitan's; the loop around it, what it logs and what it saves stand between steps. See
docs/adopt.md.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from regrow.core.errors import UsageError
from regrow.train.restartable import restartable
from regrow_recipes.adapters import read_names
from regrow_recipes.adapters.trainer.joining import joined

if TYPE_CHECKING:
    from regrow.train.session import Session

__all__ = ["recoverable"]

_IGNORED = -100
"""The label of what does not count."""


class _Behind:
    """Base class that the mixin expects, for the types alone."""

    if TYPE_CHECKING:

        def __init__(self, config: Any) -> None: ...
        def init_distributed(self) -> Any: ...
        def forward_backward_step(self, **kwargs: Any) -> torch.Tensor: ...
        def train_step(self, data_iterator: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...


class Titan(_Behind):
    """A `Trainer` whose `train_step` is the body of a step.

    Args:
        config: torchtitan's.
        loader: where samples come from: pairs of a dict of inputs and labels, `gradient_accumulation_steps` times the
            local batch size of them in a batch. torchtitan's own is a stream, which only the rank that reads it could
            go on with.
        seed: what the order of data and all random numbers derive from.

    Raises:
        UsageError: no loader is given.
    """

    session: "Session"

    def __init__(self, config: Any, *, loader: Any = None, seed: int = 0) -> None:
        read_names.tell_untested("torchtitan")
        if loader is None:
            raise UsageError(
                "torchtitan's own loader is a stream, with which a rank that is replaced could not go on",
                hint="give recoverable(Trainer)(config, loader=...), for example a regrow.DataLoader",
            )
        self.session = joined(seed)
        self._loader, self._losses, self._tokens = loader, list[torch.Tensor](), 0
        # Protected: the body of a rank that comes in has not seen what the others have.
        self._told = SimpleNamespace(loss=0.0, largest=0.0, norm=0.0, rate=0.0)
        super().__init__(config)

    def init_distributed(self) -> Any:
        """As torchtitan's, in the group that the session has made."""
        with read_names.group_is_there():
            return super().init_distributed()

    def state_dict(self) -> dict[str, Any]:
        """Progress."""
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over progress."""
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]

    # --- the training -------------------------------------------------------------------------------------------

    def train(self) -> None:
        """All steps, through faults."""
        self.checkpointer.load(step=self.config.checkpoint.load_step)
        self.session.keep_world("torchtitan's meshes and its global batch have the size of the start")
        self.session.protect(
            *self.model_parts, *self.optimizers, schedulers=self.lr_schedulers, train=self, told=self._told
        )
        mesh = self.parallel_dims.get_optional_mesh("batch")
        for step in self.session.steps(self._loader, until=self.config.training.steps, data=mesh):
            with step as batch:
                self._update(step, batch)
            if step.committed:
                _after_step(self)

    def _update(self, step: Any, batch: Any) -> None:
        """The body: torchtitan's own, of which no number is reduced behind the update."""
        self.step = step.number + 1
        self._losses, self._tokens = [], 0
        self._logs = step.log
        rate = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        asked = self.metrics_processor.should_log
        self.metrics_processor.should_log = lambda _: False
        try:
            with read_names.hearing_norms(self) as norms:
                self.train_step(self._parts(batch))
            self._told.norm, self._told.rate = float(norms[-1]) if norms else 0.0, float(rate)
        finally:
            self.metrics_processor.should_log = asked

    def _parts(self, batch: Any) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        inputs, labels = batch
        size = -(-len(labels) // self.gradient_accumulation_steps)
        for first in range(0, len(labels), size):
            part = slice(first, first + size)
            self.ntokens_seen += labels[part].numel()
            self.metrics_processor.ntokens_since_last_log += labels[part].numel()
            yield {name: value[part] for name, value in inputs.items()}, labels[part]

    def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
        """As torchtitan's; after the last one of a step, the loss of all ranks is told, before the update."""
        loss = super().forward_backward_step(**kwargs)
        self._losses.append(loss.detach())
        self._tokens += int((kwargs["labels"] != _IGNORED).sum())
        if len(self._losses) == self.gradient_accumulation_steps:
            self._tell_loss(kwargs["global_valid_tokens"])
        return loss

    def _tell_loss(self, tokens: Any) -> None:
        total = torch.stack(self._losses).sum()
        largest = total * float(tokens) / max(self._tokens, 1)
        mesh = self.parallel_dims.get_optional_mesh("loss")
        if mesh is not None:
            torch.distributed.all_reduce(total, group=mesh.get_group())
            torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=mesh.get_group())
        self._logs(loss=total)
        self._told.loss, self._told.largest = float(total), float(largest)

    # --- between two steps --------------------------------------------------------------------------------------

    def follow_up(self) -> None:
        """Do the work after an update: the log, checkpoints, validation. Runs again."""
        if self.metrics_processor.should_log(self.step):
            self.metrics_processor.log(
                self.step,
                self._told.loss,
                self._told.largest,
                self._told.norm,
                extra_metrics={"n_tokens_seen": self.ntokens_seen * self.session.replicas, "lr": self._told.rate},
            )
        self.checkpointer.save(self.step, last_step=self.step == self.config.training.steps)
        if self.config.validator.enable and self.validator.should_validate(self.step):
            self.validator.validate(self.model_parts, self.step)


@restartable
def _after_step(trainer: Titan) -> None:
    trainer.follow_up()


def recoverable(trainer: Any) -> Any:
    """`Trainer` of torchtitan, or a subclass of it, whose training goes on through faults; else the same."""
    if issubclass(trainer, Titan):
        return trainer
    made = type(trainer.__name__, (Titan, trainer), {"__module__": trainer.__module__})
    made.__doc__ = trainer.__doc__
    return made
