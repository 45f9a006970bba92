"""The mixin that makes each update of a `Trainer` a step of regrow."""

import copy
import functools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from regrow.core.errors import UsageError
from regrow.train.restartable import restartable
from regrow_recipes.adapters import private_names, private_trl
from regrow_recipes.adapters.trainer.book import Book
from regrow_recipes.adapters.trainer.deliveries import Deliveries
from regrow_recipes.adapters.trainer.joining import joined
from regrow_recipes.adapters.trainer.prompts import Prompts
from regrow_recipes.adapters.trainer.rollouts import Rollouts
from regrow_recipes.adapters.trainer.schedule import Schedule, samples_of

if TYPE_CHECKING:
    from regrow.train.microbatches import MicroBatch, MicroBatches
    from regrow.train.session import Session
    from regrow.train.step import Step

_WORD = 32
"""Bits of each of the two integers that sum a step's FLOPs, since floats would round."""


class _Behind:
    """Base class that the mixin expects, for type checking only: a `Trainer` of any version."""

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def evaluate(self, *args: Any, **kwargs: Any) -> Any: ...
        def predict(self, *args: Any, **kwargs: Any) -> Any: ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


class Recoverable(_Behind):
    """Mixin before `Trainer`, or a subclass of it, in a class's bases: its training survives faults.

    A step is one update: forward, backward, clipping, optimizer and scheduler. Logging, evaluation and saving run
    between two steps, and again if a fault interrupts them. regrow determines the order of samples from the seed.

    Args:
        microbatches: number of batches of `per_device_train_batch_size` in an update, for any world; by default,
                `gradient_accumulation_steps` times the initial number of ranks, and the world size is fixed.

    Raises:
        UsageError: `torch.distributed` is already initialized, or an argument asks for something that a step cannot do.
    """

    session: "Session"
    control: Any
    _rollouts: Rollouts | None = None

    def __init__(self, *args: Any, microbatches: int | None = None, **kwargs: Any) -> None:
        given = kwargs.get("args", args[1] if len(args) > 1 else None)
        self.session = joined(getattr(given, "seed", 0))
        private_trl.refuse_engines(given)
        super().__init__(*args, **kwargs)
        self._microbatches = microbatches
        if self.session.invariant:
            torch.set_num_threads(1)  # accelerate sets another number if OMP_NUM_THREADS is unset

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of an update."""
        return int(self._train_batch_size * self._schedule.microbatches)

    def store_flos(self) -> None:
        """Add the counted FLOPs to the state; the steps have already summed them over the ranks."""
        self.state.total_flos += self._book.sums.flos
        self._book.sums.flos = 0

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the Trainer does. If a rank dies meanwhile, even after the training, all ranks run it again."""
        return _apart(super().evaluate, *args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as the Trainer does, and run it again after a fault as `evaluate` does."""
        return _apart(super().predict, *args, **kwargs)

    # --- the training -------------------------------------------------------------------------------------------

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        _refuse(self, resume_from_checkpoint, trial)
        self.accelerator.free_memory()
        self._set_place()
        loader = self._plain_loader()
        self._rollouts = Rollouts(self, self.session) if private_trl.generates(self) else None
        source = loader if self._rollouts is None else self._prompts(loader)
        plan = self._schedule = Schedule.of(
            samples_of(loader),
            batch_size=self._train_batch_size if self._rollouts is None else loader.batch_size,
            microbatches=self._microbatches or self.args.gradient_accumulation_steps * self.session.world_size,
            drop_last=self.args.dataloader_drop_last,
        )
        values = self.set_initial_training_values(self.args, plan.stand_in(loader, self.args))
        epochs, samples, max_steps = values[0], values[3], values[6]
        self._init_training_state(max_steps, values[1], epochs, None, None)
        model, _ = self._prepare_for_training(max_steps, loader, None)
        self._protect(model)
        self._start_time, self._initial_global_step, self._initial_num_input_tokens_seen = time.time(), 0, 0
        self._ignored_keys = ignore_keys_for_eval
        model.zero_grad()
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        if self.args.eval_on_start:
            self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
        self._walk(model, source, max_steps)
        self._set_place()
        self._tr_loss = torch.tensor(self._book.sums.loss, dtype=torch.float64)
        self._total_loss_scalar = self._book.sums.all_losses
        return self._finalize_training(trial, samples, self._start_time)

    def _walk(self, model: Any, loader: Any, until: int) -> None:
        if reason := self._keeps_world():
            self.session.keep_world(reason)
        for step in self.session.steps(loader, until=until, microbatches=self._schedule.microbatches):
            with step as micros:
                self._update(step, micros, model)
            if not step.committed:
                continue
            _after_step(self, step.number)
            if self.control.should_training_stop and step.number + 1 < until:
                break

    def _keeps_world(self) -> str:
        """Reason why the world size is fixed; empty: it is not."""
        if private_names.gathered_numbers(self) or self.args.include_num_input_tokens_seen != "no":
            return (
                "this Trainer gathers numbers from all ranks in each micro-batch, and ranks may have different numbers "
                "of micro-batches"
            )
        if not self._microbatches:
            return (
                "the global batch of this Trainer would change with the number of ranks "
                "(give it microbatches=, the number of batches in an update)"
            )
        return ""

    def _protect(self, model: Any) -> None:
        callbacks = private_names.framework("transformers", extra="trainer").trainer_callback
        self._book = Book(self, stateful=callbacks.ExportableState, rollouts=self._rollouts)
        each_time: tuple[type, ...] = (callbacks.ExportableState, callbacks.DefaultFlowCallback)
        named: dict[str, Any] = {"scheduler": self.lr_scheduler, "trainer": self._book}
        if (following := private_trl.following(self)) is not None:
            named["reference"] = following.ref_model
            each_time += (type(following),)
        self._deliveries = Deliveries(self.callback_handler, each_time=each_time)
        self.current_gradient_accumulation_steps = 1
        if self.accelerator.scaler is not None:
            named["scaler"] = self.accelerator.scaler
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        self.session.protect(model, optimizer, **named)

    def _plain_loader(self) -> Any:
        """The loader of all samples, not bound to a rank, since regrow divides them."""
        with private_names.unprepared(self.accelerator):
            loader = self.get_train_dataloader()
        if isinstance(loader, torch.utils.data.DataLoader):
            loader.worker_init_fn = None  # it seeds by rank; regrow seeds by sample
        return loader

    def _prompts(self, loader: Any) -> Prompts:
        """The loader's prompts in TRL's own order, which keeps a group's completions together."""
        private_trl.refuse_rollouts(self)
        if self._microbatches:
            raise UsageError(
                f"{type(self).__name__} was given microbatches=, but its groups of completions fix the number of ranks",
                hint="leave it out: the world keeps its size",
            )
        return Prompts(loader, accumulated=self.args.gradient_accumulation_steps, world=self.session.world_size)

    def _set_place(self) -> None:
        session = self.session
        news = private_names.set_place(rank=session.rank, local_rank=session.local_rank, world=session.world_size)
        if news and hasattr(self, "_eval_dataloaders"):
            self._eval_dataloaders.clear()  # they read another rank's share
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.is_local_process_zero()
        if session.world_size > 1 and self.args.parallel_mode.value != "distributed":
            raise UsageError(
                f"Accelerate treats each of the {session.world_size} ranks as a separate training",
                hint="on CPUs only, give TrainingArguments(use_cpu=True)",
            )

    # --- a step -------------------------------------------------------------------------------------------------

    def _update(self, step: "Step", micros: "MicroBatches", model: Any) -> None:
        """The body of a step. All collectives come before the optimizer's step."""
        args, handler = self.args, self.callback_handler
        self._set_place()
        if self._rollouts is not None:
            self._rollouts.begin(rehearsal=step.rehearsal)
        with self._deliveries.silent(step.rehearsal):
            with self._deliveries.once("step", step.number):
                self.control = handler.on_step_begin(args, self.state, self.control)
            flos = 0
            for micro in micros:
                flos += self._forward_backward(micro, model)
                if not micro.last:
                    self.control = handler.on_substep_end(args, self.state, self.control)
            flos = self._over_ranks(flos)
            if self._rollouts is not None:
                self._rollouts.share(len(micros))
            norm = self._clip_grad_norm(model) if args.max_grad_norm > 0 else None
            norm = self._get_grad_norm(model, grad_norm=norm)
            self.control = handler.on_pre_optimizer_step(args, self.state, self.control)
            self.optimizer.step()
            self.control = handler.on_optimizer_step(args, self.state, self.control)
            rate = self._get_learning_rate()
            if not (self.accelerator.optimizer_step_was_skipped or self._waits_for_metrics()):
                self.lr_scheduler.step()
            model.zero_grad()
            self._book.stepped(
                None if step.rehearsal else step.numbers()["loss"],
                epoch=self._schedule.epoch_after(step.number, of=self.state.max_steps),
                grad_norm=None if norm is None else float(norm),
                rate=rate,
                flos=flos,
            )

    def _forward_backward(self, micro: "MicroBatch", model: Any) -> int:
        """Run `training_step` with the micro-batch's backward pass; returns its FLOPs."""
        inputs = micro.batch if self._rollouts is not None else _named(self, micro.batch)
        private_names.reduce_gradients(self.accelerator, micro.last)
        with self._by_itself():
            items = self._get_num_items_in_batch([inputs], self.args.device)
            # Losses of completions are already scaled for the whole generation.
            weight = 1 if self._rollouts is not None else None if items is None else int(items)

            def backward(loss: torch.Tensor, **_: Any) -> None:
                micro.log(loss=loss)
                scaler = self.accelerator.scaler
                micro.backward(loss if scaler is None else scaler.scale(loss), weight=weight)

            self.accelerator.backward = backward
            try:
                self.training_step(model, copy.copy(inputs), None if items is None else items.clamp(min=1))
            finally:
                del self.accelerator.backward
        self._track_num_input_tokens(inputs)
        return int(self.floating_point_ops(inputs))

    @contextmanager
    def _by_itself(self) -> Iterator[None]:
        """Make a batch's loss the mean over its own tokens; weights then give the global batch's."""
        across, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = across

    def _over_ranks(self, number: int) -> int:
        if self.session.world_size == 1:
            return number
        words = torch.tensor([number >> _WORD, number & ((1 << _WORD) - 1)], device=self.args.device)
        dist.all_reduce(words)
        high, low = (int(word) for word in words)
        return (high << _WORD) + low

    def _waits_for_metrics(self) -> bool:
        return isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or (
            type(self.lr_scheduler).__name__ == "GreedyLR"
        )

    # --- between two steps --------------------------------------------------------------------------------------

    def _follow_up(self, number: int) -> None:
        """Run the work after an update: callbacks, the log, evaluation, saving. Repeatable from the same state."""
        private_names.leave_loaders(self.accelerator)
        self._set_place()
        args, handler, plan = self.args, self.callback_handler, self._schedule
        if self._rollouts is not None:
            self._rollouts.enter("between", number)
        with self._deliveries.once("between", number):
            self.control = handler.on_step_end(args, self.state, self.control)
            self._log_evaluate_save()
            if self.control.should_epoch_stop:
                raise UsageError(
                    "a callback ends an epoch before its last update, but the samples of each step are fixed in "
                    "advance",
                    hint="set control.should_training_stop, or choose num_train_epochs or max_steps",
                )
            ends = self.control.should_training_stop or plan.ends_epoch(number)
            if ends:
                self.control = handler.on_epoch_end(args, self.state, self.control)
                self._log_evaluate_save()
            if ends and not self.control.should_training_stop:
                self.control = handler.on_epoch_begin(args, self.state, self.control)

    def _log_evaluate_save(self) -> None:
        sums = self._book.sums
        if self.control.should_log and self.state.global_step > sums.logged_at:
            line = {"loss": self._book.take_loss()}
            if sums.grad_norm is not None:
                line["grad_norm"] = sums.grad_norm
            if sums.learning_rate is not None:
                line["learning_rate"] = sums.learning_rate
            self.store_flos()
            self.log(line, self._start_time)
        self.control.should_log = False
        self._globalstep_last_logged = self.state.global_step
        self._maybe_log_save_evaluate(
            torch.zeros(()), None, self.model_wrapped, None, self.state.epoch, self._ignored_keys, self._start_time
        )


def _named(trainer: Any, batch: Any) -> dict[str, Any]:
    """A batch as a new dictionary of the model's inputs."""
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"{type(trainer).__name__} cannot train through faults: its batches are not the model's named inputs, but "
            f"a {type(batch).__name__} that the trainer converts within the step",
            hint="train it without regrow's adapter (regrow run starts it as torchrun does), or use a supported "
            "trainer: Trainer, SFTTrainer, DPOTrainer, GRPOTrainer, RLOOTrainer",
        )
    return dict(batch)


