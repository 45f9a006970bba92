"""On CUDA work is only enqueued: the gate, readers of the state and hydration come after it, whatever its stream."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from regrow.core.ids import StepNo
from regrow.hydration.memory import Incoming, Landing, Outgoing
from regrow.hydration.plan import ByteSpan
from regrow.train.state.device_digest import digest_on_device
from regrow.train.state.frozen import FrozenState
from regrow.train.state.protected import ProtectedState
from regrow.train.worker.accelerator import accelerator_of

LATE = 400_000_000
"""Cycles that the device is busy before it comes to what is enqueued: about 0.2 s."""
CHUNK = 1 << 20


@pytest.fixture
def stream() -> Iterator[torch.cuda.Stream]:
    """A stream of the script's own, which no other waits for."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        yield side
    torch.cuda.synchronize()


def late_fill(tensor: torch.Tensor, value: float) -> None:
    torch.cuda._sleep(LATE)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        tensor.fill_(value)


def read_elsewhere(tensor: torch.Tensor) -> float:
    """The first number, as a stream sees it that waits for none."""
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(other):
        found = tensor.detach().flatten()[:1].to("cpu", non_blocking=True)
        other.synchronize()
    return float(found)


def test_a_wait_returns_when_what_was_enqueued_before_it_is_done(stream: torch.cuda.Stream) -> None:
    weight = torch.zeros(1000, device="cuda")
    stream.synchronize()
    late_fill(weight, 3.0)
    assert read_elsewhere(weight) == 0.0, "nothing was late: this test would prove nothing"
    late_fill(weight, 5.0)
    accelerator = accelerator_of([weight])
    assert accelerator.enqueues
    accelerator.wait()
    assert read_elsewhere(weight) == 5.0


def test_state_is_read_as_it_is_after_the_update_that_was_enqueued(stream: torch.cuda.Stream) -> None:
    model = nn.BatchNorm1d(8).cuda()
    assert model.running_mean is not None
    state = ProtectedState((model, torch.optim.SGD(model.parameters(), lr=0.1)), {})
    frozen = FrozenState(state, accelerator_of(model.parameters()).wait)
    stream.synchronize()
    late_fill(model.weight, 3.0)
    late_fill(model.running_mean, 5.0)
    frozen.freeze(StepNo(0))
    late_fill(model.running_mean, 9.0)  # the body of the next step has begun: a copy of it is read
    read = {}
    for entry in frozen.inventory(StepNo(0)).entries:
        read[entry.name.rpartition(".")[2]] = read_elsewhere(frozen.tensor(entry.name))
    assert read["weight"] == 3.0
    assert read["running_mean"] == 5.0


TENSORS = {
    "plain": lambda: torch.randn(1000, 37),
    "transposed": lambda: torch.randn(64, 33).t(),
    "every other": lambda: torch.randn(100)[::2],
    "bfloat16": lambda: torch.randn(777).to(torch.bfloat16),
    "channels last": lambda: torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
    "scalar": lambda: torch.randn(()),
    "integers": lambda: torch.randint(0, 1 << 40, (91,)),
    "complex": lambda: torch.randn(12, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize(("source", "target"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("name", TENSORS)
def test_bytes_of_tensors_come_from_any_device_to_any(name: str, source: str, target: str) -> None:
    given = TENSORS[name]().to(source)
    taken = torch.empty_like(given, device=target).fill_(1)
    outgoing = Outgoing(lambda _: given, CHUNK)
    incoming = Incoming({name: taken})
    landing = Landing(incoming, CHUNK)
    at = 0
    while at < given.nbytes:
        chunk = (ByteSpan(name, at, min(1000, given.nbytes - at)),)
        room = landing.room(chunk)
        room[:] = next(outgoing.read_all([chunk]))
        landing.land(chunk)
        at += chunk[0].length
    landing.await_landed()
    incoming.copy_straightened()
    assert torch.equal(taken.cpu(), given.cpu())


def test_a_digest_says_the_same_of_the_same_state_on_either_device() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    here = ProtectedState((model,), {}).digest()
    assert ProtectedState((model.cuda(),), {}).digest() == here


@pytest.mark.parametrize("name", TENSORS)
def test_a_digest_that_is_worked_out_on_the_device_is_the_processors(name: str) -> None:
    given = TENSORS[name]().contiguous()
    assert digest_on_device(given.cuda()) == digest_on_device(given)
