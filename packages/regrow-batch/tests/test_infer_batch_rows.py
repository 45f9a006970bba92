"""Rows are read as OpenAI's batch format has them, and what becomes of one is a line of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from regrow.core.errors import UsageError
from regrow_batch.circles import circles, pieces
from regrow_batch.members import address, read_list, read_workers
from regrow_batch.retries import Accept, Again, Answered, Doubtful, Fault, RetryPolicy, Unanswered, judge
from regrow_batch.rows import BadRow, BatchRow, RowReading, answered, failed, name_of, read_row, refused
from regrow_batch.scanning import Feed, scan
from regrow_batch.streams import StreamedText

PLAIN = RowReading()
ROW = BatchRow(3, "r-3", "/v1/chat/completions", b"{}", 10)


def line(**fields: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 50}
    return json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body} | fields).encode()


def test_a_row_is_sent_as_it_stands() -> None:
    row = read_row(line(), 5, PLAIN)
    assert isinstance(row, BatchRow)
    assert (row.number, row.custom_id, row.url, row.streams) == (5, "a", "/v1/completions", False)
    assert row.body in line()
    assert 150 <= row.tokens <= 200


def test_the_model_and_the_endpoint_can_be_others() -> None:
    row = read_row(line(), 5, RowReading(model="other", url="/v1/chat/completions"))
    assert isinstance(row, BatchRow)
    assert (json.loads(row.body)["model"], row.url) == ("other", "/v1/chat/completions")


def test_only_plain_rows_are_streamed() -> None:
    streamed, tools = read_row(line(), 0, RowReading(ends_loops=True)), line(body={"prompt": "x", "tools": [{}]})
    assert isinstance(streamed, BatchRow)
    assert streamed.streams and json.loads(streamed.body)["stream"] is True
    other = read_row(tools, 0, RowReading(ends_loops=True))
    assert isinstance(other, BatchRow)
    assert not other.streams and "stream" not in json.loads(other.body)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"method": "GET"}, "method 'GET'"),
        ({"url": "http://elsewhere/v1"}, "is no path"),
        ({"body": 3}, "is no row of a batch"),
        ({"body": {"stream": True}}, "asks for a stream"),
        ({"body": {"max_tokens": "many"}}, "max_tokens"),
    ],
)
def test_a_row_that_cannot_be_sent_says_why(fields: dict[str, Any], said: str) -> None:
    row = read_row(line(**fields), 0, PLAIN)
    assert isinstance(row, BadRow)
    assert said in row.message
    told = json.loads(failed(row, "invalid_row", row.message, "row"))
    assert (told["custom_id"], told["response"], told["error"]["code"]) == ("a", None, "invalid_row")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"custom_id": "a', "is not JSON"),
        (b'{"custom_id": "a\xff", "body": {}}', "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b'{"custom_id": 3}', "custom_id"),
        (b'{"id": "a"}', "missing required field `custom_id`"),
        (b'{"custom_id": ""}', "empty custom_id"),
    ],
)
def test_a_line_without_a_name_is_no_row(text: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        name_of(text)


def test_a_result_is_one_line_whatever_the_answer_looks_like() -> None:
    result = answered(ROW, 200, b'{\n "a": [1,\r\n 2]\n}', "req")
    assert b"\n" not in result and b"\r" not in result
    told = json.loads(result)
    assert told["response"] == {"status_code": 200, "request_id": "req", "body": {"a": [1, 2]}}
    assert (told["custom_id"], told["error"]) == ("r-3", None)


@pytest.mark.parametrize("body", [b'{"error": "no"}', b"<html>no</html>", b""])
def test_a_refusal_keeps_what_the_worker_said(body: bytes) -> None:
    told = json.loads(refused(ROW, 422, body, fault="row"))
    assert (told["response"]["status_code"], told["error"]["code"]) == (422, "http_422")


# --- what becomes of an answer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 529])
def test_what_may_pass_is_tried_again(status: int) -> None:
    verdict = judge(Answered(status, b"", retry_after="7"), ROW, wall=0.0)
    assert isinstance(verdict, Again)
    assert (verdict.asked, verdict.fault is Fault.POOL, verdict.lost) == (7.0, status == 429, status >= 500)


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_of_a_refusal_nobody_knows_whose_fault_it_is(status: int) -> None:
    assert isinstance(judge(Answered(status, b"{}"), ROW, wall=0.0), Doubtful)


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Answered(200, b"<html>", "text/html"), "answered HTML instead of JSON"),
        (Answered(200, b'{"choices": [', "application/json"), "a torn text"),
        (Answered(200, b"[]", "application/json"), "something else"),
        (Answered(401, b"{}"), "requires a key"),
        (Answered(302, b""), "a redirect"),
        (Unanswered("cannot be reached: no"), "cannot be reached"),
    ],
)
def test_a_workers_fault_is_told_as_one(outcome: Answered | Unanswered, said: str) -> None:
    verdict = judge(outcome, ROW, wall=0.0)
    assert isinstance(verdict, Again) and said in verdict.why and verdict.fault in (Fault.WORKER, Fault.UNKNOWN)


def test_answers_of_other_endpoints_are_taken_too() -> None:
    other = BatchRow(3, "r-3", "/v1/rerank", b"{}", 10)
    assert isinstance(judge(Answered(200, b'{"choices": 7, "data": []}'), other, wall=0.0), Accept)


def test_waits_double_have_jitter_and_a_bound_and_obey_the_worker() -> None:
    policy, again = RetryPolicy(base=0.5, most=8.0), Again("failed")
    assert [policy.wait(attempt, again, 1.0) for attempt in (1, 2, 3, 9)] == [0.5, 1.0, 2.0, 8.0]
    assert policy.wait(3, again, 0.0) == 1.0
    assert policy.wait(1, Again("busy", asked=5.0), 0.0) == 5.0
    assert policy.wait(1, Again("busy", asked=float("inf")), 0.0) == 8.0
    assert [policy.wait(attempt, Again("gone", at_once=True), 1.0) for attempt in (1, 2)] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("3", 3.0), ("-1", 0.0), ("soon", 0.0), ("nan", 0.0), ("", 0.0), ("Thu, 01 Jan 1970 00:01:00 GMT", 20.0)],
)
def test_retry_after_is_a_number_or_a_date(header: str, seconds: float) -> None:
    verdict = judge(Answered(503, b"", retry_after=header), ROW, wall=40.0)
    assert isinstance(verdict, Again) and verdict.asked == seconds


# --- streams -----------------------------------------------------------------------------------------------------


def part(text: str, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}} | more
    return json.dumps({"id": "c-1", "model": "m", "created": 5, "choices": [choice]}).encode()


def test_a_stream_becomes_the_answer_it_would_have_been() -> None:
    text = StreamedText(chat=True)
    for event in (part("One "), part("two"), part("", finish_reason="stop")):
        text.take(event)
    text.take(b'{"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 1}}')
    told = json.loads(text.body())
    assert told["choices"][0]["message"] == {"role": "assistant", "content": "One two"}
    assert (told["id"], told["choices"][0]["finish_reason"], told["usage"]["completion_tokens"]) == ("c-1", "stop", 2)


def test_a_stream_that_loops_is_seen_long_before_its_end_and_one_that_does_not_is_left_alone() -> None:
    text, parts = StreamedText(chat=True), 0
    while not text.loop and parts < 5000:
        text.take(part(("round ", "and ")[parts % 2]))
        parts += 1
    assert text.loop == 2 and parts < 400
    assert json.loads(text.body())["choices"][0]["finish_reason"] == "length"
    other = StreamedText(chat=True)
    for number in range(2000):
        other.take(part(f"{number} "))
    assert other.loop == 0


def streamed(*deltas: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The choice that these parts become."""
    text = StreamedText(chat=True)
    for delta in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        text.take(json.dumps({"id": "c-1", "object": "chat.completion.chunk", "choices": [choice]}).encode())
    choice = {"index": 0, "delta": {}, "finish_reason": "stop"} | more
    text.take(json.dumps({"choices": [choice], "system_fingerprint": "v1"}).encode())
    told = json.loads(text.body())
    assert (told["object"], told["system_fingerprint"]) == ("chat.completion", "v1")
    return dict(told["choices"][0])


