"""Servers, and proxies before them, that answer what nobody would think of: no row gets what is not its answer."""

import asyncio
import base64
import json
import re
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyarrow import parquet

from regrow_batch import sending
from regrow_batch.report import OutputCount
from regrow_batch.retries import Accept, Again, Answered, Doubtful, Fault, Unanswered, judge
from regrow_batch.rows import BatchRow, RowReading, answered, read_row, refused
from regrow_batch.sending import HttpSender
from regrow_batch.streams import StreamedText
from regrow_batch.tables.columns import RESULTS, RowResult
from regrow_batch.tables.inputs import RowLines
from regrow_batch.tables.outputs import Output

CHAT = "/v1/chat/completions"
ROW = BatchRow(0, "a", CHAT, b"{}", 1, model="m")
SOUND = b'"choices":[{"index":0,"message":{"role":"assistant","content":"yes"},"finish_reason":"stop"}]}'
DEEP = b"[" * 100_000 + b"]" * 100_000
STRANGE = {
    "deep": b'{"more":' + DEEP + b"," + SOUND,
    "deep, not ended": b'{"more":' + DEEP[:100_000],
    "deep enough for a line to be too deep": b'{"more":' + b"[" * 950 + b"]" * 950 + b"," + SOUND,
    "no UTF-8 in a field that is passed over": b'{"more":"\xff",' + SOUND,
    "no UTF-8 in a field of another shape": b'{"usage":3,"more":"\xff",' + SOUND,
    "a code of very many digits": b'{"error":{"code":"' + b"9" * 5000 + b'","message":"no"}}',
}


@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize("url", [CHAT, "/v1/embeddings", "/rerank"])
@pytest.mark.parametrize("what", STRANGE)
def test_an_answer_of_which_no_line_can_be_made_is_no_answer(what: str, url: str, status: int) -> None:
    row = BatchRow(0, "a", url, b"{}", 1)
    verdict = judge(Answered(status, STRANGE[what]), row, wall=0.0)
    assert isinstance(verdict, Doubtful if status == 400 else Again)
    json.loads(refused(row, status, STRANGE[what], fault="row").decode())


def asked(url: str, **body: Any) -> BatchRow:
    line = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": {"model": "m"} | body})
    row = read_row(line.encode(), 0, RowReading())
    assert isinstance(row, BatchRow)
    return row


def choices(count: int) -> bytes:
    return json.dumps({"choices": [{"index": at, "text": "yes"} for at in range(count)]}).encode()


def embeddings(*found: Any) -> bytes:
    return json.dumps({"data": [{"index": at, "embedding": each} for at, each in enumerate(found)]}).encode()


@pytest.mark.parametrize(
    ("row", "enough", "too_little"),
    [
        (asked(CHAT, messages=[], n=3), choices(3), choices(1)),
        (asked("/v1/completions", prompt=["x", "y"], n=2), choices(4), choices(3)),
        (asked("/v1/completions", prompt=[[1, 2], [3]]), choices(2), choices(1)),
        (asked("/v1/completions", prompt=[1, 2, 3]), choices(1), choices(0)),
        (asked("/v1/embeddings", input=["x", "y"]), embeddings([0.1], "AAAA"), embeddings([0.1])),
        (asked("/v1/embeddings", input="x"), embeddings([0.1]), embeddings([])),
    ],
)
def test_a_worker_that_answers_a_part_of_what_was_asked_has_not_answered(
    row: BatchRow, enough: bytes, too_little: bytes
) -> None:
    assert isinstance(judge(Answered(200, enough), row, wall=0.0), Accept)
    verdict = judge(Answered(200, too_little), row, wall=0.0)
    assert isinstance(verdict, Again) and verdict.fault is Fault.WORKER


def test_a_list_is_an_answer_where_no_talk_was_asked_for() -> None:
    listed = Answered(200, b'[{"index": 0, "score": 0.5}]')
    assert isinstance(judge(listed, asked("/rerank", query="x"), wall=0.0), Accept)
    assert isinstance(judge(listed, ROW, wall=0.0), Again)


def placed(places: list[Any], field: str = "choices", **more: Any) -> bytes:
    """An answer whose parts have these places."""
    return json.dumps({field: [{"text": "yes", "embedding": [0.5]} | more | {"index": at} for at in places]}).encode()


@pytest.mark.parametrize(
    ("places", "is_whole"),
    [([0, 1, 2], True), ([2, 0, 1], True), ([0, 1, 1], False), ([0, 0, 0], True), ([None, None, None], True)],
)
def test_parts_that_say_they_are_the_same_one_are_not_two(places: list[Any], is_whole: bool) -> None:
    kind = Accept if is_whole else Again
    row = asked("/v1/completions", prompt=["a", "b", "c"])
    assert isinstance(judge(Answered(200, placed(places)), row, wall=0.0), kind)
    row = asked("/v1/embeddings", input=["a", "b", "c"])
    assert isinstance(judge(Answered(200, placed(places, "data")), row, wall=0.0), kind)


