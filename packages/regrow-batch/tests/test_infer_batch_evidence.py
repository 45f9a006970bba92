"""Fault for a refusal: judged by what workers have shown, never by the refusal alone."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from regrow_batch.head import BatchHead, HeadPolicy
from regrow_batch.journal import Journal
from regrow_batch.judging.evidence import WorkerEvidence
from regrow_batch.places import BatchStopped
from regrow_batch.pool import Pool, PoolPolicy
from regrow_batch.retries import Accept, Again, Answered, Doubtful, Fault, RetryPolicy, Unanswered, judge
from regrow_batch.rows import BatchRow, RowReading
from regrow_batch.scanning import Feed, scan
from regrow_batch.sending import ProbeAnswer
from regrow_batch.tally import Tally

KIND = ("/v1/chat/completions", "tiny")
ROW = BatchRow(0, "a", KIND[0], b'{"model": "tiny"}', 10, model="tiny")


def chat(**fields: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"} | fields
    return json.dumps({"id": "c", "model": "tiny", "choices": [choice], "usage": {"completion_tokens": 2}}).encode()


# --- one answer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kind", "fault"),
    [
        (chat(), Accept, None),
        (chat(message={"content": None, "reasoning": "hm"}), Accept, None),
        (chat(message={"content": None, "tool_calls": [{"id": "t"}]}), Accept, None),
        (chat(message={"content": None, "refusal": "no"}), Accept, None),
        (chat(message={"content": ""}), Doubtful, None),
        (chat(message={"content": None}), Doubtful, None),
        (chat(finish_reason="abort"), Again, Fault.UNKNOWN),
        (b'{"choices": []}', Again, Fault.WORKER),
        (b'{"choices": null}', Again, Fault.WORKER),
        (b'{"error": {"message": "no such field", "code": 400}}', Doubtful, None),
        (b'{"error": {"message": "out of memory", "code": 500}}', Again, Fault.UNKNOWN),
        (b'{"object": "error", "message": "no", "code": 50001}', Again, Fault.UNKNOWN),
        (b'{"error": "no"}', Again, Fault.UNKNOWN),
    ],
)
def test_what_an_answer_of_status_200_says_is_read(body: bytes, kind: type, fault: Fault | None) -> None:
    verdict = judge(Answered(200, body), ROW, wall=0.0)
    assert type(verdict) is kind
    assert not isinstance(verdict, Again) or verdict.fault is fault


def test_an_answer_with_a_field_of_another_shape_is_an_answer() -> None:
    body = json.loads(chat()) | {"usage": {"prompt_tokens": "three"}, "system_fingerprint": 7}
    verdict = judge(Answered(200, json.dumps(body).encode()), ROW, wall=0.0)
    assert isinstance(verdict, Accept) and verdict.answer.choices[0].texts == ["yes"]


# --- what workers have shown -------------------------------------------------------------------------------------


def test_a_worker_that_only_refuses_gets_no_rows_of_that_kind_but_one_now_and_then() -> None:
    evidence = WorkerEvidence()
    for _ in range(3):
        assert evidence.fits("w", KIND)
        evidence.refused("w", KIND, "refuses", 10.0)
    assert not evidence.fits("w", KIND) and evidence.fits("w", ("/v1/completions", "tiny"))
    assert not evidence.may_try("w", KIND, 10.4)
    assert [evidence.may_try("w", KIND, now) for now in (10.5, 10.6, 11.0, 11.4, 12.0)] == [
        True,
        False,
        True,
        False,
        True,
    ]
    evidence.answered("w", ROW)
    assert evidence.fits("w", KIND)


def test_a_worker_that_answers_others_is_left_its_rows_though_it_refuses_what_others_take() -> None:
    evidence = WorkerEvidence()
    evidence.answered("short", ROW)
    evidence.refused("short", KIND, "refuses", 0.0)
    evidence.convicted("short", KIND, 0.0)
    assert evidence.fits("short", KIND), "it takes shorter rows"
    evidence.refused("new", KIND, "refuses", 0.0)
    evidence.convicted("new", KIND, 0.0)
    assert not evidence.fits("new", KIND)


def test_a_model_that_a_worker_does_not_list_is_tried_with_one_row() -> None:
    evidence = WorkerEvidence()
    evidence.serves("w", ["other"])
    assert not evidence.fits("w", KIND)
    assert [evidence.may_try("w", KIND, 0.0), evidence.may_try("w", KIND, 0.0)] == [True, False]
    evidence.answered("w", ROW)
    assert evidence.fits("w", KIND), "it has it under another name"
    evidence.serves("w", ["other"])
    assert not evidence.fits("w", KIND), "what it showed before it came back counts"


# --- a head ------------------------------------------------------------------------------------------------------


class Servers:
    """A sender whose workers do as a table says: what each does with a row."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.table = table
        self.sent: list[tuple[str, str]] = []

    async def send(self, url: str, row: BatchRow) -> Answered | Unanswered:
        self.sent.append((url, row.custom_id))
        made = self.table[url](row.custom_id)
        if isinstance(made, asyncio.Event):
            await made.wait()
        await asyncio.sleep(0.001)
        return made if isinstance(made, Answered | Unanswered) else Answered(200, chat())

    async def probe(self, url: str) -> ProbeAnswer:
        return ProbeAnswer("", frozenset({"tiny"}))


