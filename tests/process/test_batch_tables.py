"""Tables through `regrow batch`: a Parquet file with a prompt column to a Parquet file, by one command."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet
from tests.process.batch import SetUpNotes, desk, until

from regrow.cli import main
from regrow.core.exit_codes import ERRORS_NOT_THEIRS


def run_here(made: SetUpNotes, *words: str) -> tuple[int, str]:
    """`regrow batch run words…` within this process."""
    said = io.StringIO()
    with contextlib.chdir(made.folder), contextlib.redirect_stderr(said):
        code = main(["batch", "run", *words, "--workers", ",".join(worker.url for worker in made.workers)])
    return code, said.getvalue()


def write(path: Path, prompts: list[str | None]) -> None:
    records = [{"topic": f"t{number}", "text": prompt} for number, prompt in enumerate(prompts)]
    parquet.write_table(pyarrow.Table.from_pylist(records), path)


def rows_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return found


def test_a_parquet_file_with_a_prompt_column_becomes_a_parquet_file_with_answers(tmp_path: Path) -> None:
    with desk(tmp_path) as made:
        made.worker()
        write(tmp_path / "in.parquet", ["one", None, "refuse this", "two"])
        words = ("in.parquet", "-o", "out.parquet", "--prompt-column", "text", "--model", "fake")
        code, said = run_here(made, *words)
        assert code == 0, said
        found = rows_of(tmp_path / "out.parquet")
        assert [(row["topic"], row["text"]) for row in found] == [
            ("t0", "one"), ("t1", None), ("t2", "refuse this"), ("t3", "two"),
        ]  # fmt: skip
        assert [row["answer"] for row in found] == ["one", None, None, "two"]
        assert "has nothing in the column 'text'" in found[1]["error"]
        assert "http_400" in found[2]["error"]
        assert [row["completion_tokens"] for row in found] == [8, None, None, 8]
        assert "4 rows are in out.parquet already" in run_here(made, *words)[1]
        code, said = run_here(made, *words, "--id-column", "topic")
        assert code == 2 and "--id-column was not given and is topic" in said


def test_the_error_rows_of_a_parquet_file_are_sent_again_by_a_second_command(tmp_path: Path) -> None:
    with desk(tmp_path) as made:
        bad = made.worker("--faults", "1", "--how", "500")
        write(tmp_path / "in.parquet", ["one", "two"])
        words = ("in.parquet", "-o", "out.parquet", "--prompt-column", "text")
        code, said = run_here(made, *words, "--attempts", "1")
        assert code == ERRORS_NOT_THEIRS, said
        assert [row["answer"] for row in rows_of(tmp_path / "out.parquet")] == [None, None]
        made.workers.remove(bad)
        bad.kill()
        made.worker()
        code, said = run_here(made, *words, "--retry-errors")
        assert code == 0, said
        assert [row["answer"] for row in rows_of(tmp_path / "out.parquet")] == ["one", "two"]
        assert [row["error"] for row in rows_of(tmp_path / "out.parquet")] == [None, None]


def test_what_is_done_can_be_read_while_the_batch_runs_and_outlives_a_killed_head(tmp_path: Path) -> None:
    with desk(tmp_path) as made:
        go_on = tmp_path / "go on"
        worker = made.worker("--hold", f"5:{go_on}")
        (tmp_path / "kept").mkdir()
        (tmp_path / "text.txt").write_text("Say {text}")
        write(tmp_path / "in.parquet", [f"number {number}" for number in range(30)])
        kept = ("--journal", "kept/the.journal")
        words = ("in.parquet", "-o", "out.parquet", "--template", "text.txt", "--workers", worker.url, *kept)
        head = made._batch("run", *words)
        journal = tmp_path / "kept" / "the.journal"

        def done() -> bool:
            assert head.poll() is None, made.end(head)
            return journal.exists() and journal.read_bytes().count(b"\n") == 6

        until(done)
        code, said = made.end(made._batch("read", "out.parquet", *kept))
        assert code == 0
        assert [json.loads(line)["error"] for line in said.splitlines()] == [None] * 5
        made.kill(head)
        go_on.touch()
        code, said = made.end(made._batch("run", *words))
        assert code == 0 and "5 of 30 rows are in kept/the.journal" in said, said
        assert [row["answer"] for row in rows_of(tmp_path / "out.parquet")] == [
            f"Say number {number}" for number in range(30)
        ]
        code, said = made.end(made._batch("read", "out.parquet", *kept))
        assert code == 0 and len(said.splitlines()) == 30, "the output has not all of them, so the journal keeps them"


def test_a_table_that_changes_before_its_columns_are_written_stops_the_batch(tmp_path: Path) -> None:
    with desk(tmp_path) as made:
        go_on = tmp_path / "go on"
        worker = made.worker("--hold", f"5:{go_on}")
        prompts: list[str | None] = [f"number {number}" for number in range(30)]
        write(tmp_path / "in.parquet", prompts)
        words = ("in.parquet", "-o", "out.parquet", "--prompt-column", "text", "--workers", worker.url)
        head = made._batch("run", *words)

        def under_way() -> bool:
            assert head.poll() is None, made.end(head)
            journal = tmp_path / "out.parquet.journal"
            return journal.exists() and journal.read_bytes().count(b"\n") == 6

        until(under_way)
        write(tmp_path / "new.parquet", prompts[::-1])
        (tmp_path / "new.parquet").rename(tmp_path / "in.parquet")
        go_on.touch()
        code, said = made.end(head)
        assert code == 75 and "was changed while it was read, at record 1" in said, said
        assert not (tmp_path / "out.parquet").exists()
        code, said = made.end(made._batch("run", *words))
        assert code == 2 and "belongs to another job" in said, said
        write(tmp_path / "in.parquet", prompts)
        code, said = made.end(made._batch("run", *words))
        assert code == 0, said
        assert [row["answer"] for row in rows_of(tmp_path / "out.parquet")] == prompts


def test_an_output_within_the_folder_that_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"prompt": "one"}\n')
    with desk(tmp_path) as made:
        made.worker()
        for words in (("in", "-o", "in/out.jsonl"), ("in", "-o", "out.jsonl", "--journal", "in/x.journal")):
            code, said = run_here(made, *words)
            assert code == 2 and "is inside the input in, of which all files are read" in said, said
        assert [each.name for each in (tmp_path / "in").iterdir()] == ["a.jsonl"]
        code, said = run_here(made, "in", "-o", "out.jsonl")
        assert code == 0, said
