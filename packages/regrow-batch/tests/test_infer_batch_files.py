"""Files as people and programs hand them over: none is taken for another, none is believed where it is damaged."""

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import parquet

from regrow.core.errors import UsageError
from regrow_batch import Calls, arun
from regrow_batch.functions import running
from regrow_batch.job import BatchOptions, end_batch, fingerprint, journal_path, run_batch
from regrow_batch.journal import Journal
from regrow_batch.places import BatchStopped, open_to_read, open_to_write
from regrow_batch.report import OutputCount
from regrow_batch.retries import Again, Answered, judge
from regrow_batch.rows import BatchRow, RowReading, answered
from regrow_batch.scanning import scan
from regrow_batch.tables.columns import RESULTS
from regrow_batch.tables.inputs import RowLines, source_of
from regrow_batch.tables.making import RowMaking
from regrow_batch.tables.outputs import Output
from regrow_batch.tally import Tally

ROW = BatchRow(0, "a", "/v1/chat/completions", b"{}", 1, model="m")
LINE = json.dumps({"custom_id": "a", "url": ROW.url, "body": {"messages": []}})


def unused(*_: Any) -> Any:
    raise AssertionError("it must end before anything is shown")


@pytest.mark.parametrize(
    ("output", "journal"),
    [
        ("out.jsonl", "out.jsonl"),
        ("out.jsonl", "./link/out.jsonl"),
        ("out.jsonl", "out.jsonl.partial"),
        ("out.jsonl", "out.jsonl.control"),
        ("out.summary.json", "out.x"),
        ("out.jsonl", "in.jsonl"),
        ("in.jsonl", ""),
        ("out.jsonl", "in.x"),
    ],
)
def test_no_file_of_a_batch_is_written_over_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, journal: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to(".")
    name = "in.summary.json" if journal == "in.x" else "in.jsonl"
    Path(name).write_text(LINE)
    options = BatchOptions(name, output, RowReading(), tmp_path / "state", journal=journal)
    with pytest.raises(UsageError, match="is needed twice"):
        run_batch(options, unused)
    assert {each.name for each in tmp_path.iterdir()} == {name, "link"}
    if name == "in.jsonl" and "in" not in output + journal:
        with pytest.raises(UsageError, match="is needed twice"):
            running.run([{"custom_id": "a"}], unused, output=output, journal=journal, workers=["http://h:1"])


@pytest.mark.parametrize("making", [RowMaking(), RowMaking(prompt="prompt")])
def test_a_pipe_is_refused_at_once_as_it_cannot_be_read_again(tmp_path: Path, making: RowMaking) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is no file, and is read more than once"):
        scan(source_of(str(tmp_path / "pipe"), making))


@pytest.mark.parametrize(
    ("name", "making"),
    [
        ("in.jsonl.gz", RowMaking()),
        ("in.jsonl.gz", RowMaking(prompt="prompt")),
        ("in.csv.gz", RowMaking(prompt="prompt")),
    ],
)
@pytest.mark.parametrize("harm", ["cut", "changed", "no gzip"])
def test_a_damaged_gzipped_input_is_the_users_to_mend(tmp_path: Path, name: str, making: RowMaking, harm: str) -> None:
    lines = [f"question {number}" for number in range(2000)]
    if "csv" not in name:
        lines = [json.dumps({"custom_id": line, "prompt": line}) for line in lines]
    text = "\n".join(["prompt", *lines] if "csv" in name else lines)
    packed = bytearray(gzip.compress(text.encode()))
    if harm == "cut":
        del packed[-100:]
    elif harm == "changed":
        packed[len(packed) // 2 : len(packed) // 2 + 40] = b"\xff" * 40
    else:
        packed = bytearray(text.encode())
    (tmp_path / name).write_bytes(packed)
    with pytest.raises(UsageError, match=f"{name} cannot be unpacked"):
        scan(source_of(str(tmp_path / name), making))


def test_half_a_character_is_told_before_anything_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    making = RowMaking(prompt="prompt")
    path.write_text('{"prompt": "a", "more": "\\ud83d\\ude00"}\n')
    assert scan(source_of(str(path), making)).rows == 1
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "more": "\\ud83d"}\n')
    with pytest.raises(UsageError, match="line 2: is not JSON: .*surrogates"):
        scan(source_of(str(path), making))


def test_a_wait_that_no_calendar_has_is_none() -> None:
    header = "Mon, 01 Jan 99999999999999999999 00:00:00 GMT"
    verdict = judge(Answered(429, b"", retry_after=header), ROW, wall=0.0)
    assert isinstance(verdict, Again) and verdict.asked == 0.0


@pytest.mark.parametrize("took", [b"1e999", b"9" * 5000], ids=["large", "long"])
def test_a_number_beyond_all_bounds_does_not_keep_a_table_from_being_written(tmp_path: Path, took: bytes) -> None:
    body = b'{"took": %b, "choices": [{"index": 0, "message": {"content": "yes"}, "finish_reason": "stop"}]}' % took
    place = tmp_path / "out.parquet"
    results = [(0, answered(ROW, 200, body, ""))]
    Output(str(place), RowLines("in.jsonl"), ",".join(RESULTS)).write(results, OutputCount().take)
    assert parquet.read_table(place).to_pylist()[0]["answer"] == "yes"


