"""A journal keeps what was written whatever ends its writer, and belongs to one job."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.core.errors import UsageError
from regrow_batch.journal import Journal
from regrow_batch.places import BatchStopped, open_to_read, open_to_write
from regrow_batch.records import changes, decode_head, decode_row, encode_head, encode_row
from regrow_batch.rows import BadRow, BatchRow, RowReading
from regrow_batch.scanning import DONE, Feed, scan

MINE = {"the input": "9 bytes", "--model": ""}


def rows_of(path: Path) -> dict[int, bytes]:
    journal = Journal.open(path, MINE)
    try:
        return {number: result for number, _, result in journal.rows()}
    finally:
        journal.close()


def written(path: Path, rows: dict[int, bytes]) -> None:
    journal = Journal.open(path, MINE)
    for number, result in rows.items():
        journal.append(number, result)
    journal.flush()
    journal.close()


ONE_LINE = st.binary(min_size=1, max_size=80).map(lambda text: text.replace(b"\n", b""))


@given(st.integers(0, 10**9), ONE_LINE)
def test_a_row_is_read_as_it_was_written(number: int, result: bytes) -> None:
    assert decode_row(encode_row(number, result)[:-1]) == (number, result)


@given(st.integers(0, 10**6), ONE_LINE, st.data())
def test_a_row_with_any_byte_changed_or_missing_counts_as_not_written(
    number: int, result: bytes, data: st.DataObject
) -> None:
    line = encode_row(number, result)[:-1]
    at = data.draw(st.integers(0, len(line) - 1))
    assert decode_row(line[:at]) is None
    changed = line[:at] + bytes([line[at] ^ data.draw(st.integers(1, 255))]) + line[at + 1 :]
    assert decode_row(changed) is None


def test_cut_at_any_byte_it_has_all_rows_before_and_takes_more(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    written(whole, {0: b'{"a":1}', 1: b'{"b":2}'})
    content = whole.read_bytes()
    start = len(encode_head(MINE))
    first = start + len(encode_row(0, b'{"a":1}'))
    for at in range(start, len(content) + 1):
        path = tmp_path / f"cut{at}"
        path.write_bytes(content[:at])
        before = {number for number, end in ((0, first), (1, len(content))) if at >= end}
        assert set(rows_of(path)) >= {number for number in before}
        written(path, {7: b"{}"})
        assert set(rows_of(path)) >= before | {7}
        assert set(rows_of(path)) <= {0, 1, 7}


def test_a_hole_in_the_middle_costs_its_rows_alone(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, {number: b'{"row":%d}' % number for number in range(5)})
    content = path.read_bytes()
    at = content.index(b'{"row":2}')
    path.write_bytes(content[:at] + bytes(9) + content[at + 9 :])
    assert set(rows_of(path)) == {0, 1, 3, 4}


@pytest.mark.parametrize("then", ["removed", "another"])
def test_what_becomes_of_its_name_does_not_change_what_it_has(tmp_path: Path, then: str) -> None:
    path = tmp_path / "journal"
    journal = Journal.open(path, {})
    for number in range(3):
        journal.append(number, b'{"row":%d}' % number)
    journal.flush()
    path.unlink()
    if then == "another":
        other = Journal.open(path, {})
        other.append(2, b'{"much longer than before":true}')
        other.append(0, b'{"row":"of another"}')
        other.flush()
        other.close()
    assert [*journal.results(3)] == [(number, b'{"row":%d}' % number) for number in range(3)]
    journal.close()


def test_the_output_has_the_first_result_of_each_row_in_the_inputs_order(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j", MINE)
    for number, result in ((2, b"two"), (0, b"zero"), (2, b"again"), (99, b"beyond")):
        journal.append(number, result)
    journal.flush()
    assert list(journal.results(3)) == [(0, b"zero"), (2, b"two")]
    journal.end(2)
    journal.close()
    again = Journal.open(tmp_path / "j", MINE)
    assert again.head.rows == 2
    again.close()


def test_another_job_is_refused_and_told_what_differs(tmp_path: Path) -> None:
    written(tmp_path / "j", {})
    with pytest.raises(UsageError, match=r"the input was 9 bytes and is 8 bytes.*remove the journal"):
        Journal.open(tmp_path / "j", MINE | {"the input": "8 bytes"})
    with pytest.raises(UsageError, match="--model was not given and is m"):
        Journal.open(tmp_path / "j", MINE | {"--model": "m"})
    assert changes({"a": "1"}, {"a": "1", "b": ""}) == []


def test_a_journal_has_one_head_at_a_time(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j", MINE)
    with pytest.raises(UsageError, match="another regrow batch works on"):
        Journal.open(tmp_path / "j", MINE)
    journal.close()
    Journal.open(tmp_path / "j", MINE).close()


def test_one_that_another_head_takes_while_it_begins_anew_is_closed_with_that_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    mine = Journal.open(path, {"input": "abc"})
    replaced = Path.replace

    def replace_and_lose(new: Path, target: Path) -> Path:
        found = replaced(new, target)
        theirs.append(Journal.open(path, {"input": "abc"}))
        return found

    theirs: list[Journal] = []
    monkeypatch.setattr(Path, "replace", replace_and_lose)
    with pytest.raises(UsageError, match="another regrow batch works on"):
        mine.begin_anew([])
    mine.close()
    (other,) = theirs
    other.close()


def test_what_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "j").write_text("my thesis\n")
    with pytest.raises(UsageError, match="is no journal of a batch"):
        Journal.open(tmp_path / "j", MINE)
    assert (tmp_path / "j").read_text() == "my thesis\n"
    assert decode_head(b'{"regrow_batch_journal":99,"fingerprint":{}}') is None


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere/j cannot be written: No such file.*-o"):
        Journal.open(tmp_path / "nowhere" / "j", MINE)


def test_an_output_is_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def fail() -> None:
        with open_to_write(str(target)) as out:
            out.write(b"half")
            raise KeyError("later")

    with pytest.raises(KeyError):
        fail()
    assert os.listdir(tmp_path) == []
    with open_to_write(str(target)) as out:
        out.write(b"whole")
    assert target.read_bytes() == b"whole"


def test_a_url_is_read_and_written_by_fsspec() -> None:
    pytest.importorskip("fsspec")
    with open_to_write("memory://batch/out.jsonl") as out:
        out.write(b"whole")
    with open_to_read("memory://batch/out.jsonl") as stream:
        assert stream.read() == b"whole"
    with pytest.raises(UsageError, match="memory://batch/none cannot be read"):
        open_to_read("memory://batch/none")


# --- the input ---------------------------------------------------------------------------------------------------


def line(name: str, more: str = "") -> str:
    return f'{{"custom_id":"{name}","url":"/v1/completions","body":{{"prompt":"x"}}{more}}}'


def test_lines_that_are_no_rows_and_repeated_ones_are_named_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([line("a"), "", "{torn", line("b"), line("a"), '{"x":1}', line("c", ',"method":"GET"')]))
    found = scan(str(path))
    assert (found.rows, found.malformed, found.repeated) == (3, 2, 1)
    told = "\n".join(found.complaints)
    assert f"{path}, line 3: is not JSON" in told
    assert f"{path}, line 6: is no row of a batch: Object missing required field `custom_id`" in told
    assert f"{path}, line 5: repeats the custom_id 'a' of line 1" in told
    rows = Feed(found, RowReading()).read()
    assert [row.custom_id for row in rows] == ["a", "b", "c"]
    assert isinstance(rows[0], BatchRow) and isinstance(rows[2], BadRow)
    assert f"{path}, line 7: has the method 'GET'" in rows[2].message


def test_rows_that_are_done_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(line(f"r{number}") for number in range(2000)))
    found = scan(str(path))
    for number in range(0, 2000, 2):
        found.states[number] = DONE
    feed, rows = Feed(found, RowReading()), list[BatchRow | BadRow]()
    while block := feed.read():
        rows += block
    assert [row.number for row in rows] == list(range(1, 2000, 2))
    assert {row.custom_id for row in rows} == {f"r{number}" for number in range(1, 2000, 2)}


@pytest.mark.parametrize("then", [line("z"), line("b").replace("x", "y")])
def test_an_input_that_changes_while_it_is_read_stops_the_job(tmp_path: Path, then: str) -> None:
    path = tmp_path / "in.jsonl"
    assert then != line("b")
    path.write_text("\n".join([line("a"), line("b")]))
    found = scan(str(path))
    path.write_text("\n".join([line("a"), then]))
    with pytest.raises(BatchStopped, match=r"was changed while it was read, at line 2"):
        Feed(found, RowReading()).read()


@pytest.mark.parametrize(("text", "said"), [("", "has no row"), ("nonsense\n", "line 1: is not JSON")])
def test_an_input_without_a_row_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        scan(str(path))
