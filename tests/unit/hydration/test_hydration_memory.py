"""Bytes of tensors that are not contiguous, as a holder sends them."""

import random

import torch

from regrow.hydration import memory
from regrow.hydration.memory import Outgoing
from regrow.hydration.plan import ByteSpan


def crooked() -> list[torch.Tensor]:
    """Tensors that are not contiguous, of several shapes and widths of their elements."""
    torch.manual_seed(1)
    return [
        torch.randn(64, 96).t(),
        torch.randn(1, 40, 30).permute(0, 2, 1),
        torch.randn(2, 3, 8, 9).to(memory_format=torch.channels_last),
        torch.randn(500, 8)[::2, 1:5],
        torch.randn(33, dtype=torch.complex64).conj(),
        torch.tensor(1 + 2j).conj(),
        torch.randn(4, 1, 300).bfloat16().expand(4, 5, 300),
    ]


def test_any_bytes_of_a_tensor_that_is_not_contiguous_are_those_of_its_copy() -> None:
    draw = random.Random(1)
    for tensor in crooked():
        whole = tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8)
        for _ in range(100):
            offset = draw.randrange(len(whole))
            span = ByteSpan("w", offset, draw.randint(1, len(whole) - offset))
            (data,) = (bytes(data) for data in Outgoing({"w": tensor}.__getitem__, len(whole)).read_all([(span,)]))
            assert data == bytes(whole[offset : offset + span.length].numpy())


def test_a_part_of_a_tensor_that_is_not_contiguous_costs_no_copy_of_the_whole() -> None:
    tensor, span = torch.randn(1000, 1000).t(), ByteSpan("w", 2_000_000, 4096)
    assert memory.bytes_of(tensor, span).untyped_storage().nbytes() <= span.length + 2 * 4000
