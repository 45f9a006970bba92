"""Data as people have it becomes rows, and results become tables."""

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pytest
from pyarrow import feather, parquet

from regrow.core.errors import UsageError
from regrow_batch.rows import BadRow, BatchRow, RowReading, answered, failed
from regrow_batch.scanning import Feed, scan
from regrow_batch.tables.inputs import RowLines, RowRecords, RowSource, source_of
from regrow_batch.tables.making import CHAT, COMPLETIONS, EMBEDDINGS, RowMaking, read_template
from regrow_batch.tables.outputs import Output

RECORDS = [
    {"question": "Why?", "level": 3},
    {"question": "How\nso?", "level": 4},
    {"question": "When, then?", "level": 5},
]


def as_lines(path: Path) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in RECORDS))
    return path


def gzipped(path: Path) -> Path:
    with gzip.open(path, "wt") as stream:
        stream.writelines(json.dumps(each) + "\n" for each in RECORDS)
    return path


def separated(path: Path) -> Path:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["question", "level"])
        writer.writeheader()
        writer.writerows(RECORDS)
    return path


def as_parquet(path: Path) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path, row_group_size=2)
    return path


def as_arrow(path: Path) -> Path:
    feather.write_feather(pyarrow.Table.from_pylist(RECORDS), str(path))
    return path


def as_stream(path: Path) -> Path:
    table = pyarrow.Table.from_pylist(RECORDS)
    with pyarrow.OSFile(str(path), "wb") as out, pyarrow.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return path


def folder(path: Path) -> Path:
    """RowRecords of two files, in the order of their names."""
    path.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS[:2]), path / "a.parquet")
    (path / "b.jsonl").write_text(json.dumps(RECORDS[2]) + "\n")
    (path / "README.md").write_text("not data")
    return path


def saved_data_set(path: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(RECORDS).save_to_disk(str(path))
    return path


FORMS: dict[str, Callable[[Path], Path]] = {
    "in.jsonl": as_lines,
    "in.jsonl.gz": gzipped,
    "in.csv": separated,
    "in.parquet": as_parquet,
    "in.feather": as_arrow,
    "in.arrow": as_stream,
    "folder": folder,
    "data set": saved_data_set,
}


def rows_of(source: RowSource) -> list[BatchRow | BadRow]:
    feed, rows = Feed(scan(source), RowReading()), list[BatchRow | BadRow]()
    while found := feed.read():
        rows += found
    feed.close()
    return rows


@pytest.mark.parametrize("name", FORMS)
def test_a_column_of_prompts_becomes_chats_whatever_the_file_is(tmp_path: Path, name: str) -> None:
    source = source_of(str(FORMS[name](tmp_path / name)), RowMaking(prompt="question"))
    rows = [row for row in rows_of(source) if isinstance(row, BatchRow)]
    assert [row.custom_id for row in rows] == ["row-0", "row-1", "row-2"], "names are made where there are none"
    assert [row.url for row in rows] == [CHAT] * 3
    assert [json.loads(row.body) for row in rows] == [
        {"messages": [{"role": "user", "content": each["question"]}]} for each in RECORDS
    ]


def test_the_same_records_are_the_same_job_and_another_making_is_another() -> None:
    def of(**words: Any) -> RowRecords:
        return RowRecords("x", RowMaking(**words), lambda: RECORDS)

    first, again, other = (
        scan(of(prompt="question")),
        scan(of(prompt="question")),
        scan(of(template={"prompt": "{level}"})),
    )
    assert (first.digest, first.size) == (again.digest, again.size) != (other.digest, other.size)
    assert of(prompt="question").description() == {"--prompt-column": "question"}


@pytest.mark.parametrize(
    ("making", "body"),
    [
        (RowMaking(prompt="q", url=COMPLETIONS), {"prompt": "a"}),
        (RowMaking(prompt="q", url=EMBEDDINGS), {"input": "a"}),
        (RowMaking(messages="m"), {"messages": [{"role": "user", "content": "b"}]}),
        (RowMaking(messages="text"), {"messages": [{"role": "user", "content": "c"}]}),
        (
            RowMaking(template={"messages": [{"role": "user", "content": "Say {q}, {{so}} {n}"}], "max_tokens": "{n}"}),
            {"messages": [{"role": "user", "content": "Say a, {so} 7"}], "max_tokens": 7},
        ),
        (RowMaking(template=read_template("Say {q}\n")), {"messages": [{"role": "user", "content": "Say a"}]}),
    ],
)
def test_a_body_is_made_of_columns_or_of_a_template(making: RowMaking, body: Any) -> None:
    record = {
        "q": "a",
        "n": 7,
        "m": [{"role": "user", "content": "b", "name": None}],
        "text": '[{"role": "user", "content": "c"}]',
        "id": "its name",
    }
    (row,) = rows_of(RowRecords("x", making, lambda: [record]))
    assert isinstance(row, BatchRow)
    assert (row.custom_id, json.loads(row.body)) == ("its name", body)


def test_a_record_without_a_prompt_becomes_an_error_row_that_says_so_and_one_without_a_name_is_left_out() -> None:
    records: list[dict[str, Any]] = [
        {"id": "a", "q": None},
        {"id": None, "q": "x"},
        {"id": "c", "q": "y"},
        {"id": "c", "q": "z"},
    ]
    source = RowRecords("in.parquet", RowMaking(prompt="q"), lambda: records)
    found = scan(source)
    assert found.complaints == [
        "in.parquet, record 2: has nothing in the column 'id', which names the rows",
        "in.parquet, record 4: repeats the custom_id 'c' of record 3, which counts",
    ]
    bad, good = rows_of(source)
    assert isinstance(bad, BadRow) and isinstance(good, BatchRow)
    assert bad.message == "in.parquet, record 1: has nothing in the column 'q'"


def test_a_table_whose_columns_do_not_say_what_is_asked_is_refused_with_their_names(tmp_path: Path) -> None:
    place = str(as_parquet(tmp_path / "in.parquet"))
    with pytest.raises(UsageError, match=r"which of the columns question, level has the prompts.*--prompt-column"):
        source_of(place, RowMaking())
    with pytest.raises(UsageError, match=r"no column 'prompt'.*it has question, level"):
        source_of(place, RowMaking(template={"prompt": "{prompt}"}))
    with pytest.raises(UsageError, match=r"cannot be read as Parquet"):
        source_of(str(as_lines(tmp_path / "wrong.parquet")), RowMaking(prompt="question"))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzipped(tmp_path / "whole.jsonl.gz").read_bytes()[:-12])
    with pytest.raises(UsageError, match="cannot be unpacked"):
        scan(source_of(str(cut), RowMaking()))


