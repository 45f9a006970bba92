"""A hundred faults in one run leave the survivors and the agent as they were."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import pytest
from tests.process.launching import PATIENCE, Running, Site, agents_below, site
from tests.process.training import SCRIPTS, Fault

from regrow.observe.ledger import Ledger, read_records

FAULTS, WARM = 100, 25
QUIET_STEPS = 20
STAGES = ("data", "forward", "backward", "reduce", "update", "commit")


@dataclass(frozen=True)
class Sample:
    """Resources of one process; `resident` in bytes."""

    descriptors: int
    threads: int
    resident: int


def look(pid: int) -> Sample:
    process = psutil.Process(pid)
    with process.oneshot():
        return Sample(process.num_fds(), process.num_threads(), process.memory_info().rss)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made
        made.assert_nothing_left()


def mended(site: Site) -> int:
    """Number of repaired faults. Two that come close together are one incident."""
    return sum(incident.faults for incident in Ledger(read_records(site.home / "jobs" / "long")).incidents)


def settled(pids: dict[str, int]) -> dict[str, Sample]:
    """The median of a few looks: at any one moment a worker may be in the middle of a recovery."""
    looks = []
    for _ in range(9):
        looks.append({name: look(pid) for name, pid in pids.items()})
        time.sleep(0.05)
    return {
        name: Sample(
            int(median(each[name].descriptors for each in looks)),
            int(median(each[name].threads for each in looks)),
            int(median(each[name].resident for each in looks)),
        )
        for name in pids
    }


def wait_for_faults(site: Site, running: Running, count: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while mended(site) < count:
        running.drain()
        assert running.process.poll() is None, running.output
        assert time.monotonic() < deadline, f"{mended(site)} of {count} faults"
        time.sleep(0.1)


def test_a_hundred_faults_leave_no_trace_in_survivors_and_agent(here: Site) -> None:
    plan = here.folder / "plan.toml"
    # A quiet stretch after the first faults and one at the end, in which all wait to be looked at. Rank 0 is spared,
    # so that one worker lives through all of it.
    faults = [
        Fault(
            1 + at % 2,
            3 + 3 * at + (QUIET_STEPS if at >= WARM else 0),
            STAGES[at % 6],
            ("sigkill", "exception")[at // 6 % 2],
        )
        for at in range(FAULTS)
    ]
    plan.write_text("\n".join(fault.toml() for fault in faults))
    script = [str(SCRIPTS / "train_small.py"), "--steps", str(3 * FAULTS + 2 * QUIET_STEPS)]
    script += ["--hold", f"{faults[WARM].step - 5}:seen-before", f"{faults[-1].step + 10}:seen-after"]
    with here.start(
        "run", "--job", "long", "--nproc-per-node", "3", "--max-faults", "1000", "--fault-plan", str(plan), *script
    ) as running:
        running.wait_for("records and logs")
        wait_for_faults(here, running, 1)
        status = json.loads(here.regrow("status", "long", "--json").stdout)
        launcher = psutil.Process(running.process.pid)
        (agent,) = agents_below(running)
        pids = {"survivor": status["ranks"][0]["pid"], "agent": agent, "launcher": launcher.pid}
        wait_for_faults(here, running, WARM)
        before, processes_before = settled(pids), len(launcher.children(recursive=True))
        (here.folder / "seen-before").touch()
        wait_for_faults(here, running, FAULTS)
        after, processes_after = settled(pids), len(launcher.children(recursive=True))
        (here.folder / "seen-after").touch()
        assert running.wait() == 0, running.output
    assert here.caches() == []
    assert processes_after <= processes_before
    for name in pids:
        assert after[name].descriptors <= before[name].descriptors, (name, before, after)
        assert after[name].threads <= before[name].threads, (name, before, after)
        assert after[name].resident <= before[name].resident * 1.02, (name, before, after)
