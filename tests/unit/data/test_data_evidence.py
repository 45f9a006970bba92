"""The samples of a batch are recorded as they were read, and a data set that became smaller is named."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import regrow
from regrow.core.errors import DataError, UsageError
from regrow.core.messages.data import BatchRecord
from regrow.data.loader import StepLoader
from regrow.data.mixed import Mixture
from regrow.data.order import keys_of, samples_digest

Pair = namedtuple("Pair", "x y")


class Numbers(Dataset[Tensor]):
    def __init__(self, size: int = 40) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Batched(Numbers):
    """Reads a whole batch at once, and gives what is no list."""

    def __getitems__(self, indices: list[int]) -> Tensor:
        return torch.tensor(indices)


class Lines(Dataset[str]):
    """The lines of a file, counted anew each time: the file may become shorter."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return len(self.path.read_text().splitlines())

    def __getitem__(self, index: int) -> str:
        return self.path.read_text().splitlines()[index]


class LineBatches(Lines):
    def __getitems__(self, indices: list[int]) -> list[str]:
        return [self[index] for index in indices]


def as_it_is(samples: Any) -> Any:
    return samples


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Numbers(), Batched()])
def test_the_record_has_the_samples_that_the_order_says(dataset: Any, workers: int) -> None:
    collate: Any = as_it_is if isinstance(dataset, Batched) else None
    one = StepLoader(DataLoader(dataset, 4, shuffle=True, num_workers=workers, collate_fn=collate), seed=5)
    for step, share, shares in [(0, 1, 2), (1, 1, 2), (9, 0, 3), (2, 0, 1)]:
        batch = one.batch(step, share, shares)
        keys = keys_of(one.spec, step, share, shares)
        assert batch.flatten().tolist() == [index for _, index in keys]
        record = one.record
        assert (record.share, record.shares, record.samples) == (share, shares, samples_digest(keys))
    one.close()


def test_what_is_recorded_is_what_was_read_not_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    one = StepLoader(DataLoader(Numbers(), 4), seed=5)
    planned = one.spec
    monkeypatch.setattr(
        "regrow.data.sampling.keys_of", lambda spec, step, share, shares: [(0, 1), (0, 1), (0, 2), (0, 3)]
    )
    one.batch(0, 0, 1)
    assert one.record.samples != samples_digest(keys_of(planned, 0, 0, 1))
    assert one.record.samples == samples_digest([(0, 1), (0, 1), (0, 2), (0, 3)])


