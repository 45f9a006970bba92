"""Random numbers behind the loop: seeded at its end, and left alone where the script has gone on since."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from regrow.core.ids import StepNo
from regrow.core.process.forks import not_at_exit
from regrow.train.after_loop import AfterLoop


class Loop:
    """A loop that all ranks have left after step 4."""

    def __init__(self) -> None:
        self.left, self.seeded = False, list[StepNo]()
        member = SimpleNamespace(
            step=StepNo(5), over=True, leaves_others=False, groups=SimpleNamespace(on_leaving=None)
        )
        state = SimpleNamespace(
            between=SimpleNamespace(after_last_step=lambda step: None),
            variables=SimpleNamespace(leave=lambda over: None),
        )
        batches = SimpleNamespace(seed_body=self.seeded.append)
        self.context: Any = SimpleNamespace(worker=member, batches=batches, protected=lambda: state)

    def stops(self) -> None:
        """Nothing runs."""

    def loops_left(self) -> None:
        """Nothing stands between its steps."""

    def recover(self) -> None:
        """Nothing was lost."""

    def recover_if_halted(self) -> bool:
        """Never halted."""
        return False

    def agrees(self) -> bool:
        """As nobody is compared."""
        return True


@pytest.fixture
def after() -> Iterator[tuple[AfterLoop, Loop]]:
    loop = Loop()
    after = AfterLoop(cast(Any, loop))
    yield after, loop
    not_at_exit(after.end)


def test_generators_are_seeded_as_the_loop_ends(after: tuple[AfterLoop, Loop]) -> None:
    behind, loop = after
    behind.begin()
    behind.begin()
    assert loop.seeded == [5]


def test_a_script_that_left_its_loop_early_keeps_what_it_has_seeded_since(after: tuple[AfterLoop, Loop]) -> None:
    behind, loop = after
    behind.left_early(over=True)
    behind.meets_others()  # a collective, before which the script may have called torch.manual_seed
    assert behind.open and loop.seeded == []


def test_generators_are_seeded_where_nobody_waits_for_others_too(after: tuple[AfterLoop, Loop]) -> None:
    behind, loop = after
    loop.context.worker.over = False  # as of a script under plain python, or torchrun
    behind.begin()
    assert loop.seeded == [5] and not behind.open
