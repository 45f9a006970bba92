"""`regrow batch` against `vllm run-batch`: the same file through the same engine; rows a second, and use of the CPU.

`build/vllm/venv/bin/python benchmarks/batch_vllm.py` after `make test-vllm`, whose environment and model it uses. Both
sides run in turns. Server start-up is excluded: run-batch is timed from its log line about reading the file to its
writing of the results.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import targets

MODEL = Path(__file__).parents[1] / "build" / "vllm" / "model"
ROWS, PAIRS, LIMIT_S = 600, 2, 900.0
NAME = "tiny"
_VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
_ENGINE = ["--served-model-name", NAME, "--dtype", "float32", "--max-model-len", "384", "--max-num-seqs", "32"]
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Side:
    """One run over the file.

    Attributes:
        seconds: from its first row to its last.
        client: CPU seconds of the process that reads rows and writes results.
        server: CPU seconds of the API's process, if it is a separate one.
        engine: CPU seconds of the inference processes.
    """

    seconds: float
    client: float
    server: float
    engine: float


def write_rows(path: Path, rows: int) -> None:
    """Write an input of chats with short answers, without shared prefixes."""
    with path.open("w") as stream:
        for number in range(rows):
            messages = [{"role": "user", "content": f"{number} is a number of which the docstring says that it"}]
            body = {"model": NAME, "messages": messages, "max_tokens": 32, "temperature": 0}
            row = {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            stream.write(json.dumps(row) + "\n")


def until(what: Callable[[], bool], process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait for a condition on a process. Raises `SystemExit` if the process ends first."""
    end = time.monotonic() + LIMIT_S
    while not what():
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"it has ended, or takes too long: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.01)


def cpu_of(process: psutil.Process) -> tuple[float, float]:
    """CPU seconds so far of a process, and of its descendants."""
    engine = 0.0
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            engine += sum(child.cpu_times()[:2])
    return sum(process.cpu_times()[:2]), engine


def run_batch(folder: Path, model: Path) -> Side:
    """One run of `vllm run-batch`."""
    log = folder / "run-batch.log"
    words = [*_VLLM, "run-batch", "-i", "in.jsonl", "-o", "theirs.jsonl", "--model", str(model), *_ENGINE]
    with (
        log.open("wb") as out,
        subprocess.Popen([*words, "--enforce-eager"], cwd=folder, stdout=out, stderr=out) as run,
    ):
        seen = psutil.Process(run.pid)
        until(lambda: b"Reading batch from" in log.read_bytes(), run, log)
        began, before = time.monotonic(), cpu_of(seen)
        until(lambda: b"Writing outputs to local file" in log.read_bytes(), run, log)
        seconds, after = time.monotonic() - began, cpu_of(seen)
        if run.wait(LIMIT_S):
            raise SystemExit(f"run-batch ended with {run.returncode}: {log.read_text(errors='replace')[-2000:]}")
    return Side(seconds, after[0] - before[0], 0.0, after[1] - before[1])


@contextmanager
def server(folder: Path, model: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A ready `vllm serve`: its address, and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log, url = folder / "serve.log", f"http://127.0.0.1:{port}"
    words = [*_VLLM, "serve", str(model), "--port", str(port), *_ENGINE, "--enforce-eager"]

    def ready() -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    with log.open("wb") as out, subprocess.Popen(words, stdout=out, stderr=out) as process:
        try:
            until(ready, process, log)
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


def run_regrow(folder: Path, url: str, served: psutil.Process) -> Side:
    """One run of `regrow batch run` with a running server."""
    for each in ("out.jsonl", "out.jsonl.journal"):
        (folder / each).unlink(missing_ok=True)
    words = ["in.jsonl", "-o", "out.jsonl", "--workers", url, "--per-worker", "64", "--quiet"]
    before = cpu_of(served)
    with (folder / "said").open("w+") as said:
        head = subprocess.Popen(
            [sys.executable, "-m", "regrow", "batch", "run", *words], cwd=folder, stdout=said, stderr=said
        )
        _, status, used = os.wait4(head.pid, 0)
        head.returncode = os.waitstatus_to_exitcode(status)
        if head.returncode:
            said.seek(0)
            raise SystemExit(f"the head ended with {head.returncode}: {said.read()}")
    after = cpu_of(served)
    summary = json.loads((folder / "out.jsonl.summary.json").read_text())
    return Side(summary["seconds"], used.ru_utime + used.ru_stime, after[0] - before[0], after[1] - before[1])


def answers(path: Path) -> dict[str, str]:
    """The answer of each row."""
    found = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        found[row["custom_id"]] = row["response"]["body"]["choices"][0]["message"]["content"]
    return found


def show(name: str, rows: int, side: Side) -> None:
    """A line of the profile."""
    print(
        f"{name:10} {rows / side.seconds:7.1f} rows/s  {side.seconds:6.2f} s; CPU seconds: "
        f"{side.client:5.2f} client, {side.server:5.2f} HTTP server, {side.engine:5.2f} engine"
    )


def measure(folder: Path, model: Path, rows: int, pairs: int) -> dict[str, float]:
    """All figures: medians of the pairs."""
    write_rows(folder / "in.jsonl", rows)
    theirs, ours = [], []
    for _ in range(pairs):
        theirs.append(run_batch(folder, model))
        show("run-batch", rows, theirs[-1])
        with server(folder, model) as (url, served):
            ours.append(run_regrow(folder, url, served))
        show("regrow", rows, ours[-1])
    same = answers(folder / "theirs.jsonl"), answers(folder / "out.jsonl")
    equal = sum(same[0][name] == same[1].get(name) for name in same[0])
    print(f"{equal} of {rows} answers are the same")
    ratios = [his.seconds / mine.seconds for his, mine in zip(theirs, ours, strict=True)]

    def median(of: Callable[[Side], float], sides: list[Side]) -> float:
        return statistics.median(of(side) for side in sides)

    return {
        "run_batch_rows_per_s": rows / median(lambda side: side.seconds, theirs),
        "regrow_rows_per_s": rows / median(lambda side: side.seconds, ours),
        "of_run_batch": statistics.median(ratios),
        "run_batch_client_cpu_s": median(lambda side: side.client, theirs),
        "run_batch_engine_cpu_s": median(lambda side: side.engine, theirs),
        "head_cpu_s": median(lambda side: side.client, ours),
        "server_cpu_s": median(lambda side: side.server, ours),
        "engine_cpu_s": median(lambda side: side.engine, ours),
        "equal_answers": equal / rows,
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS, help="of the file")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="runs of each side")
    parser.add_argument("--model", type=Path, default=MODEL, help="a folder that vLLM can serve")
    parser.add_argument("--json", type=Path, help="write the figures here")
    words = parser.parse_args()
    targets.warn_if_busy()
    os.environ.update(_ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="regrow-batch-vllm-") as base:
        figures = measure(Path(base), words.model, words.rows, words.pairs)
    targets.tell("batch_vllm", figures, words.json, rows=words.rows, pairs=words.pairs)


if __name__ == "__main__":
    main()