@pytest.mark.parametrize("then", ["others", "more"])
async def test_a_table_that_changes_while_a_function_answers_it_stops_the_batch(tmp_path: Path, then: str) -> None:
    place, more = tmp_path / "in.jsonl", "x" * 2000
    lines = [json.dumps({"id": f"{number:04}", "more": more}) + "\n" for number in range(1500)]
    place.write_text("".join(lines))

    async def answer(calls: Calls, row: Any) -> str:
        if row["id"] == "0000":
            # In place, as an editor may do it: who has the file open reads on in the new text.
            place.write_text("".join([*lines, lines[0]] if then == "more" else lines[::-1]))
        return str(row["id"])

    said = "has grown while it was read" if then == "more" else "was changed while it was read, at record"
    with pytest.raises(BatchStopped, match=said):
        await arun(place, answer, output=str(tmp_path / "out.jsonl"), workers=["http://127.0.0.1:9"])
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("then", ["cut", "empty", "of another"])
@pytest.mark.parametrize("again", [(), ("every",)])
def test_an_output_that_is_not_as_it_was_written_is_not_called_done(
    tmp_path: Path, then: str, again: tuple[str, ...]
) -> None:
    (tmp_path / "in.jsonl").write_text(LINE)
    place = tmp_path / "out.jsonl"
    options = BatchOptions(str(tmp_path / "in.jsonl"), str(place), RowReading(), tmp_path / "state", again=again)
    found = scan(options.input)
    journal = Journal.open(journal_path(options.output, options.state), fingerprint(found, options.reading))
    journal.append(0, answered(ROW, 200, b'{"choices": []}', ""))
    journal.flush()
    end_batch(options, Output(options.output, found.source), found, journal, Tally(1), [])
    journal.close()

    told: list[str] = []
    show: Any = lambda *_: SimpleNamespace(say=told.append)  # noqa: E731
    assert run_batch(options, show) == 0
    assert told == [f"1 rows are in {place} already"]
    whole = place.read_bytes()
    place.write_bytes({"cut": whole[:-9], "empty": b"", "of another": whole.replace(b'"a"', b'"b of another"')}[then])
    with pytest.raises(UsageError, match=f"bytes, and had {len(whole)} when it was written"):
        run_batch(options, show)
    place.write_bytes(whole)
    assert run_batch(options, show) == 0


@pytest.mark.parametrize("before", [None, b"of an earlier run"])
def test_an_output_that_another_batch_has_written_meanwhile_is_left_alone(tmp_path: Path, before: bytes | None) -> None:
    place = tmp_path / "out.jsonl"
    if before is not None:
        place.write_bytes(before)
    mine, others = (Output(str(place), RowLines("in.jsonl")) for _ in range(2))
    assert others.write([(0, b"{}")], lambda _: None) == 1
    with pytest.raises(UsageError, match="was written by another since this batch began"):
        mine.write([(0, b"{}")], lambda _: None)
    assert place.read_bytes() == b"{}\n"


def test_of_two_that_write_an_output_at_once_one_is_told_and_spoils_nothing(tmp_path: Path) -> None:
    place = tmp_path / "out.jsonl"
    with open_to_write(str(place)) as stream:
        stream.write(b"whole\n")
        stream.flush()
        with pytest.raises(BatchStopped, match="is being written by another process"), open_to_write(str(place)):
            pass
    assert place.read_bytes() == b"whole\n"
    (tmp_path / "out.jsonl.partial").write_bytes(b"what a killed process has left, longer than what follows")
    with open_to_write(str(place)) as stream:
        stream.write(b"next\n")
    assert place.read_bytes() == b"next\n" and [*tmp_path.iterdir()] == [place]


def test_an_output_that_is_a_link_is_written_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    place = tmp_path / "out.jsonl"
    place.symlink_to("large/out.jsonl")
    with open_to_write(str(place)) as stream:
        assert {each.name for each in (tmp_path / "large").iterdir()} == {"out.jsonl.partial"}
        stream.write(b"whole")
    assert place.is_symlink() and (tmp_path / "large" / "out.jsonl").read_bytes() == b"whole"


def test_two_columns_of_a_name_are_told_as_only_one_would_be_kept(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("prompt,more,more\na,b,c\n")
    with pytest.raises(UsageError, match="has two columns 'more'"):
        source_of(str(tmp_path / "in.csv"), RowMaking(prompt="prompt"))


def test_commas_that_a_spreadsheet_leaves_behind_a_header_are_no_columns_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("prompt,,\na,,\n")
    assert scan(source_of(str(tmp_path / "in.csv"), RowMaking(prompt="prompt"))).rows == 1


def test_a_name_that_no_file_can_have_is_told_as_such() -> None:
    with pytest.raises(UsageError, match="cannot be read: File name too long"):
        open_to_read("a" * 300)


def test_an_output_that_its_owner_has_removed_meanwhile_is_written(tmp_path: Path) -> None:
    place = tmp_path / "out.jsonl"
    place.write_bytes(b"of an earlier run")
    output = Output(str(place), RowLines("in.jsonl"))
    place.unlink()
    assert output.write([(0, b"{}")], lambda _: None) == 1
    assert place.read_bytes() == b"{}\n"


def test_an_output_is_locked_until_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that opens it between would cut off what is whole."""
    place, rename = tmp_path / "out.jsonl", Path.replace

    def replace(partial: Path, path: Path) -> Path:
        with pytest.raises(BatchStopped, match="is being written by another process"), open_to_write(str(place)):
            pass
        return rename(partial, path)

    monkeypatch.setattr(Path, "replace", replace)
    with open_to_write(str(place)) as stream:
        stream.write(b"whole")
    assert place.read_bytes() == b"whole"
