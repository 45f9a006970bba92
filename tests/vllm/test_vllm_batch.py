"""`regrow batch` over real vLLM servers that are killed, and a head that is: each id once, and greedy tokens as HF's.

Run by `make test-vllm`; skipped where vLLM is not installed.
"""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm")

START_S, RUN_S = 600.0, 900.0
COPIES = 12
"""Of each case of the reference, so that there is a middle of the batch to kill something in."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def environment() -> dict[str, str]:
    return os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def until(what: Callable[[], bool], within: float, told: Callable[[], str]) -> None:
    end = time.monotonic() + within
    while not what():
        assert time.monotonic() < end, told()
        time.sleep(0.02)


class Server:
    """A `vllm serve` with all that it starts."""

    def __init__(self, model: Path, folder: Path, name: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{port}", folder / f"{name}.log"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", str(port)]
        more = ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "384", "--max-num-seqs", "8"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *more, "--enforce-eager", "--logits-processors", "lz_penalty.vllm:LZVllmProcessor"],
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ready(self) -> bool:
        assert self.process.poll() is None, self.said()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def engine(self) -> psutil.Process:
        """The process that infers, which the server has started."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(each for each in children if "EngineCore" in " ".join([each.name(), *each.cmdline()]))

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def servers(model: Path, folder: Path) -> Iterator[list[Server]]:
    """Two of them, which answer."""
    started = [Server(model, folder, name) for name in ("first", "second")]
    try:
        for each in started:
            until(each.ready, START_S, each.said)
        yield started
    finally:
        for each in started:
            each.end()


def write_rows(path: Path, cases: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Rows of the reference's prompts; the tokens that each has to get."""
    expected: dict[str, list[int]] = {}
    with path.open("w") as stream:
        for copy in range(COPIES):
            for number, case in enumerate(cases):
                body = {"model": "tiny", "prompt": case["prompt"], "max_tokens": case["count"], "temperature": 0}
                body |= {"return_token_ids": True}
                body |= {"vllm_xargs": case["asked"]} if case["asked"] else {}
                name = f"{copy}-{number}"
                row = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
                stream.write(json.dumps(row) + "\n")
                expected[name] = case["tokens"]
    return expected


class Batch:
    """A head over servers."""

    def __init__(self, folder: Path, urls: list[str]) -> None:
        self._folder, self._urls = folder, urls
        self._journal = folder / "out.jsonl.journal"
        self.start()

    def start(self) -> None:
        words = ["in.jsonl", "-o", "out.jsonl", "--workers", ",".join(self._urls), "--per-worker", "8", "--quiet"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "regrow", "batch", "run", *words],
            cwd=self._folder,
            env=environment() | {"REGROW_HOME": str(self._folder / "home")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def done(self) -> int:
        return self._journal.read_bytes().count(b"\n") - 1 if self._journal.exists() else 0

    def until_done(self, rows: int) -> None:
        def there() -> bool:
            assert self.process.poll() is None, "the batch has ended before anything was killed"
            return self.done() >= rows

        until(there, RUN_S, lambda: f"{self.done()} rows are done")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.timeout(START_S + 2 * RUN_S)
@pytest.mark.parametrize("victim", ["server", "engine"])
def test_each_row_has_its_tokens_once_through_the_kill_of_the_head_and_of_a(
    model: Path, tmp_path: Path, victim: str
) -> None:
    expected = write_rows(tmp_path / "in.jsonl", json.loads((model / "reference.json").read_text()))
    with servers(model, tmp_path) as both:
        batch = Batch(tmp_path, [each.url for each in both])
        try:
            batch.until_done(len(expected) // 6)
            batch.kill()
            batch.start()
            batch.until_done(len(expected) // 3)
            (both[0].process if victim == "server" else both[0].engine()).kill()
            said, _ = batch.process.communicate(timeout=RUN_S)
        finally:
            batch.kill()
        assert batch.process.returncode == 0, said
        lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().split("\n") if line]
        assert [line["custom_id"] for line in lines] == list(expected), "each id once, in the input's order"
        assert [line["custom_id"] for line in lines if line["error"] is not None] == []
        got = {line["custom_id"]: line["response"]["body"]["choices"][0]["token_ids"] for line in lines}
        assert [name for name, tokens in got.items() if tokens != expected[name]] == []
