"""A training that goes through the loader that is named: regrow's promises, and other projects' loaders."""

import argparse
import importlib
import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

import regrow

ROWS, WIDTH, BATCH = 48, 4, 4
FORMS: dict[str, Callable[[], Any]] = {}


def form(make: Callable[[], Any]) -> Callable[[], Any]:
    FORMS[make.__name__] = make
    return make


def of(library: str) -> Any:
    """A module that may not be installed."""
    return importlib.import_module(library)


def place() -> tuple[int, int]:
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def row(at: int) -> Tensor:
    return torch.cat([torch.tensor([float(at)]), torch.rand(WIDTH, generator=torch.Generator().manual_seed(at))])


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, at: int) -> Tensor:
        return row(at) + 0.01 * torch.rand(())


class Stream(IterableDataset[Tensor]):
    """Split by rank and by loader worker."""

    def __iter__(self) -> Iterator[Tensor]:
        rank, world = place()
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        for at in list(range(ROWS))[rank::world][worker::workers]:
            yield row(at) + 0.01 * torch.rand(())


class Through(DataLoader[Tensor]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()


class Passes:
    """Batches in an order of its own that follows from the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return ROWS // BATCH // place()[1]

    def __iter__(self) -> Iterator[Tensor]:
        rank, world = place()
        order = random.Random(self.epoch).sample(range(ROWS), ROWS)[rank::world]
        for at in range(len(self)):
            yield torch.stack([row(each) for each in order[at * BATCH : (at + 1) * BATCH]])


@form
def a_generator() -> Any:
    def batches() -> Iterator[Tensor]:
        for step in itertools.count():
            yield row(2 * step + place()[0]).repeat(BATCH, 1)

    return batches()


@form
def itertools_of_a_builtin() -> Any:
    return map(lambda at: row(at).repeat(BATCH, 1), itertools.count(place()[0], place()[1]))


@form
def an_object_with_epochs() -> Any:
    return Passes()


@form
def a_stream_whose_workers_stay() -> Any:
    return DataLoader(Stream(), batch_size=BATCH, num_workers=1, persistent_workers=True)


@form
def a_subclass_with_its_own_iteration() -> Any:
    return Through(Rows(), batch_size=BATCH, shuffle=True)


@form
def torchdata_over_rows() -> Any:
    loader = of("torchdata.stateful_dataloader").StatefulDataLoader
    return loader(Rows(), batch_size=BATCH, shuffle=True, num_workers=1)


@form
def torchdata_over_a_stream() -> Any:
    loader = of("torchdata.stateful_dataloader").StatefulDataLoader
    return loader(Stream(), batch_size=BATCH, num_workers=1, persistent_workers=True)


@form
def torchdata_nodes() -> Any:
    nodes = of("torchdata.nodes")
    rank, world = place()
    mapped = nodes.Mapper(nodes.IterableWrapper(range(ROWS)[rank::world]), row)
    return nodes.Loader(nodes.Mapper(nodes.Batcher(mapped, batch_size=BATCH), torch.stack))


def shards() -> list[str]:
    """Two tar files in the working folder, written by whoever comes first; whole when they have their names."""
    wds, folder = of("webdataset"), Path("shards")
    folder.mkdir(exist_ok=True)
    for number in range(2):
        file = folder / f"{number}.tar"
        if not file.exists():
            mine = folder / f"{number}.{os.getpid()}"
            with wds.TarWriter(str(mine)) as out:
                for at in range(number, ROWS, 2):
                    out.write({"__key__": f"{at:04}", "at.cls": at})
            mine.rename(file)
    return [str(folder / f"{number}.tar") for number in range(2)]


@form
def webdataset() -> Any:
    wds = of("webdataset")
    stream = wds.WebDataset(shards(), shardshuffle=False, nodesplitter=wds.split_by_node).decode()
    stream = stream.compose(wds.detshuffle(8)).map(lambda sample: row(int(sample["at.cls"])))
    return wds.WebLoader(stream, batch_size=BATCH, num_workers=1)


@form
def webdataset_shuffled_by_the_clock() -> Any:
    wds = of("webdataset")
    stream = wds.WebDataset(shards(), shardshuffle=False, nodesplitter=wds.split_by_node).shuffle(8).decode()
    return wds.WebLoader(stream.map(lambda sample: row(int(sample["at.cls"]))), batch_size=BATCH)


def stacked(samples: list[dict[str, int]]) -> Tensor:
    return torch.stack([row(sample["at"]) for sample in samples])


@form
def datasets_rows() -> Any:
    rows = of("datasets").Dataset.from_dict({"at": list(range(ROWS))})
    return DataLoader(
        rows, batch_size=BATCH, shuffle=True, collate_fn=lambda some: torch.stack([row(s["at"]) for s in some])
    )


@form
def datasets_stream() -> Any:
    datasets = of("datasets")
    stream = datasets.Dataset.from_dict({"at": list(range(ROWS))}).to_iterable_dataset(num_shards=4)
    stream = of("datasets.distributed").split_dataset_by_node(stream.shuffle(seed=3, buffer_size=8), *place())
    return DataLoader(stream, batch_size=BATCH, collate_fn=stacked)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    session = regrow.init(seed=3)
    model = DistributedDataParallel(nn.Linear(1 + WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.protect(model, optimizer)
    for step in session.steps(FORMS[args.form](), until=args.steps):
        with step as x:
            loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
            step.log(loss=loss, first=x[0, 0], all=x.sum())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    Path(args.out).with_suffix(f".{session.rank}.json").write_text(json.dumps({"digest": session.digest()}))


if __name__ == "__main__":
    main()