def test_no_field_of_a_stream_is_dropped() -> None:
    choice = streamed(
        {"role": "assistant", "content": ""},
        {"reasoning": "Let me ", "token_ids": [1, 2]},
        {"reasoning": "see.", "token_ids": [3]},
        {"reasoning_content": "So."},
        {"refusal": "I can"},
        {"refusal": "not."},
        stop_reason=7,
    )
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning": "Let me see.",
        "reasoning_content": "So.",
        "refusal": "I cannot.",
        "token_ids": [1, 2, 3],
    }
    assert (choice["stop_reason"], choice["finish_reason"]) == (7, "stop")


def test_calls_of_tools_that_are_streamed_come_out_whole() -> None:
    choice = streamed(
        {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]},
        {"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
    )
    assert choice["message"]["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]


@pytest.mark.parametrize("field", ["content", "reasoning", "reasoning_content"])
@pytest.mark.parametrize("text", [" the", "\n", "ACGT", "我们", "ไทย", " a b c,"])
def test_a_loop_is_seen_in_all_that_is_said_and_in_any_script(field: str, text: str) -> None:
    stream, parts = StreamedText(chat=True), 0
    while not stream.loop and parts < 2000:
        stream.take(json.dumps({"choices": [{"index": 0, "delta": {field: text}}]}).encode())
        parts += 1
    assert stream.loop and parts < 600
    assert circles("Well: " + text * 600) is not None


def test_a_stream_that_says_that_something_went_wrong_is_no_answer() -> None:
    text = StreamedText(chat=True)
    text.take(part("One "))
    text.take(b'{"error": {"message": "out of memory", "code": 500}}')
    assert isinstance(judge(Answered(200, text.body()), ROW, wall=0.0), Again)


def test_an_answer_that_the_limit_cut_is_looked_at_piece_by_piece() -> None:
    assert len(pieces("No, no.\n no!")) == 6
    assert circles("and so on, " * 20) == {"kind": "exact loop", "period": 4, "ended_early": 0}
    assert circles(" ".join(str(number) for number in range(400))) is None
    drifting = " ".join(f"one two three four five six seven eight {number}" for number in range(60))
    assert circles(drifting) == {"kind": "drifting loop", "period": 0, "ended_early": 0}


# --- lists of workers --------------------------------------------------------------------------------------------


def test_a_list_has_an_address_a_line_and_maybe_a_cap() -> None:
    text = "# pool\nhttp://h1:8000/\n\n https://h2:8000/v1 cap=8 # small\n"
    assert read_list(text, "pool.txt") == {"http://h1:8000": 0, "https://h2:8000": 8}
    assert read_workers("http://h1:1,http://h2:2/") == {"http://h1:1": 0, "http://h2:2": 0}


@pytest.mark.parametrize("word", ["h1:8000", "ftp://h1", "http://", "http://h1:99999999"])
def test_what_is_no_address_is_named_with_its_place(word: str) -> None:
    with pytest.raises(UsageError, match="pool.txt, line 2"):
        read_list(f"http://ok:1\n{word}\n", "pool.txt")
    with pytest.raises(UsageError, match="--workers"):
        address(word, "--workers")


def test_a_word_that_is_not_understood_is_named() -> None:
    with pytest.raises(UsageError, match="line 1: 'cap=x'"):
        read_list("http://ok:1 cap=x", "pool.txt")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"temperature": NaN}', id="NaN"),
        pytest.param(b'{"prompt": "\\ud83d"}', id="half a surrogate pair"),
        pytest.param(b'{"prompt": "\xff"}', id="no UTF-8"),
        pytest.param(b'{"prompt": "a', id="cut off"),
        pytest.param(b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}", id="nested too deeply"),
    ],
)
def test_a_row_whose_name_can_be_read_has_a_line_whatever_else_is_in_it(body: bytes) -> None:
    text = b'{"custom_id": "a\\"b", "method": "POST", "url": "/v1/completions", "body": ' + body + b"}"
    assert name_of(text) == 'a"b'
    row = read_row(text, 4, PLAIN)
    assert isinstance(row, BadRow)
    assert json.loads(failed(row, "bad_row", row.message, "row"))["custom_id"] == 'a"b'


def test_numbers_may_be_written_with_a_fraction_and_the_first_line_may_begin_with_a_mark(tmp_path: Path) -> None:
    assert isinstance(read_row(line(body={"max_tokens": 100.0}), 0, PLAIN), BatchRow)
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + line() + b"\n" + line(custom_id="b"))
    found = scan(str(tmp_path / "in.jsonl"))
    assert (found.rows, found.malformed) == (2, 0)
    assert [row.custom_id for row in Feed(found, PLAIN).read()] == ["a", "b"]
