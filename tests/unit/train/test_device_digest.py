"""The digest that is worked out on a tensor's own device, here the processor."""

from collections.abc import Callable, Iterator

import pytest
import torch

from regrow.train.state import device_digest
from regrow.train.state.device_digest import digest_on_device

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(device_digest, "_CHUNK", 64)
    device_digest._weights.cache_clear()
    yield
    device_digest._weights.cache_clear()


def values(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    random = torch.Generator().manual_seed(count)
    return torch.randn(count, generator=random).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 3, 64, 65, 257, 1000])
def test_equal_values_have_one_number_and_any_byte_that_changes_gives_another(count: int, dtype: torch.dtype) -> None:
    tensor = values(count, dtype)
    told = digest_on_device(tensor)
    assert told == digest_on_device(tensor.clone())
    single = tensor.view(torch.uint8)
    for at in range(0, single.numel(), max(1, single.numel() // 50)):
        single[at] ^= 1
        assert digest_on_device(tensor) != told
        single[at] ^= 1
    assert digest_on_device(tensor) == told


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(4.0),
        lambda x: x.neg_(),
        lambda x: x.copy_(x.flip(0)),
        lambda x: x.copy_(x.roll(64)),
        lambda x: x.copy_(x.roll(1)),
        lambda x: x.zero_(),
    ],
    ids=["times four", "negated", "reversed", "moved by a chunk", "moved by one", "zero"],
)
def test_what_becomes_of_all_values_alike_shows(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = values(1024)
    told = digest_on_device(tensor)
    change(tensor)
    assert digest_on_device(tensor) != told


def test_where_a_tensor_lies_in_its_storage_does_not_matter() -> None:
    whole = values(401, torch.bfloat16)
    for start, stop in ((1, 301), (1, 300), (2, 302), (3, 400)):
        part = whole[start:stop]
        assert digest_on_device(part) == digest_on_device(part.clone())


def test_no_number_of_the_scripts_is_drawn_for_it() -> None:
    before = torch.random.get_rng_state()
    digest_on_device(values(10))
    assert torch.equal(before, torch.random.get_rng_state())
