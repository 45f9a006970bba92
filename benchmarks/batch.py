"""Speed of the head of `regrow batch`: rows a second with workers that answer at once, and memory at a million rows.

`python benchmarks/batch.py` sends a million rows (about eight minutes on two cores); `--quick` sends 30,000, and then
the last 10,000 of a million whose other results are in the journal, so that index, journal and output have full size.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import targets

from regrow_batch.job import fingerprint
from regrow_batch.records import encode_head, encode_row
from regrow_batch.rows import BatchRow, RowReading, answered
from regrow_batch.scanning import scan

MILLION = 1_000_000
QUICK_ROWS = 30_000
QUICK_LEFT = 10_000
WORKERS = 2
_WORKER = Path(__file__).with_name("instant_worker.py")
_ANSWER = (
    b'{"id":"chatcmpl-1","choices":[{"index":0,"message":{"role":"assistant","content":"%b"},"finish_reason":"stop"}]}'
)


@contextmanager
def workers(count: int) -> Iterator[list[str]]:
    """Addresses of workers that answer at once."""
    started = [
        subprocess.Popen([sys.executable, str(_WORKER)], stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    try:
        yield [f"http://127.0.0.1:{each.stdout.readline().strip()}" for each in started if each.stdout is not None]
    finally:
        for each in started:
            each.terminate()
            each.wait()


def write_rows(path: Path, rows: int) -> None:
    """Write an input of short chats."""
    with path.open("w") as stream:
        for number in range(rows):
            stream.write(
                f'{{"custom_id":"request-{number}","method":"POST","url":"/v1/chat/completions","body":{{"model":"m",'
                f'"messages":[{{"role":"user","content":"Say something about the number {number}."}}],'
                f'"max_tokens":64}}}}\n'
            )


def write_journal(source: Path, journal: Path, rows: int) -> None:
    """Write a journal that has the first rows of an input."""
    with journal.open("wb") as stream:
        stream.write(encode_head(fingerprint(scan(str(source)), RowReading())))
        body = _ANSWER % (b"an answer of a few words, as a small model gives it " * 4)
        for number in range(rows):
            row = BatchRow(number, f"request-{number}", "/v1/chat/completions", b"", 0)
            stream.write(encode_row(number, answered(row, 200, body, "chatcmpl-1")))


def run_head(folder: Path, urls: list[str]) -> tuple[float, float]:
    """Run the batch of a folder; returns the head's rows a second and its peak memory in MiB."""
    words = [
        "batch",
        "run",
        "in.jsonl",
        "-o",
        "out.jsonl",
        "--workers",
        ",".join(urls),
        "--per-worker",
        "64",
        "--quiet",
    ]
    with (folder / "said").open("w+") as said:
        began = time.monotonic()
        head = subprocess.Popen([sys.executable, "-m", "regrow", *words], cwd=folder, stdout=said, stderr=said)
        _, status, used = os.wait4(head.pid, 0)
        head.returncode = os.waitstatus_to_exitcode(status)
        if head.returncode:
            said.seek(0)
            raise SystemExit(f"the head ended with {head.returncode}: {said.read()}")
    summary = json.loads((folder / "out.jsonl.summary.json").read_text())
    peak = used.ru_maxrss / 1024
    print(
        f"{summary['rows_this_run']:,} of {summary['rows']:,} rows: {summary['rows_per_s']:,.0f} rows/s, "
        f"{used.ru_utime + used.ru_stime:.1f} s of CPU in {time.monotonic() - began:.1f} s, peak {peak:.0f} MiB"
    )
    return summary["rows_per_s"], peak


def check(folder: Path, rows: int) -> None:
    """Check that each id is in the output once. Raises `SystemExit` otherwise."""
    seen = bytearray(rows)
    with (folder / "out.jsonl").open("rb") as stream:
        for line in stream:
            name = re.search(rb'"custom_id":"request-(\d+)"', line)
            seen[int(name[1]) if name else 0] += 1
    if seen.count(1) != rows:
        raise SystemExit(f"{rows - seen.count(1)} rows are not in the output exactly once")


def measure(*, quick: bool, base: Path) -> dict[str, float]:
    """Both figures."""
    with workers(WORKERS) as urls:
        fast, large = base / "fast", base / "large"
        fast.mkdir()
        large.mkdir()
        write_rows(large / "in.jsonl", MILLION)
        if quick:
            write_rows(fast / "in.jsonl", QUICK_ROWS)
            rate, _ = run_head(fast, urls)
            check(fast, QUICK_ROWS)
            write_journal(large / "in.jsonl", large / "out.jsonl.journal", MILLION - QUICK_LEFT)
            _, peak = run_head(large, urls)
        else:
            rate, peak = run_head(large, urls)
        check(large, MILLION)
    return {"rows_per_s": rate, "peak_mib": peak}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="in two minutes")
    parser.add_argument("--json", type=Path, help="write the figures here")
    words = parser.parse_args()
    targets.warn_if_busy()
    with tempfile.TemporaryDirectory(prefix="regrow-batch-") as base:
        figures = measure(quick=words.quick, base=Path(base))
    targets.tell("batch", figures, words.json, rows=MILLION, workers=WORKERS, quick=words.quick)


if __name__ == "__main__":
    main()
