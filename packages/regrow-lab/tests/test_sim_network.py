"""Behaviour of a simulated network towards an agent's messages, and the limits that a stream sets."""

from regrow_lab.sim.network import Alarm, Downlink, Timeline


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


def test_an_alarm_rings_at_the_earliest_of_its_times_alone_and_can_be_set_again() -> None:
    timeline, rung = Timeline(0.0), list[float]()
    alarm = Alarm(timeline.at, lambda: rung.append(timeline.now))
    for due in (5.0, 3.0, 4.0):
        alarm.set(due)
    while timeline.step():
        if rung == [3.0]:
            alarm.set(4.5)
    assert rung == [3.0, 4.5]
