"""However a launcher is ended, no process and no socket folder of its job stays."""

import os
import pty
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ports import held_port
from tests.process.launching import PATIENCE, Running, Site, site

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("waiting", flush=True)
time.sleep(600)
"""
PLAIN = "import time\nprint('waiting', flush=True)\ntime.sleep(600)"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGINT, "interrupted by Ctrl-C"),
        (signal.SIGTERM, "SIGTERM was received"),
        (signal.SIGHUP, "the terminal was closed"),
    ],
)
def test_a_signal_ends_the_job_and_asks_to_be_run_again(here: Site, number: int, reason: str) -> None:
    with here.start("run", "--nproc-per-node", "2", "--standby", "1", here.script(PLAIN)) as job:
        job.wait_for("waiting\n", times=2)
        job.signal(number)
        assert job.wait() == 75, job.output
        assert reason in job.output
        assert "Traceback" not in job.output
    here.assert_nothing_left()


def test_a_second_ctrl_c_does_not_wait_for_workers_that_do_not_listen(here: Site) -> None:
    with here.start("run", "--shutdown-timeout", "600s", here.script(STUBBORN)) as job:
        job.wait_for("waiting\n")
        job.signal(signal.SIGINT)
        job.wait_for("stopping")
        job.signal(signal.SIGINT)
        assert job.wait() == 75, job.output
    here.assert_nothing_left()


def test_workers_that_do_not_listen_are_killed_when_their_time_is_over(here: Site) -> None:
    with here.start("run", "--shutdown-timeout", "500ms", here.script(STUBBORN)) as job:
        job.wait_for("waiting\n")
        job.signal(signal.SIGTERM)
        assert job.wait() == 75, job.output
    here.assert_nothing_left()


def test_a_launcher_that_is_killed_takes_everything_with_it(here: Site) -> None:
    with here.start("run", "--nproc-per-node", "2", "--standby", "1", here.script(STUBBORN)) as job:
        job.wait_for("waiting\n", times=2)
        job.signal(signal.SIGKILL)
        assert job.process.wait(PATIENCE) == -signal.SIGKILL
        here.assert_nothing_left()
    assert "died" in here.regrow("jobs").stdout


def two_nodes(here: Site, script: str) -> tuple[Running, Running]:
    words = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{held_port()}", "--shutdown-timeout", "1s", script]
    zero, one = (here.start("run", "--node-rank", rank, *words, REGROW_TOKEN="both know") for rank in ("0", "1"))
    return zero, one


def test_ctrl_c_on_any_node_ends_the_job_on_all(here: Site) -> None:
    zero, one = two_nodes(here, here.script(PLAIN))
    with zero, one:
        zero.wait_for("waiting\n")
        one.wait_for("waiting\n")
        one.signal(signal.SIGINT)
        assert (zero.wait(), one.wait()) == (75, 75), zero.output + one.output
        assert "node1: interrupted by Ctrl-C" in zero.output
    here.assert_nothing_left()


def test_the_loss_of_node_0_ends_the_others(here: Site) -> None:
    zero, one = two_nodes(here, here.script(STUBBORN))
    with zero, one:
        zero.wait_for("waiting\n")
        one.wait_for("waiting\n")
        zero.signal(signal.SIGKILL)
        assert one.wait() == 75, one.output
        assert "node 0, which hosts the job's coordinator, was lost" in one.output
        here.assert_nothing_left()


def test_a_closed_terminal_ends_the_job(here: Site) -> None:
    script = here.script(PLAIN)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(here.folder)
        os.execve(here.command()[0], here.command("run", script), here.environment())
    seen, deadline = b"", time.monotonic() + PATIENCE
    while b"waiting" not in seen:
        assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], seen
        seen += os.read(terminal, 1 << 16)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75
    here.assert_nothing_left()
