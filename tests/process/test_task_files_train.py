"""A training by the task files of SkyPilot and dstack: a spot machine joins, is told of its end, and leaves."""

import contextlib
import http.server
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ports import held_port
from tests.process import task_files
from tests.process.batch import until
from tests.process.elastic import HURRY, final, fixed_run, losses
from tests.process.training import SCRIPTS, redone

from regrow.core.exit_codes import OK, RUN_AGAIN
from regrow.observe.ledger import Ledger, read_records

pytestmark = pytest.mark.full
STEPS = 200
WITHIN = 240.0
TRAIN = f"--data-cache=off {SCRIPTS / 'train_micro.py'} --steps {STEPS} --pace 0.6 --invariant --out job.out"
TOKEN = {"REGROW_TOKEN": "0123456789abcdef0123456789abcdef"}


class Metadata:
    """A cloud's metadata server. `taken`: it says that the machine is taken away."""

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self.taken = False


@contextlib.contextmanager
def metadata() -> Iterator[Metadata]:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ours = self.path == task_files.GOOGLE and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if ours else 404)
            self.end_headers()
            self.wfile.write(b"TRUE" if ours and made.taken else b"FALSE")

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    made = Metadata(server.server_port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Tasks:
    """Machines of one test, all of them here."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, script: str, env: dict[str, str]) -> None:
        """One more machine."""
        script = script.replace("/checkpoints", str(self._folder / "checkpoints"))
        self.processes[name] = task_files.start(script, env | TOKEN, self._folder, name)

    def ledger(self) -> Ledger:
        """Records of all machines, each in a home of its own."""
        records = [each for found in self._folder.glob("*.home/jobs/gpt") for each in read_records(found)]
        return Ledger(sorted(records, key=lambda record: record.at))

    def until_world(self, ranks: int) -> None:
        """Wait until `ranks` ranks train, a step further."""
        before = max(self.ledger().commits, default=-1)

        def trains() -> bool:
            told = self.ledger()
            if not told.generations or len(told.generations[-1].workers) != ranks:
                return False
            return max((step for step, done in told.commits.items() if len(done) == ranks), default=-1) > before

        self.until(trains)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait for it, while the machines that begin the job do not end."""

        def goes_on() -> bool:
            for name in ("gang0", "gang1"):
                assert self.processes[name].poll() is None, (self._folder / f"{name}.log").read_text()
            return holds()

        until(goes_on, within=WITHIN, every=0.05)

    def ended(self, name: str) -> int:
        """Wait for a machine's script; its exit code."""
        return self.processes[name].wait(WITHIN)

    def close(self) -> None:
        """Nothing stays: a launcher that is told to end ends its job."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.mark.skipif(shutil.which("curl") is None, reason="the task files ask a metadata server by curl")
def test_a_spot_machine_joins_is_told_that_it_is_taken_away_and_leaves_without_a_step_lost(tmp_path: Path) -> None:
    """Node 0 as SkyPilot runs it, node 1 as dstack does: both have the same words. So has a machine that joins."""
    gang = [
        (task_files.sky_script(task_files.sky("gang")), task_files.sky_place(0, 2)),
        (task_files.dstack_script(task_files.dstack("gang")), task_files.dstack_place(1, 2)),
    ]
    port, tasks = held_port(), Tasks(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with contextlib.closing(tasks), metadata() as told:
        for rank, (script, place) in enumerate(gang):
            given = {"TRAIN": TRAIN, "PORT": str(port), "MOST_NODES": "3"}
            tasks.start(f"gang{rank}", script, given | place)
        tasks.until_world(2)
        more = {"JOIN": f"127.0.0.1:{port}", "METADATA": told.address} | task_files.sky_place(0, 1)
        tasks.start("more", task_files.sky_script(task_files.sky("join")), more)
        tasks.until_world(3)
        told.taken = True
        assert tasks.ended("more") == RUN_AGAIN, (tmp_path / "more.log").read_text()
        tasks.until_world(2)
        (tmp_path / HURRY).touch()
        for rank in (0, 1):
            assert tasks.ended(f"gang{rank}") == OK, (tmp_path / f"gang{rank}.log").read_text()
        ledger = tasks.ledger()
    (tmp_path / "alone").mkdir()
    fixed = fixed_run(tmp_path / "alone", STEPS)
    assert losses(ledger) == fixed["losses"] and redone(ledger) == []
    finals = [final(tmp_path / f"job.{rank}.json") for rank in (0, 1)]
    assert finals == [{"digest": fixed["digest"], "parameters": fixed["parameters"]}] * 2
    assert [each.steps_lost for each in ledger.incidents] == [0] * len(ledger.incidents)
