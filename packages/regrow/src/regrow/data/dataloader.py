"""`regrow.DataLoader` and `regrow.cached`: loaders whose batches are made once per node, for all of its workers."""

from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils import data as torch_data
from torch.utils.data import IterableDataset, Sampler

from regrow.core.errors import UsageError
from regrow.data.mixed import Mixture
from regrow.data.order import DROP, KEEP, REMAINDERS, WRAP

Sample = TypeVar("Sample", covariant=True)
Made = TypeVar("Made")
OnMade = Callable[[Any, int], None]

_STOCK_BATCH = 1


class _Making:
    """Numbers the loaders of this process in the order in which the script makes them."""

    def __init__(self) -> None:
        self.count = 0
        self.hook: OnMade | None = None

    def made(self, loader: Any) -> None:
        loader.number = self.count
        self.count += 1
        if self.hook is not None:
            self.hook(loader, loader.number)


_making = _Making()


def on_made(hook: OnMade | None) -> None:
    """Call `hook(loader, number)` for each loader constructed from now on; None: stop.

    `loader` is a `DataLoader` or a `Cached`; `number` counts them from 0. In the process that makes a node's batches
    the hook takes over and never returns to the script.
    """
    _making.hook = hook


class _Numbered(ABCMeta):
    """Metaclass that numbers an instance after its constructor, also a script's subclass's, has finished.

    It derives from `ABCMeta`, so that a script's class may be abstract as well.
    """

    def __call__(cls: "type[Made]", *args: Any, **kwargs: Any) -> "Made":
        made: Made = super().__call__(*args, **kwargs)  # type: ignore[misc]
        _making.made(made)
        return made


class DataLoader(torch_data.DataLoader[Sample], metaclass=_Numbered):
    """A `torch.utils.data.DataLoader` whose batches are made once per node of a job and read by all of its workers.

    The arguments are torch's (2.13), with the same meaning; `session.steps` documents the order. Outside a job there is
    no cache, and the batches are the same. Iterated directly it behaves as torch's loader. `in_order` and
    `persistent_workers` apply only then: in `session.steps` batches come in order, and loader workers persist.

    Args:
        dataset: this and all arguments up to `in_order` are torch's.
        global_batch_size: samples per step over all ranks, independent of the world size; replaces `batch_size`, which
            is per rank. The ranks' shares differ by one sample at most.
        remainder: use of an epoch's last samples if they do not fill a batch: `"keep"` makes a short batch of them (the
            default), `"drop"` leaves them out (as `drop_last`), `"wrap"` fills it from the next epoch.
        version: part of the cache's identity. Batches are made anew when code or attributes of the data set or of
            `collate_fn` change; change `version` for other changes, such as in a file that they read.

    Raises:
        UsageError: arguments contradict each other, or the data set is empty.
        ValueError: torch finds a mistake in its own arguments.
    """

    number: int
    """Number of the loader among this process's loaders, from 0."""
    global_batch_size: int | None
    remainder: str | None
    version: str

    def __init__(
        self,
        dataset: torch_data.Dataset[Sample],
        batch_size: int | None = _STOCK_BATCH,
        shuffle: bool | None = None,
        sampler: "Sampler[Any] | Iterable[Any] | None" = None,
        batch_sampler: "Sampler[list[Any]] | Iterable[list[Any]] | None" = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        global_batch_size: int | None = None,
        remainder: str | None = None,
        version: str = "",
    ) -> None:
        _check_not_empty(dataset)
        _check_remainder(dataset, remainder, drop_last, own_order=sampler is not None or batch_sampler is not None)
        if global_batch_size is not None:
            _check_global(dataset, global_batch_size, batch_size, sampler, batch_sampler)
            batch_size = global_batch_size
        self.global_batch_size = global_batch_size
        self.remainder = remainder
        self.version = version
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last or remainder == DROP,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )


class Cached(Generic[Sample], metaclass=_Numbered):
    """A torch `DataLoader` whose batches are made once per node. Made by `regrow.cached`; iterates as that loader."""

    number: int
    """Number of the loader among this process's loaders, from 0."""

    def __init__(self, loader: torch_data.DataLoader[Sample], version: str) -> None:
        self.loader = loader
        self.version = version

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def cached(loader: torch_data.DataLoader[Sample], *, version: str = "") -> Cached[Sample]:
    """Make the batches of `loader` once per node of a job, for all workers of the node.

    Args:
        loader: a torch `DataLoader`. Over a map-style data set, batches are made ahead of training. Over an iterable
            data set, or with an `__iter__` of its own, workers keep the batches that they have read, for a step that
            runs again and for the replacement of a lost worker.
        version: part of the cache's identity, as in `regrow.DataLoader`.

    Raises:
        UsageError: `loader` is something else, or is cached already.
    """
    given: Any = loader
    if isinstance(given, DataLoader | Cached):
        name = "regrow.DataLoader" if isinstance(given, DataLoader) else "cached loader"
        raise UsageError(
            f"regrow.cached was given a {name}, whose batches are cached already",
            hint="give it to session.steps as it is",
        )
    if isinstance(given, torch_data.DataLoader):
        return Cached(given, version)
    if isinstance(given, torch_data.Dataset):
        raise UsageError(
            f"regrow.cached was given the data set {type(given).__name__} itself, which has samples, not batches",
            hint="write regrow.DataLoader(dataset, batch_size=...), which is cached by itself",
        )
    raise UsageError(
        f"regrow.cached was given a {type(given).__name__}, which is not a DataLoader",
        hint="give it a torch.utils.data.DataLoader; anything else goes to session.steps as it is, without the cache",
    )


def _check_not_empty(dataset: Any) -> None:
    # Checked here, as torch's sampler would only report that num_samples should be positive.
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__") and len(dataset) == 0:
        raise UsageError(
            f"the data set of the DataLoader, {type(dataset).__name__}, is empty", hint="look where it gets its samples"
        )


def _check_remainder(dataset: Any, remainder: str | None, drop_last: bool, *, own_order: bool) -> None:
    if remainder is None:
        return
    if remainder not in REMAINDERS:
        raise UsageError(
            f"remainder={remainder!r} is none of {', '.join(map(repr, REMAINDERS))}", hint=f"leave it out for {KEEP!r}"
        )
    if drop_last and remainder != DROP:
        raise UsageError(
            f"drop_last=True leaves an epoch's last samples out, and remainder={remainder!r} does not",
            hint="give one of them",
        )
    if remainder != WRAP and isinstance(dataset, Mixture) and not own_order:
        raise UsageError(
            f"remainder={remainder!r} was given for a mixture, whose batches are all full",
            hint=f"leave it out: a mixture's sources have epochs of their own, so it is always {WRAP!r}",
        )
    if remainder == WRAP and (own_order or isinstance(dataset, IterableDataset)):
        what = "a sampler or batch_sampler" if own_order else "an iterable data set"
        raise UsageError(
            f"remainder={WRAP!r} needs regrow's own order, and {what} has its own",
            hint="use a map-style data set with shuffle=True or False, or another remainder",
        )


def _check_global(dataset: Any, global_batch: Any, batch_size: int | None, sampler: Any, batch_sampler: Any) -> None:
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < 1:
        raise UsageError(f"global_batch_size={global_batch!r} is no number of samples", hint="make it at least 1")
    if batch_size != _STOCK_BATCH:
        raise UsageError(
            f"batch_size={batch_size} and global_batch_size={global_batch} were both given",
            hint="give batch_size for a rank's share that stays the same, global_batch_size for the whole of a step's",
        )
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            "global_batch_size was given for an iterable data set, which decides itself what a rank reads",
            hint="give batch_size, or use a map-style data set",
        )
    if batch_sampler is not None:
        raise UsageError(
            "global_batch_size and batch_sampler were both given, and a batch sampler makes the batches itself",
            hint="leave one of them out",
        )
    if hasattr(sampler, "set_epoch"):
        raise UsageError(
            f"global_batch_size was given with {type(sampler).__name__}, which gives each rank samples of its own",
            hint="leave the sampler out (shuffle=True or False), or give batch_size",
        )