@pytest.mark.parametrize("place", ["0", 0.0, "first", True, {}])
def test_a_place_that_is_no_number_does_not_spoil_an_answer(place: Any) -> None:
    verdict = judge(Answered(200, placed([place])), asked("/v1/completions", prompt="a"), wall=0.0)
    assert isinstance(verdict, Accept) and verdict.answer.choices[0].text == "yes"


@pytest.mark.parametrize("data", [[{"embedding": [0.5, None]}], ["x"], [7], [{"embedding": [0.5]}, None]])
def test_an_embedding_without_its_numbers_is_none(data: Any) -> None:
    verdict = judge(Answered(200, json.dumps({"data": data}).encode()), asked("/v1/embeddings", input="a"), wall=0.0)
    assert isinstance(verdict, Again) and "without an embedding" in verdict.why


@pytest.mark.parametrize("reason", ["timeout", "cancelled", "insufficient_system_resource", "ERROR", None])
def test_an_answer_that_its_server_has_given_up_is_not_taken_for_a_whole_one(reason: str | None) -> None:
    more: dict[str, Any] = {"error": {"code": 502, "message": "the provider has gone"}} if reason is None else {}
    body = placed([0], finish_reason=reason, **more)
    verdict = judge(Answered(200, body), asked("/v1/completions", prompt="a"), wall=0.0)
    assert isinstance(verdict, Again) and "gave up its answer" in verdict.why


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (r"\ud83d\ude00 \uD83D\uDE00", "\U0001f600 \U0001f600"),
        (r"a\ud83d", "a\ufffd"),
        (r"\ude00\ud83d", "\ufffd\ufffd"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"\\ud83d", r"\ud83d"),
        (r"\\\ud83d", "\\\ufffd"),
        (r"\n\\\"\ud83d\"", '\n\\"\ufffd"'),
    ],
)
def test_an_answer_that_any_client_reads_is_read(said: str, heard: str) -> None:
    body = b'\xef\xbb\xbf{"choices": [{"index": 0, "text": "%b"}]}' % said.encode()
    outcome = Answered(200, body)
    verdict = judge(outcome, asked("/v1/completions", prompt="a"), wall=0.0)
    assert isinstance(verdict, Accept) and verdict.answer.choices[0].text == heard
    line = json.loads(answered(ROW, 200, outcome.body, ""))
    assert line["response"]["body"]["choices"][0]["text"] == heard


def test_a_page_is_known_with_a_question_behind_it_too() -> None:
    url = "/openai/deployments/tiny/chat/completions?api-version=2026-06-01"
    assert isinstance(judge(Answered(200, b"{}"), asked(url, messages=[]), wall=0.0), Again)
    url = "/openai/deployments/tiny/embeddings/?api-version=2026-06-01"
    row = asked(url, input=["a", "b"])
    assert row.answers == 2
    assert isinstance(judge(Answered(200, placed([0], "data")), row, wall=0.0), Again)


@pytest.mark.parametrize(
    ("status", "kind"), [("failed", Again), ("cancelled", Again), ("completed", Accept), (7, Accept)]
)
def test_a_response_that_its_server_has_given_up_is_none(status: Any, kind: type) -> None:
    body = json.dumps({"id": "resp_1", "status": status, "error": None, "output": []}).encode()
    assert isinstance(judge(Answered(200, body), asked("/v1/responses", input="a"), wall=0.0), kind)


def test_columns_have_parts_by_their_places_and_not_as_they_come() -> None:
    body = {"choices": [{"index": 1, "text": "second"}, {"index": 0, "text": "first"}]}
    row = RowResult({}, body)
    assert (RESULTS["answer"][1](row), RESULTS["answers"][1](row)) == ("first", ["first", "second"])
    data = [{"index": 1, "embedding": [1.0]}, {"index": 0, "embedding": [0.0]}]
    assert RESULTS["embedding"][1](RowResult({}, {"data": data})) == [0.0]


# --- over HTTP ---------------------------------------------------------------------------------------------------

