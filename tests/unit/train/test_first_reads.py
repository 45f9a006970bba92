"""First reads of a rank as it tells of them: the second one only where ranks should have shares of their own."""

from types import SimpleNamespace
from typing import Any

import pytest

from regrow.core.ids import StepNo
from regrow.core.messages.data import BatchRecord
from regrow.data.order import OPAQUE
from regrow.train.first_reads import FirstReads


@pytest.mark.parametrize(("overlap", "told"), [(False, [1, 2]), (True, [1])])
def test_reads_that_overlap_by_design_are_not_compared_between_ranks(overlap: bool, told: list[int]) -> None:
    sent: list[Any] = []
    worker: Any = SimpleNamespace(worker_id="w", training=SimpleNamespace(began=0), send=sent.append)
    reads = [BatchRecord(0, 2, "a")]
    batches: Any = SimpleNamespace(order=SimpleNamespace(kind=OPAQUE), reads=lambda _: reads)
    first = FirstReads(worker, batches, SimpleNamespace(shares_overlap=overlap), until=3, length=0)
    first.arrives()
    first.fetched(StepNo(1))
    assert [len(each.reads) for each in sent] == told