@restartable
def _apart(call: Any, *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


@restartable
def _after_step(trainer: Recoverable, number: int) -> None:
    trainer._follow_up(number)  # noqa: SLF001 - the same class's, as a function that can be marked


def _refuse(trainer: Any, resume_from_checkpoint: object, trial: object) -> None:
    args = trainer.args
    refused = {
        "resume_from_checkpoint": (resume_from_checkpoint is not None, "`regrow run --checkpoint-dir ... --resume`"),
        "a search for hyper-parameters": (trial is not None, "one job for each trial"),
        "auto_find_batch_size": (args.auto_find_batch_size, "a batch size that fits"),
        "fsdp": (bool(args.fsdp), "DDP"),
        "a model that was sharded while it was loaded": (trainer.is_distributed_loading_by_transformers, "DDP"),
        "deepspeed": (bool(args.deepspeed), "DDP"),
    }
    for name, (asked, instead) in refused.items():
        if asked:
            raise UsageError(f"a Trainer under regrow cannot have {name}", hint=f"use {instead}")


@functools.cache
def recoverable(trainer: Any) -> Any:
    """A subclass of the trainer class that survives faults; a class that already does is returned unchanged."""
    if issubclass(trainer, Recoverable):
        return trainer
    made = type(trainer.__name__, (Recoverable, trainer), {"__module__": trainer.__module__})
    made.__doc__ = trainer.__doc__
    return made