def batch(folder: Path, servers: Servers, count: int, *, ends_loops: bool = False, **policy: Any) -> dict[str, Any]:
    """Each row's result."""
    source = folder / "in.jsonl"
    line = '{"custom_id":"%d","url":"/v1/chat/completions","body":{"model":"tiny","messages":[]}}\n'
    source.write_text("".join(line % number for number in range(count)))
    found, pool = scan(str(source)), Pool(PoolPolicy(cap=4))
    for url in servers.table:
        pool.join(url, time.monotonic())
    journal = Journal.open(folder / "journal", {})

    async def run() -> None:
        head = BatchHead(
            Feed(found, RowReading(ends_loops=ends_loops)),
            found.states,
            pool=pool,
            sender=servers,
            journal=journal,
            tally=Tally(count, began=time.monotonic()),
            policy=HeadPolicy(RetryPolicy(base=0.001), **policy),
        )
        await asyncio.wait_for(head.run(), 120)

    try:
        asyncio.run(run())
        results = {json.loads(line)["custom_id"]: json.loads(line) for _, _, line in journal.rows()}
    finally:
        journal.close()
    assert len(results) == count
    return results


REFUSAL = Answered(400, b'{"error": {"message": "too long"}}')


def test_a_worker_whose_engine_hangs_is_known_by_what_it_does_not_answer_and_its_rows_go_elsewhere(
    tmp_path: Path,
) -> None:
    never = asyncio.Event()
    servers = Servers({"http://hung:1": lambda _: never, "http://sound:1": lambda _: None})
    results = batch(tmp_path, servers, 200, silence=0.3, lateness=300.0)
    assert {row["served"]["worker"] for row in results.values()} == {"http://sound:1"}
    hung = [name for url, name in servers.sent if url == "http://hung:1"]
    assert len(hung) <= 8, "it got rows though it answered none"


def test_the_last_rows_are_tried_elsewhere_and_the_first_answer_counts(tmp_path: Path) -> None:
    never, servers = asyncio.Event(), Servers({})

    def first_hangs(name: str) -> asyncio.Event | None:
        return never if [each for _, each in servers.sent].count("3") == 1 and name == "3" else None

    servers.table = {"http://one:1": first_hangs, "http://other:1": first_hangs}
    results = batch(tmp_path, servers, 8, lateness=0.2)
    assert all(row["error"] is None for row in results.values())


class Together(Servers):
    """Two servers that both fail the same row, at the same moment, the first time."""

    def __init__(self, failure: Answered) -> None:
        super().__init__({"http://one:1": lambda _: None, "http://other:1": lambda _: None})
        self._failure = failure
        self._both = asyncio.Event()
        self.failed: list[str] = []

    async def send(self, url: str, row: BatchRow) -> Answered | Unanswered:
        self.sent.append((url, row.custom_id))
        tries = [name for _, name in self.sent].count("3")
        if row.custom_id != "3" or tries > 2:
            return Answered(200, chat())
        if tries == 2:
            self._both.set()
        await self._both.wait()
        self.failed.append(url)
        return self._failure


