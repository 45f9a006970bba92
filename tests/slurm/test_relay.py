"""The relay that nodes of Slurm's tests start in place of `regrow` behaves as it would."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.batch import until
from tests.process.launching import PATIENCE, Site, site, warm
from tests.slurm.relay import DOOR

RELAY = Path(__file__).with_name("relay.py")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="to enter namespaces needs root")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        made.script("import pathlib, time; pathlib.Path('up').touch(); time.sleep(600)")
        yield made


@pytest.fixture
def spool(here: Site) -> Iterator[str]:
    """With a warm process behind its door, in the namespaces of this one."""
    folder = here.runtime / socket.gethostname()
    folder.mkdir()
    server = warm().on_node(os.getpid(), folder / DOOR)
    yield str(here.runtime)
    server.close()


def relayed(here: Site, spool: str, *words: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-S", str(RELAY), spool, *words]
    return subprocess.Popen(command, cwd=here.folder, env=here.environment())


def test_it_ends_with_the_commands_own_code(here: Site, spool: str) -> None:
    code = relayed(here, spool, "run", "there is no such.py").wait(PATIENCE)
    assert code == here.regrow("run", "there is no such.py").returncode != 0


def test_a_signal_reaches_the_command(here: Site, spool: str) -> None:
    with relayed(here, spool, "run", "train.py") as relay:
        until((here.folder / "up").exists)
        relay.send_signal(signal.SIGTERM)
        code = relay.wait(PATIENCE)
    (here.folder / "up").unlink()
    with here.start("run", "train.py") as plain:
        until((here.folder / "up").exists)
        plain.signal(signal.SIGTERM)
        assert code == plain.wait()
    here.assert_no_process_left()


def test_the_command_ends_with_it(here: Site, spool: str) -> None:
    with relayed(here, spool, "run", "train.py") as relay:
        until((here.folder / "up").exists)
        relay.kill()
    here.assert_no_process_left()
