"""The diff that `regrow port` prints for a script of epochs is applied as it is, and the script goes through kills."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.launching import Site, site
from tests.process.training import Fault

from regrow.observe.ledger import Ledger, read_records

PLAIN = Path(__file__).parents[1] / "scripts" / "plain_epochs.py"
FAULTS = [Fault(0, 3, "update"), Fault(1, 7, "between"), Fault(0, 12, "backward"), Fault(1, 23, "between")]
"""Of 8 steps an epoch: in an update, in two evaluations, in a backward."""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made
        made.assert_nothing_left()


@pytest.mark.timeout(120)
def test_a_script_with_the_diff_applied_goes_through_kills(here: Site) -> None:
    name = here.script(PLAIN.read_text())
    ported = here.regrow("port", name)
    assert ported.returncode == 0, ported.stderr
    (here.folder / "port.diff").write_text(ported.stdout)
    applied = subprocess.run(
        ["git", "apply", "-p0", "port.diff"],
        cwd=here.folder,
        env=here.environment(GIT_CEILING_DIRECTORIES=str(here.folder.parent)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert applied.returncode == 0, applied.stderr + ported.stdout
    assert "with the diff (11 new lines" in ported.stderr, ported.stderr

    plan = here.folder / "plan.toml"
    plan.write_text("\n".join(fault.toml() for fault in FAULTS))
    ends = []
    for job, flags in [("calm", ()), ("struck", ("--fault-plan", str(plan)))]:
        run = here.regrow("run", "--job", job, "--nproc-per-node", "2", *flags, name)
        assert run.returncode == 0, run.stdout + run.stderr
        assert len(Ledger(read_records(here.home / "jobs" / job)).injected) == (len(FAULTS) if flags else 0)
        ends.append(sorted(line for line in run.stdout.splitlines() if ", best 0x" in line))
    assert len(ends[0]) == 2
    assert ends[0] == ends[1]
    assert "lr 0.002401" in ends[0][0]
