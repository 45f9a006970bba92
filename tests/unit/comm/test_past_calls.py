"""A worker that comes late to collectives gets the answers that the others got, or it is reported."""

import pytest
import torch
import torch.distributed as dist

from regrow.comm.past_calls import MOST_BYTES, PastCalls
from regrow.core.errors import ProtocolError


class Group:
    """Two ranks, of which this is the first."""

    ranks = [0, 1]
    key = "g.0"
    place = 0


def calls(doubts: list[str] | None = None, world: int = 2) -> PastCalls:
    told: list[str] = [] if doubts is None else doubts
    return PastCalls(told.append, lambda: world)


def heard(past: PastCalls, value: float, name: str = "allreduce", *, size: int = 1) -> None:
    """A collective of all ranks has that answer."""
    tensor = torch.zeros(size)
    done = past.record(Group(), name, ([tensor],), {})
    tensor.fill_(value)
    if done is not None:
        done()


def asked(past: PastCalls, given: float = 0.0, name: str = "allreduce", *, size: int = 1) -> float | None:
    """Answer that a newcomer gets; None: it is answered locally."""
    tensor = torch.full((size,), given)
    return None if past.answer(Group(), name, ([tensor],), {}) is None else float(tensor[0])


def newcomer(past: PastCalls, doubts: list[str]) -> PastCalls:
    made = calls(doubts)
    made.receive(past.encoded())
    return made


def test_calls_are_answered_in_their_order_inside_functions_and_between_them() -> None:
    past = calls()
    past.begin()
    heard(past, 1.0)
    with past.function(1):
        heard(past, 2.0)
    heard(past, 3.0)
    doubts: list[str] = []
    other = newcomer(past, doubts)
    with other.again():
        assert [asked(other) for _ in range(3)] == [1.0, 2.0, 3.0]
        assert not doubts
        assert asked(other) is None and "did not call all_reduce" in doubts[0]


def test_a_function_that_ran_again_is_told_once_and_alone() -> None:
    past = calls()
    past.begin()
    for value in (7.0, 8.0):
        with past.function(1):
            heard(past, value)
    heard(past, 9.0)
    other = newcomer(past, [])
    with other.again(1):
        assert asked(other) == 8.0
    with other.again():
        assert [asked(other), asked(other)] == [8.0, 9.0]


def test_nothing_is_noted_in_steps_and_all_is_forgotten_at_a_commit() -> None:
    past = calls()
    heard(past, 1.0)
    past.begin()
    heard(past, 2.0)
    past.begin()
    past.end()
    heard(past, 3.0)
    doubts: list[str] = []
    other = newcomer(past, doubts)
    with other.again():
        assert asked(other) is None and len(doubts) == 1


@pytest.mark.parametrize(
    ("world", "name", "size", "why"),
    [
        (4, "allreduce", 1, "has an answer that other ranks have not"),
        (2, "allreduce", MOST_BYTES // 4 + 1, "makes more than 16 MiB of answers"),
        (2, "broadcast", 1, "it calls all_reduce at"),
    ],
)
def test_an_answer_that_is_not_that_of_each_rank_is_told(world: int, name: str, size: int, why: str) -> None:
    past, doubts = calls(world=world), list[str]()
    past.begin()
    heard(past, 1.0, name, size=size)
    other = newcomer(past, doubts)
    with other.again():
        assert asked(other, size=size) is None
    assert why in doubts[0]


def test_a_call_whose_answer_had_not_come_is_told() -> None:
    past, doubts = calls(), list[str]()
    past.begin()
    assert past.record(Group(), "allreduce", ([torch.zeros(1)],), {}) is not None
    other = newcomer(past, doubts)
    with other.again():
        assert asked(other) is None
    assert "was not done yet" in doubts[0]


def test_who_sends_something_else_than_it_did_hears_what_it_sent_and_says_so() -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    past, doubts = calls(), list[str]()
    past.begin()
    done = past.record(Group(), "broadcast", ([torch.tensor([1.0])], options), {})
    assert done is not None
    done()
    other = newcomer(past, doubts)
    tensor = torch.tensor([2.0])
    with other.again():
        assert other.answer(Group(), "broadcast", ([tensor], options), {}) is not None
    assert tensor.item() == 1.0 and "sends something else" in doubts[0]


def test_a_state_that_no_rank_has_alone_is_not_put_together_from_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regrow.comm.set_up.calls._builds_protected_state", lambda: True)
    doubts = list[str]()
    past = calls(doubts)
    with past.again():
        assert past.answer(Group(), "_allgather_base", (torch.zeros(2), torch.zeros(1)), {}) is None
        assert past.answer(Group(), "broadcast", ([torch.zeros(1)],), {}) is None, "buffers are alike"
    assert doubts == ["_allgather_base gathers a state of which each rank has a part"]


def test_outside_of_what_is_made_up_for_nothing_is_answered() -> None:
    past = calls()
    assert asked(past) is None


def test_what_is_no_note_is_refused() -> None:
    with pytest.raises(ProtocolError, match="does not decode"):
        calls().receive(b"\xff")


def test_who_hears_of_nothing_forgets_what_it_had_noted_itself() -> None:
    doubts = list[str]()
    past = calls(doubts)
    past.begin()
    heard(past, 1.0)
    past.receive(b"")
    with past.again():
        assert asked(past) is None
    assert "did not call" in doubts[0]
