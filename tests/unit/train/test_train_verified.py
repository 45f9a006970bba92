"""Digests of protected state, where two states differ, and the copy that is gone back to."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from regrow.core.errors import StateError
from regrow.core.ids import NO_STATE, StepNo
from regrow.train.state.fingerprints import BLOCK_BYTES, blocks, digest_blocks, distance, fingerprint, keep
from regrow.train.state.protected import ProtectedState
from regrow.train.state.verified import VerifiedCopy
from regrow.train.worker.fault_injection import flip_bit

NOTHING: frozenset[str] = frozenset()


class Worker:
    """A model with everything that counts, after two steps."""

    def __init__(self, width: int = 8) -> None:
        torch.manual_seed(0)
        self.wide, self.norm, self.last = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1)
        self.net = nn.Sequential(self.wide, self.norm, self.last)
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.state = ProtectedState([self.net, self.optimizer, self.scheduler])
        for _ in range(2):
            self.step()

    def step(self) -> None:
        self.net(torch.randn(6, 4, generator=torch.Generator().manual_seed(1))).sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def print(self, left_out: frozenset[str] = NOTHING) -> bytes:
        return fingerprint(*self.state.canonical(), left_out).whole

    def taken(self) -> VerifiedCopy:
        copy = VerifiedCopy(self.state)
        copy.take(StepNo(2), fingerprint(*self.state.canonical()).tensors, NOTHING)
        return copy


def spoil_parameter(worker: Worker) -> None:
    flip_bit(worker.state.parameters())


def spoil_moment(worker: Worker) -> None:
    flip_bit([worker.optimizer.state[worker.wide.weight]["exp_avg"]])


def spoil_statistics(worker: Worker) -> None:
    assert worker.norm.running_var is not None
    flip_bit([worker.norm.running_var])


def spoil_schedule(worker: Worker) -> None:
    worker.scheduler.last_epoch += 1


SPOILS = [spoil_parameter, spoil_moment, spoil_statistics, spoil_schedule]


def test_equal_states_have_equal_digests() -> None:
    assert Worker().print() == Worker().print()


@pytest.mark.parametrize("spoil", SPOILS)
def test_one_bit_anywhere_changes_the_digest(spoil: Callable[[Worker], None]) -> None:
    worker = Worker()
    spoil(worker)
    assert worker.print() != Worker().print()


def test_what_each_rank_has_for_itself_is_left_out() -> None:
    worker, other = Worker(), Worker()
    spoil_statistics(worker)
    own = frozenset(worker.state.buffers_of_no([]))
    assert worker.print(own) == other.print(own)
    assert worker.state.buffers_of_no([worker.net]) == set()


@pytest.mark.parametrize("spoil", SPOILS)
def test_going_back_restores_every_bit_as_often_as_is_needed(spoil: Callable[[Worker], None]) -> None:
    worker = Worker()
    before, copy = worker.print(), worker.taken()
    for _ in range(2):
        worker.step()
        spoil(worker)
        copy.check()
        copy.restore()
        assert worker.print() == before
    worker.step()
    again = Worker()
    again.step()
    assert worker.print() == again.print()


def test_the_memory_of_a_copy_is_used_again() -> None:
    worker = Worker()
    copy = worker.taken()
    places = {tensor.data_ptr() for tensor in copy._tensors.values()}
    worker.step()
    copy.take(StepNo(3), fingerprint(*worker.state.canonical()).tensors, NOTHING)
    assert {tensor.data_ptr() for tensor in copy._tensors.values()} == places
    assert copy.step == 3
    assert copy.nbytes == sum(tensor.nbytes for tensor in copy._tensors.values())


def test_a_copy_that_has_changed_is_not_gone_back_to() -> None:
    worker = Worker()
    copy = worker.taken()
    flip_bit(list(copy._tensors.values())[:1])
    with pytest.raises(StateError, match="has changed in memory"):
        copy.check()
    assert copy.step == NO_STATE


def test_without_a_copy_nothing_is_changed() -> None:
    with pytest.raises(StateError, match="no verified copy"):
        VerifiedCopy(Worker().state).check()


def test_the_blocks_that_differ_are_found_by_name() -> None:
    worker, other = Worker(width=1 << 17), Worker(width=1 << 17)
    weight = worker.wide.weight
    flip_bit([weight.detach().view(-1)[-8:]])
    mine, theirs = (list(digest_blocks(*each.state.canonical(), NOTHING)) for each in (worker, other))
    places = blocks(worker.state.canonical()[0], NOTHING)
    assert len(places) == len(mine)
    [found] = [block for block, a, b in zip(places, mine, theirs, strict=True) if a != b]
    assert (found.name, found.start, found.stop) == ("model.0.weight", BLOCK_BYTES, 2 * BLOCK_BYTES)


def test_python_state_that_differs_is_a_block_of_its_own() -> None:
    worker, other = Worker(), Worker()
    spoil_schedule(worker)
    mine, theirs = (list(digest_blocks(*each.state.canonical(), NOTHING)) for each in (worker, other))
    assert [a == b for a, b in zip(mine, theirs, strict=True)] == [True] * (len(mine) - 1) + [False]
    assert keep(blocks(worker.state.canonical()[0], NOTHING)[-1:], worker.state.canonical()[1]) == []


def test_the_distance_is_that_of_what_was_kept() -> None:
    worker = Worker()
    inventory, tensors = worker.state.canonical()
    [block] = [block for block in blocks(inventory, NOTHING) if block.name == "model.2.bias"]
    suspects = keep([block], tensors)
    assert distance(suspects, tensors) == 0.0
    with torch.no_grad():
        worker.last.bias.add_(0.5)
    assert distance(suspects, worker.state.canonical()[1]) == pytest.approx(0.5)
    assert distance([], tensors) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_flipped_bit_changes_one_element_by_a_little_and_no_version(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.tensor([0.5, -3.0, 1.0], dtype=dtype))
    version = parameter._version
    flip_bit([parameter])
    now = parameter.detach().double()
    assert now[[0, 2]].tolist() == [0.5, 1.0]
    assert 0.05 < abs(float(now[1]) + 3.0) < 0.6
    assert parameter._version == version
    assert torch.isfinite(parameter).all()