def test_a_line_with_more_fields_than_its_table_has_columns_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("question,level\n1 + 1?,1\n1, or 2?,2\n")
    with pytest.raises(UsageError, match=r"in.csv has more fields in line 3 than its header has names \(2\)"):
        rows_of(source_of(str(path), RowMaking(prompt="question")))


def test_a_table_with_a_column_of_the_usual_name_needs_no_words(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a", "id": 7}]), tmp_path / "in.parquet")
    source = source_of(str(tmp_path / "in.parquet"), RowMaking())
    assert isinstance(source, RowRecords) and source.making.prompt == "prompt"
    assert [row.custom_id for row in rows_of(source)] == ["7"]


# --- results -----------------------------------------------------------------------------------------------------

BODY = {
    "id": "x",
    "choices": [
        {"message": {"content": "an answer", "reasoning": "a thought"}, "finish_reason": "stop"},
        {"message": {"content": "another"}, "finish_reason": "length"},
    ],
    "usage": {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
}


def results() -> list[tuple[int, bytes]]:
    rows = [BatchRow(number, f"row-{number}", CHAT, b"", 0) for number in range(3)]
    body = msgspec.json.encode(BODY)
    return [
        (0, answered(rows[0], 200, body, "")),
        (1, failed(BadRow(1, "row-1", ""), "gave_up", "nobody answers", "pool")),
        (2, answered(rows[2], 200, body, "")),
    ]


@pytest.mark.parametrize("name", [name for name in FORMS if name != "data set"])
def test_results_become_parquet_beside_the_columns_of_the_input(tmp_path: Path, name: str) -> None:
    source = source_of(str(FORMS[name](tmp_path / name)), RowMaking(prompt="question"))
    place, taken = tmp_path / "out.parquet", list[bytes]()
    assert Output(str(place), source).write(results(), taken.append) == len(taken) == 3
    table = parquet.read_table(place)
    level = "string" if name == "in.csv" else "int64"
    assert [str(field.type) for field in table.schema][:2] == ["string", level]
    assert table.column_names == [
        *RECORDS[0], "custom_id", "answer", "finish_reason", "error", "prompt_tokens", "completion_tokens",
    ]  # fmt: skip
    found = table.to_pylist()
    assert [row["question"] for row in found] == [each["question"] for each in RECORDS]
    assert [row["answer"] for row in found] == ["an answer", None, "an answer"]
    assert [row["error"] for row in found] == [None, "gave_up: nobody answers", None]


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ([None], ["b"], [None, "b", None]),
        ([1], [2.5], [1.0, 2.5, None]),
        ([1], ["b"], ["1", '"b"', None]),
    ],
)
def test_files_of_a_folder_whose_columns_differ_become_one_table(
    tmp_path: Path, first: list[Any], second: list[Any], found: list[Any]
) -> None:
    folder, place = tmp_path / "in", tmp_path / "out.parquet"
    folder.mkdir()
    for name, values in (("a", first), ("b", second)):
        parquet.write_table(pyarrow.table({"question": ["Why?"], "more": values}), folder / f"{name}.parquet")
    parquet.write_table(pyarrow.table({"question": ["Why?"], "most": [7]}), folder / "c.parquet")
    Output(str(place), source_of(str(folder), RowMaking(prompt="question"))).write(results(), lambda _: None)
    table = parquet.read_table(place)
    assert (table.column("more").to_pylist(), table.column("most").to_pylist()) == (found, [None, None, 7])