def test_samples_of_a_sampler_are_recorded_too() -> None:
    loader = DataLoader(Numbers(), 4, sampler=WeightedRandomSampler([1.0] * 40, 24))
    one = StepLoader(loader, seed=5)
    read = [int(row) for row in one.batch(7, 0, 1).flatten()]
    assert one.spec.kind == "opaque"
    assert one.record.samples == samples_digest([(7 // 6, index) for index in read])


def test_collate_fn_sees_exactly_what_it_saw_before() -> None:
    seen: list[Any] = []

    def collate(samples: Any) -> Any:
        seen.append(samples)
        return samples

    StepLoader(DataLoader(Numbers(), 2, collate_fn=collate), seed=0).batch(0, 0, 1)
    StepLoader(DataLoader(Batched(), 2, collate_fn=collate), seed=0).batch(0, 0, 1)
    assert type(seen[0]) is list
    assert [sample.tolist() for sample in seen[0]] == [[0.0], [1.0]]
    assert isinstance(seen[1], Tensor)
    assert seen[1].tolist() == [0, 1]


@pytest.mark.parametrize("batch", [Pair(1, [2.0]), (1, 2), {"x": (3,)}, "text", None])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_of_any_kind_comes_out_as_collate_fn_gave_it(batch: Any, workers: int) -> None:
    one = StepLoader(DataLoader(Numbers(), 2, num_workers=workers, collate_fn=lambda _: batch), seed=0)
    given = one.batch(0, 0, 1)
    assert (type(given), given) == (type(batch), batch)
    one.close()


def test_pinning_reaches_the_batch_and_leaves_the_evidence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pinned:
        pinned = False

        def pin_memory(self) -> "Pinned":
            self.pinned = True
            return self

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)  # torch pins nothing without one
    loader: Any = DataLoader(Numbers(), 2, collate_fn=lambda _: {"x": [Pinned()]}, pin_memory=True)
    one = StepLoader(loader, seed=0)
    batch = one.batch(0, 0, 1)
    assert batch["x"][0].pinned
    assert one.record.samples == samples_digest([(0, 0), (0, 1)])


def test_the_content_has_a_digest_that_a_change_of_one_bit_changes() -> None:
    def recorded(dataset: Any) -> BatchRecord:
        one = StepLoader(DataLoader(dataset, 4), seed=0)
        one.batch(0, 0, 1)
        return one.record

    class Flipped(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            sample = super().__getitem__(index)
            return sample if index != 3 else torch.from_numpy(np.nextafter(sample.numpy(), np.float32(9)))

    assert recorded(Numbers()) == recorded(Numbers())
    assert len(recorded(Numbers()).digest) == 16
    assert recorded(Numbers()).digest != recorded(Flipped()).digest
    assert recorded(Numbers()).samples == recorded(Flipped()).samples


def test_a_step_that_runs_again_has_the_same_record_whatever_the_body_did() -> None:
    one = StepLoader(DataLoader(Numbers(), 4), seed=0)
    batch = one.batch(0, 0, 1)
    before = one.record
    batch.zero_()
    assert one.record == before
    one.batch(0, 0, 1)
    assert one.record == before
    one.batch(0, 0, 1)
    assert one.record == before


def test_a_batch_from_a_generator_has_its_content_on_record_at_any_place() -> None:
    one = StepLoader((torch.full((3,), float(i)) for i in range(4)), seed=0)
    one.batch(1, 0, 2)
    before = one.record
    one.batch(1, 1, 3)
    assert one.record == BatchRecord(1, 3, before.digest, "")
    assert before.digest


def test_what_nobody_records_costs_no_digest() -> None:
    one = StepLoader(DataLoader(Numbers(), 4), seed=0, recorded=False)
    one.batch(0, 0, 1)
    assert one.record.digest == ""
    assert one.record.samples


def test_before_the_first_batch_there_is_no_record() -> None:
    with pytest.raises(UsageError, match="no batch was read yet"):
        _ = StepLoader(DataLoader(Numbers(), 4), seed=0).record


# --- a data set that became smaller ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Lines, LineBatches])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_shrank_is_named(tmp_path: Path, kind: type[Lines], workers: int) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("line\n" * 20)
    one = StepLoader(DataLoader(kind(path), 4, num_workers=workers, prefetch_factor=2 if workers else None), seed=0)
    one.batch(0, 0, 1)
    shorter = tmp_path / "shorter"
    shorter.write_text("line\n" * 14)
    shorter.replace(path)  # loader workers read ahead: they never see half of it
    with pytest.raises(DataError, match=rf"{kind.__name__} had 20 samples at the start and has 14 now: sample 1\d is"):
        for step in range(1, 5):
            one.batch(step, 0, 1)
    one.close()


def test_a_source_of_a_mixture_that_shrank_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("line\n" * 20)
    mixed = Mixture({"numbers": Numbers(), "lines": Lines(path)}, weights={"numbers": 1, "lines": 1})
    one = StepLoader(regrow.DataLoader(mixed, 16, collate_fn=as_it_is), seed=0)
    path.write_text("line\n")
    with pytest.raises(DataError, match=r"source 'lines' of a mixture, Lines, had 20 samples .* has 1 now"):
        one.batch(0, 0, 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_index_error_of_a_data_set_that_did_not_shrink_passes_through_with_its_sample(workers: int) -> None:
    class Short(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            return ([torch.zeros(1)] * 6)[index]

    one = StepLoader(DataLoader(Short(), 4, num_workers=workers), seed=0)
    with pytest.raises(IndexError) as raised:
        for step in range(2):
            one.batch(step, 0, 1)
    told = "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "the data set Short for sample 6, though its len() is 40" in told
    one.close()
