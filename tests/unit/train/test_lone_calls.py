"""A collective between two steps that is made again after a fault."""

from typing import Any

import pytest
import torch

from regrow.comm.observers import AskedCollective
from regrow.core.errors import GenerationHalted
from regrow.train.lone_calls import Kept, LoneCall


class Done:
    """Work that has nothing to wait for."""

    def wait(self) -> None:
        """Done."""


class Sums:
    """Adds 10 to what it is given, in place, as a reduction does; fails in its middle as often as it is told."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.seen: list[list[float]] = []

    def __call__(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Done:
        (tensor,) = args[0]
        self.seen.append(tensor.tolist())
        tensor.add_(10)
        if self.failures:
            self.failures -= 1
            raise GenerationHalted("the generation is over")
        return Done()


def asked(answer: Sums, tensor: torch.Tensor) -> LoneCall:
    return LoneCall(AskedCollective("allreduce", 2, False, answer, ([tensor],), {}))


def test_a_call_that_failed_in_its_middle_is_made_again_with_what_it_was_given() -> None:
    answer, tensor = Sums(failures=1), torch.tensor([1.0, 2.0])
    call = asked(answer, tensor)
    with pytest.raises(GenerationHalted):
        call()
    call()
    assert answer.seen == [[1.0, 2.0], [1.0, 2.0]]
    assert tensor.tolist() == [11.0, 12.0]


def test_a_call_made_once_more_for_a_newcomer_leaves_the_scripts_tensors_alone() -> None:
    answer, tensor = Sums(), torch.tensor([1.0])
    call = asked(answer, tensor)
    call()
    tensor.fill_(5.0)
    call()
    call()
    assert answer.seen == [[1.0]] * 3
    assert tensor.tolist() == [5.0]


def test_a_tensor_of_inference_mode_can_be_given_again() -> None:
    answer = Sums(failures=1)
    with torch.inference_mode():
        tensor = torch.tensor([1.0])
        call = asked(answer, tensor)
        with pytest.raises(GenerationHalted):
            call()
        call()
    call()
    assert answer.seen == [[1.0]] * 3


def test_what_an_evaluation_gathers_is_not_kept_without_bound() -> None:
    """Each batch under FSDP gathers all parameters."""
    kept, part, whole = Kept(), torch.zeros(1 << 18), torch.zeros(1 << 20)
    gathered = AskedCollective("_allgather_base", 4, False, Sums(), (whole, part), {})
    number = AskedCollective("allreduce", 4, False, Sums(), ([torch.zeros(1)],), {})
    taken = 0
    while kept.takes(gathered):
        kept.add(gathered)
        taken += 1
    assert taken == Kept.MOST_BYTES // whole.nbytes
    assert not kept.takes(number)
    kept.forget()
    assert kept.takes(number)


def test_calls_whose_arguments_differ_between_ranks_are_not_taken_over() -> None:
    """The root of a gather has the outputs, so ranks would not agree on which calls are kept."""
    assert not Kept().takes(AskedCollective("gather", 4, False, Sums(), ([[]], [torch.zeros(1)]), {}))
