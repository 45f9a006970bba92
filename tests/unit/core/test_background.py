"""Whoever hands over what may block on a disk is not held up by it."""

import threading

from regrow.core.background import Background

PATIENCE = 10.0


def test_an_action_that_blocks_holds_nobody_up_and_those_after_it_come_in_their_order() -> None:
    begun, released, last = (threading.Event() for _ in range(3))
    done: list[int] = []

    def stalls() -> None:
        begun.set()
        released.wait(PATIENCE)
        done.append(0)

    background = Background("test-disk", within=0.1)
    background.start()
    background.do(stalls)
    assert begun.wait(PATIENCE)
    for number in range(1, 4):
        background.do(lambda number=number: done.append(number))  # type: ignore[misc]
    background.do(last.set)
    assert done == [], "who hands an action over waited for it"
    assert not background.close(), "closing waited for what blocks, or has forgotten it"
    assert done == []
    released.set()
    assert last.wait(PATIENCE)
    assert done == [0, 1, 2, 3]


def test_leaving_waits_for_what_is_left() -> None:
    done: list[int] = []
    with Background("test-disk", within=PATIENCE) as background:
        for number in range(100):
            background.do(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == list(range(100))
    assert background.close()
