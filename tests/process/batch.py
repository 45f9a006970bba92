"""Batches run as users run them, with fake workers that are real processes."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.sources import PYTHONPATH

from regrow.cli import main

PATIENCE = 120.0
FAKE = str(Path(__file__).parents[1] / "scripts" / "fake_worker.py")
SOURCE = PYTHONPATH


def until(what: Callable[[], bool], *, within: float = PATIENCE, every: float = 0.005) -> None:
    """Look until something is so. `every`: seconds between two looks."""
    end = time.monotonic() + within
    while not what():
        assert time.monotonic() < end, f"it did not become so within {within} s"
        time.sleep(every)


class Worker:
    """A fake worker, which keeps its port when it is started again."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words = words
        self._port = "0"
        self.start()

    def start(self) -> None:
        command = [sys.executable, FAKE, self._port, *self._words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    @property
    def url(self) -> str:
        """URL of the worker; waits until it listens."""
        if self._port == "0":
            assert self.process.stdout is not None
            self._port = self.process.stdout.readline().strip().rpartition(":")[2]
        return f"http://127.0.0.1:{self._port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class SetUpNotes:
    """A folder with an input, workers, and heads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workers: list[Worker] = []
        self.heads: list[subprocess.Popen[str]] = []
        self.journal = folder / "out.jsonl.journal"

    def rows(self, *prompts: str, **more: Any) -> None:
        """An input with these prompts; their ids are `id-0` and on."""
        with (self.folder / "in.jsonl").open("w") as stream:
            for number, prompt in enumerate(prompts):
                body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 16} | more
                row = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
                stream.write(json.dumps(row) + "\n")

    def worker(self, *words: str) -> Worker:
        made = Worker(words)
        self.workers.append(made)
        return made

    def start(self, *words: str, **more: Any) -> "subprocess.Popen[str]":
        """`regrow batch run in.jsonl -o out.jsonl words…`, with all workers unless words name some."""
        if not any(word in ("--workers", "--workers-file", "--spawn", "--listen") for word in words):
            words = ("--workers", ",".join(worker.url for worker in self.workers), *words)
        return self._batch("run", "in.jsonl", "-o", "out.jsonl", *words, **more)

    def register(self, head: str, *words: str, flags: tuple[str, ...] = (), **more: Any) -> "subprocess.Popen[str]":
        """`regrow batch worker flags… head` with a fake worker as its server."""
        return self._batch("worker", *flags, head, sys.executable, FAKE, "{port}", *words, **more)

    def _batch(self, *words: str, env: dict[str, str] | None = None, **more: Any) -> "subprocess.Popen[str]":
        started = subprocess.Popen(
            [sys.executable, "-m", "regrow", "batch", *words],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": SOURCE, "REGROW_HOME": str(self.folder / "home")} | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **more,
        )
        self.heads.append(started)
        return started

    def end(self, head: "subprocess.Popen[str]") -> tuple[int, str]:
        """Wait for a head or a worker; its exit code, and what it said."""
        said, _ = head.communicate(timeout=PATIENCE)
        return head.returncode, said

    def run(self, *words: str, **more: Any) -> tuple[int, str]:
        return self.end(self.start(*words, **more))

    def run_here(self, *words: str) -> tuple[int, str]:
        """The same within this process, which is faster."""
        said = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stderr(said):
            code = main(["batch", "run", "in.jsonl", "-o", "out.jsonl", *words])
        return code, said.getvalue()

    def kill(self, head: "subprocess.Popen[str]") -> None:
        head.send_signal(signal.SIGKILL)
        head.communicate()

    def journaled(self) -> int:
        """Rows in the journal."""
        try:
            return max(0, self.journal.read_bytes().count(b"\n") - 1)
        except FileNotFoundError:
            return 0

    def answers(self) -> dict[str, str]:
        """Answer of each row, of a whole output in which each id stands once."""
        found: dict[str, str] = {}
        for row in self._rows():
            assert row["custom_id"] not in found, f"{row['custom_id']} stands twice in the output"
            assert row["error"] is None, row["error"]
            found[row["custom_id"]] = row["response"]["body"]["choices"][0]["message"]["content"]
        return found

    def results(self) -> dict[str, Any]:
        return {row["custom_id"]: row for row in self._rows()}

    def _rows(self) -> list[dict[str, Any]]:
        # A model may say what `splitlines` takes for the end of a line.
        return [json.loads(line) for line in (self.folder / "out.jsonl").read_text().split("\n") if line]

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "out.jsonl.summary.json").read_text())
        return found


@contextmanager
def desk(folder: Path) -> Iterator[SetUpNotes]:
    """A desk that leaves no process."""
    made = SetUpNotes(folder)
    try:
        yield made
    finally:
        for head in made.heads:
            if head.poll() is None:
                made.kill(head)
        for worker in made.workers:
            worker.kill()
