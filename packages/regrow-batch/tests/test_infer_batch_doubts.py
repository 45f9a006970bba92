"""Words against a row: known for what they are worth by a row that was answered before, in a time that has an end."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import pytest

from regrow.core.process.tasks import Tasks
from regrow_batch.judging import doubts
from regrow_batch.judging.doubts import RowsInDoubt
from regrow_batch.judging.evidence import Hand, Opinion, WorkerEvidence
from regrow_batch.pool import Pool, PoolPolicy
from regrow_batch.retries import Answered, Fault, Unanswered
from regrow_batch.rows import BatchRow
from regrow_batch.sending import ProbeAnswer

ROW = BatchRow(0, "a", "/v1/completions", b'{"model": "tiny"}', 10, model="tiny")
REFUSAL = Answered(400, b'{"error": {"message": "no"}}')
SOUND = Answered(200, b'{"model": "tiny", "choices": [{"text": "yes"}]}')
OTHER = Answered(200, b'{"model": "other", "choices": [{"text": "yes"}]}')


class Controls:
    """A sender of whose workers each always says the same; None: nothing, for ever."""

    def __init__(self, says: Mapping[str, Answered | Unanswered | None]) -> None:
        self._says = says
        self.sent: list[str] = []

    async def send(self, url: str, row: BatchRow) -> Answered | Unanswered:
        self.sent.append(url)
        said = self._says[url]
        if said is None:
            await asyncio.Event().wait()
        assert said is not None
        return said

    async def probe(self, url: str) -> ProbeAnswer:
        raise AssertionError("nobody asks")


class Doubted:
    """A row that all these workers refuse; one that has left has answered another."""

    def __init__(self, controls: Controls, *urls: str) -> None:
        pool, evidence = Pool(PoolPolicy()), WorkerEvidence()
        evidence.serves("gone", ["tiny"])
        evidence.answered("gone", ROW)
        self.errands = Tasks(self._failed)
        self.settled: list[tuple[str, Fault]] = []
        self.at_the_end = False, False
        """No row is in doubt, and a worker is still being tried."""
        self._woken = asyncio.Event()
        self.rows = RowsInDoubt(
            pool, evidence, controls, back=lambda _: None, settle=self._settle, errand=self._send_on_an_errand
        )
        for url in urls:
            pool.join(url, 0.0)
            pool.probed(url, "", 0.0, 0.0)
            evidence.serves(url, [url])
        hand = Hand(ROW)
        for url in urls:
            self.rows.refused(hand, Opinion(url, "refuses it", REFUSAL))

    def _settle(self, _: Hand, word: Opinion, fault: Fault) -> None:
        self.settled.append((word.worker, fault))
        self._woken.set()

    def _send_on_an_errand(self, work: Coroutine[Any, Any, None]) -> None:
        self.errands.start(work, "a control").add_done_callback(lambda _: self._woken.set())

    @staticmethod
    def _failed(what: str, error: BaseException) -> None:
        raise AssertionError(what) from error

    async def conclude(self) -> list[tuple[str, Fault]]:
        """Conclude as often as the head would."""
        try:
            async with asyncio.timeout(30.0):
                while not self.settled:
                    self.rows.conclude()
                    if self.rows.trying:
                        await self._woken.wait()
                    self._woken.clear()
            self.at_the_end = self.rows.none, self.rows.trying
        finally:
            await self.errands.close()
        return self.settled


async def test_a_control_that_another_model_answers_does_not_speak_for_a_worker() -> None:
    found = await Doubted(Controls({"other": OTHER}), "other").conclude()
    assert found == [("other", Fault.WORKER)]
    sound = await Doubted(Controls({"tiny": OTHER}), "tiny").conclude()
    assert sound == [("tiny", Fault.ROW)], "it has the model under another name"


async def test_a_worker_that_hangs_holds_up_neither_the_others_nor_the_end() -> None:
    doubted = Doubted(Controls({"hung": None, "tiny": SOUND}), "hung", "tiny")
    assert await doubted.conclude() == [("tiny", Fault.ROW)]
    assert doubted.at_the_end == (True, True)


@pytest.mark.parametrize(("outcome", "most"), [(Unanswered("is silent", hung=True), 3), (Unanswered("is cut"), 10)])
async def test_a_control_that_was_waited_for_in_vain_is_not_sent_as_often_as_one_that_fails_at_once(
    outcome: Unanswered, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doubts, "_TRY_WAIT", 0.0)
    controls = Controls({"tiny": outcome})
    assert await Doubted(controls, "tiny").conclude() == [("tiny", Fault.UNKNOWN)]
    assert controls.sent == ["tiny"] * most