def test_a_row_that_two_workers_fail_at_the_same_moment_is_sent_again(tmp_path: Path) -> None:
    servers = Together(Answered(503, b""))
    results = batch(tmp_path, servers, 8, lateness=0.2)
    assert [name for _, name in servers.sent].count("3") > 2
    assert results["3"]["error"] is None


def test_a_stream_that_two_workers_refuse_at_the_same_moment_says_nothing_of_the_row(tmp_path: Path) -> None:
    class Whole(Together):
        async def send(self, url: str, row: BatchRow) -> Answered | Unanswered:
            found = await super().send(url, row)
            return REFUSAL if row.custom_id == "3" and not row.streams and url == self.failed[0] else found

    servers = Whole(REFUSAL)
    results = batch(tmp_path, servers, 8, ends_loops=True, lateness=0.2)
    assert results["3"]["error"] is None
    assert results["3"]["served"]["worker"] == servers.failed[1], "it refuses the stream alone"


def test_a_row_that_the_only_sound_worker_refuses_is_at_fault_and_one_row_more_shows_that_it_is_sound(
    tmp_path: Path,
) -> None:
    servers = Servers({"http://w:1": lambda name: REFUSAL if name == "7" else None})
    results = batch(tmp_path, servers, 8)
    assert results["7"]["error"]["fault"] == "row"
    assert results["7"]["error"]["message"] == "the worker refuses the row with status 400: too long"
    assert results["7"]["served"] == {"worker": "http://w:1"}


def test_a_control_that_is_answered_with_nothing_speaks_neither_for_nor_against_a_worker(tmp_path: Path) -> None:
    servers = Servers({})
    empty = Answered(200, chat(message={"content": ""}))

    def answer(name: str) -> Answered | None:
        controls = [each for _, each in servers.sent].count(name) - 1
        return REFUSAL if name == "7" else empty if 1 <= controls <= 4 else None

    servers.table["http://w:1"] = answer
    results = batch(tmp_path, servers, 8)
    assert results["7"]["error"]["fault"] == "row"


def test_many_rows_at_fault_in_a_row_do_not_cost_a_sound_worker_its_standing(tmp_path: Path) -> None:
    servers = Servers({"http://w:1": lambda name: REFUSAL if int(name) >= 20 else None})
    results = batch(tmp_path, servers, 300)
    assert sum(row["error"] is not None for row in results.values()) == 280
    assert {row["error"]["fault"] for row in results.values() if row["error"]} == {"row"}


def test_a_worker_that_begins_to_refuse_what_it_has_answered_is_at_fault_itself(tmp_path: Path) -> None:
    servers = Servers({})
    servers.table["http://w:1"] = lambda _: REFUSAL if len(servers.sent) > 10 else None
    results = batch(tmp_path, servers, 14)
    assert {row["error"]["fault"] for row in results.values() if row["error"]} == {"worker"}


def test_a_row_that_one_refuses_is_answered_by_another_and_none_is_asked_twice(tmp_path: Path) -> None:
    servers = Servers(
        {"http://short:1": lambda name: REFUSAL if int(name) % 2 else None, "http://long:1": lambda _: None}
    )
    results = batch(tmp_path, servers, 60)
    assert all(row["error"] is None for row in results.values())
    asked = [(url, name) for url, name in servers.sent if int(name) % 2]
    assert len(asked) == len(set(asked))


def test_a_row_is_given_to_all_before_it_is_given_again_to_one_that_failed_it(tmp_path: Path) -> None:
    wrong = Answered(200, b'{"error": "no"}')
    servers = Servers(
        {"http://one:1": lambda _: wrong, "http://two:1": lambda _: wrong, "http://sound:1": lambda _: None}
    )
    results = batch(tmp_path, servers, 3)
    assert all(row["error"] is None for row in results.values())
    failed = [(url, name) for url, name in servers.sent if url != "http://sound:1"]
    assert len(failed) == len(set(failed))


