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
from regrow_batch.sending import ProbeAnswer
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
            while not self.head._queue.wake._waiters:  # until the head waits
                await asyncio.sleep(0.001)
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: self.pool.drain(url, time.monotonic(), grace=0.0))
            loop.call_later(0.02, self.back, url)
            self.head.changed()
        return Answered(200, b'{"choices": [{"text": "yes"}]}')

    def back(self, url: str) -> None:
        self.pool.join(url, time.monotonic())
        if self.head is not None:
            self.head.changed()

    async def probe(self, url: str) -> ProbeAnswer:
        return ProbeAnswer()


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


class Hanging:
    """A sender whose third row hangs at two workers, which have to go at the same moment, when a third one comes."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.head: BatchHead | None = None
        self.hung = 0

    async def send(self, url: str, row: BatchRow) -> Answered | Unanswered:
        if row.custom_id == "c" and url != "http://third:1":
            self.hung += 1
            if self.hung == 2:
                asyncio.get_running_loop().call_soon(self.all_go)
            await asyncio.Event().wait()
        return Answered(200, b'{"choices": [{"text": "yes"}]}')

    def all_go(self) -> None:
        for url in list(self.pool.workers):
            self.pool.drain(url, time.monotonic(), grace=0.0)
        self.pool.join("http://third:1", time.monotonic())
        if self.head is not None:
            self.head.changed()

    async def probe(self, url: str) -> ProbeAnswer:
        return ProbeAnswer()


async def test_a_row_at_two_workers_that_have_to_go_at_once_is_taken_back_from_both(tmp_path: Path) -> None:
    pool, tally = Pool(PoolPolicy(cap=4)), Tally(3, began=time.monotonic())
    sender = Hanging(pool)
    journal = await run(tmp_path, "abc", pool, sender, tally, HeadPolicy(lateness=0.01), "http://one:1", "http://two:1")
    assert journal == [0, 1, 2]
    assert dict(tally.retries) == {"had to go": 2}


class Leaving:
    """A sender whose row ends two engines and is then refused, while the only other worker goes."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.head: BatchHead | None = None
        self.sent, self.down = 0, False

    async def send(self, url: str, row: BatchRow) -> Answered | Unanswered:
        self.sent += 1
        if self.sent <= 2:
            self.down = True
            return Unanswered("is gone")
        while not all(each.takes_rows for each in self.pool.workers.values()):
            await asyncio.sleep(0.001)  # both are back
        other = next(each for each in self.pool.workers if each != url)
        asyncio.get_running_loop().call_soon(lambda: self.pool.drain(other, time.monotonic(), grace=0.0))
        return Answered(400, b"{}")

    async def probe(self, url: str) -> ProbeAnswer:
        down, self.down = self.down, False
        return ProbeAnswer("is down" if down else "")


async def test_a_row_that_goes_on_alone_does_not_wait_for_a_worker_that_has_gone(tmp_path: Path) -> None:
    pool, tally = Pool(PoolPolicy(cap=4)), Tally(1, began=time.monotonic())
    sender = Leaving(pool)
    assert await run(tmp_path, "a", pool, sender, tally, HeadPolicy(), "http://one:1", "http://two:1") == [0]
    assert tally.errors == 1


async def run(
    folder: Path, names: str, pool: Pool, sender: Hanging | Leaving, tally: Tally, policy: HeadPolicy, *urls: str
) -> list[int]:
    """A batch of rows with these names; the numbers of those that have a result."""
    source = folder / "in.jsonl"
    line = '{"custom_id":"%s","url":"/v1/completions","body":{"prompt":"x"}}\n'
    source.write_text("".join(line % name for name in names))
    found, journal = scan(str(source)), Journal.open(folder / "journal", {})
    for url in urls:
        pool.join(url, time.monotonic())
    sender.head = BatchHead(
        Feed(found, RowReading()),
        found.states,
        pool=pool,
        sender=sender,
        journal=journal,
        tally=tally,
        policy=policy,
    )
    await asyncio.wait_for(sender.head.run(), 60)
    rows = [number for number, _, _ in journal.rows()]
    journal.close()
    return rows
