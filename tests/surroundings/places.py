"""Jobs in unusual surroundings, and what they have to come out with."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.process.launching import Site
from tests.sources import PYTHONPATH
from tests.surroundings.refusing import can_refuse

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_odd.py"
TESTS = Path(__file__).parents[2]
PATIENCE = 300.0
PLAN = '[[fault]]\nrank = 1\nstep = 5\nat = "reduce"\n'
"""One kill, so that a newcomer has to find its way in these surroundings too."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces, mounts, another user")
needs_filters = pytest.mark.skipif(not can_refuse(), reason="this machine's system calls have other numbers")


NOBODY = "--user --map-user=65534 --map-group=65534"
"""A user namespace in which this process is nobody, without a capability."""
CLOCK = Path(__file__).parent / "clock.c"


def can_unshare(flags: str) -> bool:
    """True if namespaces can be made here."""
    words = ["unshare", *flags.split(), "true"]
    return shutil.which("unshare") is not None and subprocess.run(words, capture_output=True).returncode == 0


class Outcome(NamedTuple):
    code: int
    said: str
    sums: list[str]
    """Of the parameters, a rank each."""


def words(here: Site, name: str, *flags: str, script: Sequence[str] = (), kills: bool = True) -> list[str]:
    """A job of two ranks, one of which is killed."""
    (here.folder / "plan.toml").write_text(PLAN)
    plan = ("--fault-plan", "plan.toml") if kills else ()
    return ["run", "--job", name, "--nproc-per-node", "2", *plan, *flags, str(SCRIPT), "--out", name, *script]


def ended(here: Site, name: str, code: int, said: str) -> Outcome:
    sums = [path.read_text() for path in sorted(here.folder.glob(f"{name}.[0-9]"))]
    return Outcome(code, said, sums)


def warm(here: Site, name: str, *flags: str, script: Sequence[str] = (), kills: bool = True) -> Outcome:
    """The job, forked from the warm process: for what does not concern the start."""
    done = here.regrow(*words(here, name, *flags, script=script, kills=kills))
    return ended(here, name, done.returncode, done.stdout + done.stderr)


def cold(
    here: Site,
    name: str,
    *flags: str,
    before: Sequence[str] = (),
    shell: str = "",
    script: Sequence[str] = (),
    kills: bool = True,
    more: Mapping[str, str] | None = None,
) -> Outcome:
    """The job as users start it.

    Args:
        before: words of a command that starts it.
        shell: lines of a shell in which `"$@"` is the job.
        more: environment variables.
    """
    command = [sys.executable, "-m", "regrow", *words(here, name, *flags, script=script, kills=kills)]
    command = [*before, *command]
    if shell:
        command = ["bash", "-c", shell, "bash", *command]
    paths = os.pathsep.join([PYTHONPATH, str(TESTS)])
    environment = here.environment(PYTHONPATH=paths) | dict(more or {})
    with (here.folder / f"{name}.said").open("w+b") as said:
        done = subprocess.run(
            command,
            cwd=here.folder,
            env=environment,
            stdout=said,
            stderr=said,
            stdin=subprocess.DEVNULL,
            timeout=PATIENCE,
        )
        said.seek(0)
        return ended(here, name, done.returncode, said.read().decode(errors="replace"))