def test_a_refusal_says_more_than_an_answer_of_nothing(tmp_path: Path) -> None:
    empty = Answered(200, chat(message={"content": ""}))

    class LateButOne(Servers):
        async def send(self, url: str, row: BatchRow) -> Answered | Unanswered:
            if url == "http://sound:1" and row.custom_id != "3":
                await asyncio.sleep(0.3)
            return await super().send(url, row)

    servers = LateButOne(
        {
            "http://mute:1": lambda name: empty if name == "3" else None,
            "http://sound:1": lambda name: REFUSAL if name == "3" else None,
        }
    )
    results = batch(tmp_path, servers, 200)
    assert results["3"]["error"] is not None and results["3"]["error"]["fault"] == "row"


def test_the_last_row_is_not_sent_on_and_on_where_all_refuse_it_later_than_others_are_tried(tmp_path: Path) -> None:
    class Slow(Servers):
        async def send(self, url: str, row: BatchRow) -> Answered | Unanswered:
            self.sent.append((url, row.custom_id))
            if row.custom_id == "3":
                await asyncio.sleep(1.0)
                return REFUSAL
            return Answered(200, chat())

    servers = Slow({"http://one:1": None, "http://two:1": None})
    results = batch(tmp_path, servers, 8, lateness=0.3)
    assert results["3"]["error"]["fault"] == "row"
    assert len([name for _, name in servers.sent if name == "3"]) <= 4


def test_a_worker_with_another_model_than_one_that_has_left_is_at_fault(tmp_path: Path) -> None:
    evidence = WorkerEvidence()
    evidence.serves("gone", ["tiny"])
    evidence.serves("here", ["other"])
    assert evidence.lists("tiny") and not evidence.lists("tiny", "here")
    assert not evidence.lists("huge")


def test_a_row_that_nobody_streams_as_it_should_be_is_asked_for_in_one_piece(tmp_path: Path) -> None:
    class Streamless(Servers):
        async def send(self, url: str, row: BatchRow) -> Answered | Unanswered:
            self.sent.append((url, row.custom_id))
            return Unanswered("ended its stream before the answer was whole") if row.streams else Answered(200, chat())

    servers = Streamless({"http://one:1": None})
    results = batch(tmp_path, servers, 3, ends_loops=True)
    assert all(row["error"] is None for row in results.values())


class Restarted(Servers):
    """A worker that has another model from its fourth row on, and takes whatever name it is asked for."""

    def __init__(self, before: str, after: str, listed: frozenset[str]) -> None:
        super().__init__({"http://one:1": None})
        self._names, self._listed = (before, after), listed
        self.probes = 0

    @property
    def _again(self) -> bool:
        return len(self.sent) > 3

    async def send(self, url: str, row: BatchRow) -> Answered | Unanswered:
        self.sent.append((url, row.custom_id))
        return Answered(200, chat().replace(b"tiny", self._names[self._again].encode()))

    async def probe(self, url: str) -> ProbeAnswer:
        self.probes += 1
        return ProbeAnswer("", self._listed if self._again else frozenset({"tiny"}))


def test_a_worker_that_is_started_again_with_another_model_between_two_rows_answers_none(tmp_path: Path) -> None:
    servers = Restarted("tiny", "other", frozenset({"other"}))
    with pytest.raises(BatchStopped, match="answers as the model 'other' where 'tiny' was asked for"):
        batch(tmp_path, servers, 20, patience=0.5, timeout=0.5)
    journal = Journal.open(tmp_path / "journal", {})
    assert {json.loads(line)["served"]["model"] for _, _, line in journal.rows()} == {"tiny"}
    journal.close()


def test_a_name_that_a_worker_has_for_its_model_is_asked_about_once(tmp_path: Path) -> None:
    servers = Restarted("tiny-2026-11", "tiny-2026-11", frozenset({"tiny"}))
    results = batch(tmp_path, servers, 50)
    assert {row["served"]["model"] for row in results.values()} == {"tiny-2026-11"}
    assert servers.probes == 2, "one as it came, one for the name"
