"""What a simulated network may do with what is said to an agent, and what no stream would do."""

from regrow.sim.network import Downlink


def test_what_stands_behind_a_question_is_heard_though_it_was_said_before_that_had_come() -> None:
    link = Downlink()
    question, order = link.place(question=True), link.place(question=False)
    assert link.arrives(question, question=True)
    assert link.arrives(order, question=False)


def test_a_question_that_comes_twice_is_heard_once_and_nothing_behind_it_is_lost() -> None:
    link = Downlink()
    question, order = link.place(question=True), link.place(question=False)
    assert link.arrives(question, question=True)
    assert not link.arrives(question, question=True)
    assert link.arrives(order, question=False)
    assert link.arrives(order, question=False), "orders may come twice"


def test_two_questions_on_their_way_are_both_heard() -> None:
    link = Downlink()
    first, second = link.place(question=True), link.place(question=True)
    assert link.arrives(first, question=True)
    assert link.arrives(second, question=True)
    assert not link.arrives(first, question=True)


def test_what_comes_again_from_before_a_question_is_not_heard() -> None:
    link = Downlink()
    order, question = link.place(question=False), link.place(question=True)
    assert link.arrives(order, question=False)
    assert link.arrives(question, question=True)
    assert not link.arrives(order, question=False)
