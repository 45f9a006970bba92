"""The mixin that makes the updates of a Lightning fit steps of regrow, and replaces its fit loop's `run`."""

from typing import TYPE_CHECKING, Any

import torch

from regrow.core.errors import UsageError
from regrow.data.dataloader import Cached
from regrow.train.restartable import restartable
from regrow_recipes.adapters import private_names
from regrow_recipes.adapters.fitting.book import FitBook
from regrow_recipes.adapters.fitting.callback_calls import CallbackCalls
from regrow_recipes.adapters.trainer.schedule import Schedule, samples_of

if TYPE_CHECKING:
    from regrow.train.microbatches import MicroBatch, MicroBatches
    from regrow.train.session import Session
    from regrow.train.step import Step


class _Behind:
    """Base class that the mixin expects, for type checking only."""

    if TYPE_CHECKING:
        trainer: Any
        epoch_loop: Any
        epoch_progress: Any
        max_batches: int | float
        max_epochs: int | None
        max_steps: int
        done: bool
        skip: bool

        def reset(self) -> None: ...
        def on_run_start(self) -> None: ...
        def on_run_end(self) -> None: ...
        def on_advance_start(self) -> None: ...
        def on_advance_end(self) -> None: ...


class EpochsOfSteps(_Behind):
    """A fit loop that runs all epochs in one `session.steps`. Lightning's own loop runs its hooks.

    The closure, which Lightning has the optimizer call, runs before the update, which must not wait for anything.
    """

    _schedule: Schedule
    _book: FitBook
    _callback_calls: CallbackCalls
    _loader: Any
    _closing: "list[tuple[Any, Any]]"
    """Results of `training_step` for the batches of the last step that this process completed, and each batch.

    A rank whose step was interrupted, and which then restores its peers' state, has the results of the step before.
    """

    @property
    def _session(self) -> "Session":
        session: Session = self.trainer.session
        return session

    # --- the training -------------------------------------------------------------------------------------------

    def setup_data(self) -> None:
        """Use the loader as the script made it, since regrow divides its samples."""
        trainer = self.trainer
        if hasattr(self, "_loader"):
            return
        self._loader = loader = private_names.train_loader(self)
        inner = loader.loader if isinstance(loader, Cached) else loader
        if not isinstance(inner, torch.utils.data.DataLoader):
            raise UsageError(
                f"the training data of this Trainer is a {type(loader).__name__}, not a DataLoader",
                hint="give one DataLoader, torch's or regrow's",
            )
        private_names.put_loader(self, loader)
        per_update = trainer.accumulate_grad_batches
        self._schedule = plan = Schedule.of(
            samples_of(inner),
            batch_size=inner.batch_size or 1,
            microbatches=per_update * self._session.world_size,
            drop_last=inner.drop_last,
        )
        if not plan.per_epoch:
            raise UsageError("the number of samples in an epoch is unknown", hint="give a data set with a length")
        limit = trainer.limit_train_batches
        updates = int(plan.per_epoch * limit) if isinstance(limit, float) else min(plan.per_epoch, limit // per_update)
        self._schedule = Schedule(plan.microbatches, updates)
        self._samples = plan.microbatches * (inner.batch_size or 1)
        self.max_batches = updates * per_update
        interval = trainer.val_check_interval
        batches = interval if isinstance(interval, int) else max(1, int(self.max_batches * interval))
        trainer.val_check_batch = -(-batches // per_update) * per_update

    def run(self) -> None:
        """Train to the end, and continue after faults."""
        self.setup_data()
        if self.skip:
            return
        trainer, epochs = self.trainer, self.epoch_loop
        self._protect()
        self.reset()
        self.on_run_start()
        if not self._session.newcomer:  # it joins an epoch that has begun
            self.on_advance_start()
        epochs.reset()
        self._session.keep_world("Lightning counts the batches of each rank")
        steps = self._session.steps(self._loader, until=self._until(), microbatches=self._schedule.microbatches)
        for step in steps:
            with step as micros:
                self._update(step, micros)
            if not step.committed:
                continue
            _after_step(self, step.number)
            if trainer.should_stop and epochs.done:
                break
        self.set_place()
        self.on_run_end()

    def _until(self) -> int:
        per_epoch, epochs = self._schedule.per_epoch, self.max_epochs
        limits = [self.max_steps] if self.max_steps >= 0 else []
        if epochs is not None and epochs >= 0:
            limits.append(epochs * per_epoch)
        if not limits:
            raise UsageError("this training has no end", hint="give max_epochs or max_steps")
        return min(limits)

    def _protect(self) -> None:
        trainer = self.trainer
        base = private_names.lightning().Callback
        self._book = FitBook(trainer, base)
        self._callback_calls = CallbackCalls(trainer.callbacks, base)
        self._closing = []
        private_names.write_over(trainer)
        schedulers = {f"scheduler{at}": each.scheduler for at, each in enumerate(trainer.lr_scheduler_configs)}
        self._session.protect(trainer.strategy.model, *trainer.strategy.optimizers, fit=self._book, **schedulers)

    def set_place(self) -> None:
        """Set this process's present rank in Lightning."""
        trainer, session = self.trainer, self._session
        if session.world_size > 1:
            trainer.strategy.set_world_ranks()
        for sampler in private_names.validation_samplers(trainer):
            if isinstance(sampler, torch.utils.data.DistributedSampler):
                sampler.rank = session.rank

    # --- a step -------------------------------------------------------------------------------------------------

    def _update(self, step: "Step", micros: "MicroBatches") -> None:
        """The body of a step. All collectives come before the optimizer's step."""
        trainer, epochs = self.trainer, self.epoch_loop
        self.set_place()
        closing: list[tuple[Any, Any]] = []
        keys: dict[str, str] = {}
        loss = torch.zeros(())
        with self._callback_calls.silent(step.rehearsal), self._callback_calls.once("body", step.number):
            for micro in micros:
                done, loss, keys = self._forward_backward(micro, first=not closing)
                closing.append(done)
            progress = epochs.batch_progress
            progress.is_last_batch = self._schedule.ends_epoch(step.number)
            private_names.optimizer_step(trainer, progress.current.ready - 1, lambda: loss)
            epochs.update_lr_schedulers("step", update_plateau_schedulers=False)
            if progress.is_last_batch:
                epochs.update_lr_schedulers("epoch", update_plateau_schedulers=False)
            if not step.rehearsal:
                numbers = step.numbers()
                self._book.stepped({key: numbers[name] for name, key in keys.items()}, self._samples)
        self._closing = closing

    def _forward_backward(self, micro: "MicroBatch", *, first: bool) -> tuple[Any, torch.Tensor, dict[str, str]]:
        """Run one batch: `training_step`'s result, its loss, and the names of the logged values in Lightning."""
        trainer, progress = self.trainer, self.epoch_loop.batch_progress
        batch = private_names.on_device(trainer, micro.batch)
        progress.increment_ready()
        index = progress.current.ready - 1
        private_names.batch_begins(trainer, batch)
        private_names.forget_logged(trainer)
        if private_names.hook(trainer, "on_train_batch_start", batch, index) == -1:
            raise UsageError(
                "on_train_batch_start ends an epoch before its last batch, but the samples of each step are fixed in "
                "advance",
                hint="set trainer.should_stop, or give max_epochs or limit_train_batches",
            )
        private_names.strategy_hook(trainer, "on_train_batch_start", batch, index)
        progress.increment_started()
        output = private_names.strategy_hook(
            trainer, "training_step", *private_names.step_arguments(trainer, batch, index)
        )
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, torch.Tensor):
            raise UsageError("training_step returned no loss", hint="return it, or a dict with it as 'loss'")
        keys, values = self._logged_numbers()
        micro.log(**{"loss": loss} | values)
        if first:
            private_names.zero_gradients(trainer, index)
        trainer.precision_plugin.micro = micro
        private_names.strategy_hook(trainer, "backward", loss, trainer.strategy.optimizers[0])
        progress.increment_processed()
        return (_detached(output), batch), loss.detach(), keys

    def _logged_numbers(self) -> tuple[dict[str, str], dict[str, Any]]:
        keys, values = {}, {}
        for key, item in private_names.logged_in_step(self.trainer).items():
            name = item.meta.name
            if not item.is_tensor or not item.meta.is_mean_reduction:
                kind = "with a reduction other than the mean" if item.is_tensor else "as a metric object"
                raise UsageError(
                    f"training_step logs {name!r} {kind}, which a replacement rank could not continue",
                    hint="log a number with the mean as its reduction, and metric objects in validation_step only",
                )
            keys[name] = key
            values[name] = item.value / item.cumulated_batch_size if item.meta.on_epoch else item.value
        return keys, values

    # --- between two steps --------------------------------------------------------------------------------------

    def follow_up(self, number: int) -> None:
        """Run the work after an update: callbacks, the log, validation, an epoch's end. Repeatable from one state."""
        trainer, epochs, calls = self.trainer, self.epoch_loop, self._callback_calls
        self.set_place()
        trainer.training = True
        with calls.once("between", number):
            self._book.publish()
            private_names.follow_batch(trainer)
            known = set(private_names.logged_in_step(trainer))
            first = epochs.batch_progress.current.ready - len(self._closing)
            for index, (output, batch) in enumerate(self._closing, first):
                private_names.hook(trainer, "on_train_batch_end", output, batch, index)
            _refuse_sums(private_names.logged_in_step(trainer), known)
            for _ in self._closing[1:]:
                epochs.batch_progress.increment_completed()
            private_names.report_step_metrics(trainer)
            private_names.forget_validation(trainer)
            epochs.on_advance_end(None)
            if epochs.done:
                self.on_advance_end()
                self._book.epoch_ended()
                if not self.done:
                    self.on_advance_start()
                    epochs.reset()


@restartable
def _after_step(loop: EpochsOfSteps, number: int) -> None:
    loop.follow_up(number)


def _refuse_sums(logged: dict[str, Any], known: set[str]) -> None:
    for key, item in logged.items():
        if key not in known and item.meta.on_epoch:
            raise UsageError(
                f"{item.meta.name!r} is logged per epoch in on_train_batch_end, after the step",
                hint="log it in training_step, or with on_epoch=False",
            )


def _detached(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return {"loss": output.detach()}
    return {name: each.detach() if isinstance(each, torch.Tensor) else each for name, each in output.items()}