def test_columns_of_arrow_keep_their_types_where_parquet_has_them(tmp_path: Path) -> None:
    columns = {
        "question": pyarrow.array(["Why?"] * 3),
        "bytes": pyarrow.array([b"\xff", None, b""]),
        "when": pyarrow.array([1, None, 2], pyarrow.timestamp("us")),
        "nothing": pyarrow.array([None] * 3),
    }
    table, place = pyarrow.table(columns), tmp_path / "out.parquet"
    for write in (feather.write_feather, lambda table, path: parquet.write_table(table, path)):
        path = tmp_path / ("in.arrow" if write is feather.write_feather else "in.parquet")
        write(table, str(path))
        Output(str(place), source_of(str(path), RowMaking(prompt="question"))).write(results(), lambda _: None)
        found = parquet.read_table(place).select([*columns])
        assert (found.schema.types, found.to_pylist()) == (table.schema.types, table.to_pylist())
    runs = pyarrow.RunEndEncodedArray.from_arrays([2, 3], ["a", "b"])
    feather.write_feather(table.append_column("runs", runs), str(tmp_path / "in.arrow"), compression="uncompressed")
    source = source_of(str(tmp_path / "in.arrow"), RowMaking(prompt="question"))
    Output(str(place), source).write(results(), lambda _: None)
    found = parquet.read_table(place)
    assert found.column("runs").to_pylist() == ["a", "a", "b"] and found.column("nothing").to_pylist() == [None] * 3


def test_columns_are_chosen_and_named(tmp_path: Path) -> None:
    source = source_of(str(as_parquet(tmp_path / "in.parquet")), RowMaking(prompt="question"))
    place = tmp_path / "out.jsonl.gz"
    words = "custom_id,text=answer,answers,thought=reasoning,cached_tokens,level"
    Output(str(place), source, words).write(results(), lambda _: None)
    with gzip.open(place) as stream:
        first = json.loads(stream.readline())
    assert first == {
        "custom_id": "row-0", "text": "an answer", "answers": ["an answer", "another"], "thought": "a thought",
        "cached_tokens": 4, "level": 3,
    }  # fmt: skip
    for wrong, said in (("custom_id,nothing", "no column 'nothing'"), ("error,error", "'error' twice")):
        with pytest.raises(UsageError, match=said):
            Output(str(place), source, wrong)


def test_a_column_of_the_input_is_not_replaced_in_silence(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a", "answer": "b"}]), tmp_path / "in.parquet")
    source = source_of(str(tmp_path / "in.parquet"), RowMaking())
    with pytest.raises(UsageError, match="has a column 'answer', and so would the results"):
        Output(str(tmp_path / "out.parquet"), source)
    Output(str(tmp_path / "out.parquet"), source, "input.answer,mine=answer").write(results()[:1], lambda _: None)
    assert parquet.read_table(tmp_path / "out.parquet").to_pylist() == [{"answer": "b", "mine": "an answer"}]


def test_without_columns_lines_are_as_they_were(tmp_path: Path) -> None:
    place = tmp_path / "out.jsonl"
    Output(str(place), RowLines("in.jsonl")).write(results(), lambda _: None)
    assert place.read_bytes() == b"".join(line + b"\n" for _, line in results())
