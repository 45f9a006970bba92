"""A head goes on with every row whatever becomes of its worker."""

import asyncio
import time
from pathlib import Path

from regrow_batch.head import BatchHead, HeadPolicy
from regrow_batch.journal import Journal
from regrow_batch.pool import Pool, PoolPolicy
from regrow_batch.retries import Answered, Unanswered
from regrow_batch.rows import BatchRow, RowReading
from regrow_batch.scanning import Feed, scan
from regrow_batch.tally import Tally


class Recalling:
    """A sender whose worker is drained while the next row's task has been made and has not begun, and comes back."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.head: BatchHead | None = None
        self.sent: list[str] = []

    async def send(self, url: str, row: BatchRow) -> Answered | Unanswered:
        self.sent.append(row.custom_id)
        if len(self.sent) == 1 and self.head is not None:
            while not self.head._wake._waiters:  # until the head waits
                await asyncio.sleep(0.001)
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: self.pool.drain(url, time.monotonic(), grace=0.0))
            loop.call_later(0.02, self.back, url)
            self.head.changed()
        return Answered(200, b'{"choices": []}')

    def back(self, url: str) -> None:
        self.pool.join(url, time.monotonic())
        if self.head is not None:
            self.head.changed()

    async def probe(self, url: str) -> str:
        return ""


async def test_a_row_whose_worker_has_to_go_before_its_attempt_has_begun_is_not_lost(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    line = '{"custom_id":"%s","url":"/v1/completions","body":{"prompt":"x"}}\n'
    source.write_text("".join(line % name for name in "abc"))
    found, pool = scan(str(source)), Pool(PoolPolicy(cap=1))
    journal, sender = Journal.open(tmp_path / "journal", {}), Recalling(pool)
    pool.join("http://w:1", time.monotonic())
    tally = Tally(3, began=time.monotonic())
    sender.head = BatchHead(
        Feed(found, RowReading()),
        found.states,
        pool=pool,
        sender=sender,
        journal=journal,
        tally=tally,
        policy=HeadPolicy(),
    )
    await asyncio.wait_for(sender.head.run(), 30)
    assert [number for number, _, _ in journal.rows()] == [0, 1, 2]
    assert tally.retries.total() == 1, "no attempt was taken back before it had begun"
    assert pool.workers["http://w:1"].rows == 0
    journal.close()