Handler = Callable[[bytes, dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


def answer(prompt: str, name: str = "chatcmpl-1") -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": prompt}, "finish_reason": "stop"}
    body = json.dumps({"id": name, "model": "m", "choices": [choice]}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


@asynccontextmanager
async def server(handle: Handler) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: (\d+)", head)
                body = json.loads(await reader.readexactly(int(length[1]))) if length else {}
                await handle(head, body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    started = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{started.sockets[0].getsockname()[1]}"
    finally:
        started.close()


def row_of(number: int) -> BatchRow:
    return BatchRow(number, f"id-{number}", CHAT, json.dumps({"prompt": f"row {number}"}).encode(), 1)


def said(outcome: Answered | Unanswered) -> str:
    assert isinstance(outcome, Answered), outcome
    return str(json.loads(outcome.body)["choices"][0]["message"]["content"])


async def test_what_a_server_says_unasked_is_not_the_answer_to_the_next_row() -> None:
    unasked = asyncio.Event()

    async def handle(head: bytes, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(answer(body["prompt"]))

        async def again() -> None:
            await unasked.wait()
            writer.write(answer(body["prompt"]))
            await writer.drain()

        later.append(asyncio.ensure_future(again()))

    later: list[asyncio.Future[None]] = []
    async with server(handle) as url, HttpSender.open(timeout=60.0) as sender:
        assert said(await sender.send(url, row_of(0))) == "row 0"
        unasked.set()
        await asyncio.gather(*later)
        # The client reads what has come in some turn of the loop: both ends are of this one.
        for _ in range(100):
            await asyncio.sleep(0.001)
        assert said(await sender.send(url, row_of(1))) == "row 1"


async def test_an_answer_that_names_another_request_is_not_taken() -> None:
    names: list[str] = []

    async def handle(head: bytes, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        found = re.search(rb"(?i)x-request-id: (\S+)", head)
        assert found is not None
        names.append(found[1].decode())
        writer.write(answer(body["prompt"], f"chatcmpl-{names[-1] if len(names) != 2 else names[0]}"))

    async with server(handle) as url, HttpSender.open(timeout=60.0) as sender:
        assert said(await sender.send(url, row_of(0))) == "row 0"
        outcome = await sender.send(url, row_of(1))
        assert isinstance(outcome, Unanswered) and outcome.strayed
        verdict = judge(outcome, row_of(1), wall=0.0)
        assert isinstance(verdict, Again) and verdict.fault is Fault.WORKER and not verdict.lost
        assert said(await sender.send(url, row_of(1))) == "row 1"
        assert len(set(names)) == 3, "a name is of one attempt"


async def test_headers_that_are_no_text_spoil_no_answer() -> None:
    async def handle(head: bytes, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        named = b"\r\nX-Request-Id: \xff\xfe\r\nRetry-After: \xff\r\nContent-Length"
        writer.write(answer(body["prompt"]).replace(b"\r\nContent-Length", named, 1))

    async with server(handle) as url, HttpSender.open(timeout=60.0) as sender:
        for number in range(2):
            outcome = await sender.send(url, row_of(number))
            assert said(outcome) == f"row {number}"
            assert isinstance(outcome, Answered) and outcome.request_id == "\ufffd\ufffd"
            json.loads(answered(row_of(number), 200, outcome.body, outcome.request_id))


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_without_end_is_none(monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    monkeypatch.setattr(sending, "_MOST_BYTES", 1 << 20)
    kind = b"text/event-stream" if streams else b"application/json"

    async def handle(head: bytes, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: " + kind + b"\r\nConnection: close\r\n\r\n")
        while True:
            writer.write((b": nothing yet " + b"." * 1000 + b"\n") * 64)
            await writer.drain()

    async with server(handle) as url, HttpSender.open(timeout=60.0) as sender:
        outcome = await sender.send(url, replace(row_of(0), streams=streams))
        assert isinstance(outcome, Unanswered) and "as its answer" in outcome.why


ERROR = b'{"error": {"message": "wrong", "code": 400}}'
REFUSAL = b"HTTP/1.1 400 X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(ERROR), ERROR)


async def test_a_connection_that_answered_as_to_another_row_is_used_no_more() -> None:
    """On such a connection each row would be given what belongs to the row before, which may not say whose it is."""
    late: dict[asyncio.StreamWriter, bytes] = {}

    async def handle(head: bytes, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        found = re.search(rb"(?i)x-request-id: (\S+)-", head)
        assert found is not None
        mine = answer(body["prompt"])
        if body["prompt"] == "row 1":  # the second answer to row 0; its own, without a name, is still to come
            mine, late[writer] = answer("row 0", f"chatcmpl-{found[1].decode()}-0"), mine
        writer.write(mine if body["prompt"] == "row 1" else late.get(writer, mine))

    async with server(handle) as url, HttpSender.open(timeout=60.0) as sender:
        assert said(await sender.send(url, row_of(0))) == "row 0"
        outcome = await sender.send(url, row_of(1))
        assert isinstance(outcome, Unanswered) and outcome.strayed and late
        assert said(await sender.send(url, row_of(2))) == "row 2"


@pytest.mark.parametrize("status", [b"400", b"200"])
async def test_a_refusal_is_believed_on_a_connection_that_had_no_answer_before(status: bytes) -> None:
    """A refusal that comes twice, the second time when the next row has been sent, is not that row's."""
    refusal = REFUSAL.replace(b"400", status, 1)
    refused: list[asyncio.StreamWriter] = []
    heard: list[str] = []

    async def handle(head: bytes, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        heard.append(body["prompt"])
        if body["prompt"] == "row 1":
            refused.append(writer)
            writer.write(refusal)
        else:
            writer.write((refusal if writer in refused else b"") + answer(body["prompt"]))

    async with server(handle) as url, HttpSender.open(timeout=60.0) as sender:
        first = await sender.send(url, row_of(1))
        assert isinstance(first, Answered) and isinstance(judge(first, row_of(1), wall=0.0), Doubtful)
        assert heard == ["row 1"], "nothing came on that connection before: the row is not sent again"
        assert said(await sender.send(url, row_of(2))) == "row 2"
        assert heard == ["row 1", "row 2", "row 2"]
        again = await sender.send(url, row_of(1))
        assert isinstance(again, Answered) and isinstance(judge(again, row_of(1), wall=0.0), Doubtful)


async def test_a_row_whose_refusal_is_asked_for_again_may_be_answered_as_to_another_then_too() -> None:
    names: list[str] = []

    async def handle(head: bytes, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        found = re.search(rb"(?i)x-request-id: (\S+)", head)
        assert found is not None
        names.append(found[1].decode())
        writer.write(REFUSAL if len(names) == 2 else answer("row 0", f"chatcmpl-{names[0]}"))

    async with server(handle) as url, HttpSender.open(timeout=60.0) as sender:
        assert said(await sender.send(url, row_of(0))) == "row 0"
        outcome = await sender.send(url, row_of(1))
        assert isinstance(outcome, Unanswered) and outcome.strayed and len(names) == 3


# --- streams, lists of models, columns ---------------------------------------------------------------------------

EVENTS: list[Any] = [
    {"choices": 5},
    {"choices": [3]},
    {"choices": [{"index": []}]},
    {"choices": [{"index": 0, "delta": [1]}]},
    {"choices": [{"index": 0, "message": 3, "delta": {"content": "x"}}]},
    {"choices": [{"index": 0, "message": {}, "delta": {}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": 3}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": []}]}}]},
]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("chat", [True, False])
def test_an_event_of_a_strange_shape_is_not_understood_or_passed_on(event: Any, *, chat: bool) -> None:
    text = StreamedText(chat=chat)
    with suppress(msgspec.DecodeError):  # `sending` calls that no answer
        text.take(json.dumps(event).encode())
        text.take(json.dumps(event).encode())
    json.loads(text.body())


async def test_a_stream_and_a_list_of_models_may_be_as_deep_as_they_like() -> None:
    async def handle(head: bytes, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        kind = b"application/json" if head.startswith(b"GET") else b"text/event-stream"
        told = b'data: {"choices": ' + DEEP + b"}\n\n" if body else b'{"data": ' + DEEP + b"}"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, len(told)) + told)

    async with server(handle) as url, HttpSender.open(timeout=60.0) as sender:
        found = await sender.probe(url)
        assert (found.why, found.models) == ("", frozenset())
        outcome = await sender.send(url, replace(row_of(0), streams=True))
        assert isinstance(outcome, Unanswered) and "an event that is not understood" in outcome.why


def test_an_answer_with_fields_of_strange_shapes_does_not_keep_a_table_from_being_written(tmp_path: Path) -> None:
    usage = {"prompt_tokens": True, "completion_tokens": 10**30, "prompt_tokens_details": 3}
    packed = base64.b64encode(struct.pack("<2f", 0.5, -2.0)).decode()
    bodies: list[dict[str, Any]] = [
        {"model": 7, "usage": usage, "choices": [{"message": {"content": ["x"], "tool_calls": 3}}]},
        {"data": [{"embedding": [[0.5]]}]},
        {"data": [{"embedding": "no base64"}]},
        {"data": [{"embedding": packed}]},
    ]
    results = [(at, answered(ROW, 200, json.dumps(body).encode(), "")) for at, body in enumerate(bodies)]
    place = tmp_path / "out.parquet"
    Output(str(place), RowLines("in.jsonl"), ",".join(RESULTS)).write(results, OutputCount().take)
    found = parquet.read_table(place).to_pylist()
    assert [row["embedding"] for row in found] == [None, None, None, [0.5, -2.0]]
    assert (found[0]["model"], found[0]["prompt_tokens"], found[0]["completion_tokens"]) == (None, None, None)
    assert json.loads(found[0]["response"])["body"] == bodies[0]
