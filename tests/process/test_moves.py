"""Ranks move to a spare node while all train: no step runs again, and the bits are those of a run without."""

import json
import shlex
import signal
import sys
from collections.abc import Iterator

import pytest
from tests.process.launching import Running, Site, agents_below, site
from tests.process.test_nodes import TRAINING, WORLD, agents_of, assert_equal, end
from tests.process.test_spares import SPARED, nodes_of
from tests.process.training import SCRIPTS, Fault, Outcome, train

MOVED = "moved at step"
STEPS, PACE = 240, 0.3
"""With `hold` (`tests/scripts/pacing.py`) it takes 8 minutes if nobody hurries it: all nodes have moved by then."""
LINGERING = """
import atexit, runpy, sys, time
from pathlib import Path
def linger():
    while Path("linger").exists():
        time.sleep(0.01)
atexit.register(linger)
sys.path.insert(0, {folder!r})
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""
"""The training, whose processes do not end while there is a file `linger`."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("moves")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> Outcome:
    outcome = train(here, "undisturbed", world=WORLD, steps=STEPS)
    assert outcome.code == 0, outcome.output
    return outcome


def start(here: Site, name: str, *flags: str, script: str = TRAINING) -> Running:
    """The training. Its steps take their time until `end`."""
    (here.folder / "hold").touch()
    (here.folder / "hurry").unlink(missing_ok=True)
    words = (
        script,
        "--steps",
        str(STEPS),
        "--pace",
        str(PACE),
        "--say-steps",
        "--out",
        str(here.folder / f"{name}.out"),
    )
    return here.start("run", "--job", name, *flags, *words)


def move(here: Site, name: str, *what: str) -> None:
    done = here.regrow("move", name, *what)
    assert done.returncode == 0, done.stdout + done.stderr


def planned(here: Site, name: str, job: Running) -> Outcome:
    """The end of a job whose ranks have moved and whose workers have met no fault."""
    outcome = end(here, name, job)
    assert [(each.kind, each.faults, each.steps_lost) for each in outcome.ledger.incidents] == [
        ("move", 0, 0) for _ in outcome.ledger.incidents
    ]
    return outcome


def test_nodes_move_to_the_spare_one_after_the_other_and_no_step_runs_again(here: Site, undisturbed: Outcome) -> None:
    with start(here, "turns", *SPARED) as job:
        agents_of(here, "turns", job)
        refused = here.regrow("move", "turns", "node0", "--to", "node1")
        assert refused.returncode == 1 and "node1 has room for 0" in refused.stderr
        move(here, "turns", "node1")
        job.wait_for(MOVED)
        move(here, "turns", "node0")
        job.wait_for(MOVED, times=2)
        outcome = planned(here, "turns", job)
    assert_equal(outcome, undisturbed, lost={0, 1, 2, 3})
    assert f": {STEPS} steps, 0 incidents, 2 planned changes (exit code 0)" in outcome.output
    assert nodes_of(here, "turns") == [
        ["node0", "node0", "node1", "node1"],
        ["node0", "node0", "node2", "node2"],
        ["node1", "node1", "node2", "node2"],
    ]
    here.assert_nothing_left()


@pytest.mark.full
def test_ranks_of_a_node_with_two_bad_verdicts_move_to_the_spare_by_themselves(
    here: Site, undisturbed: Outcome
) -> None:
    rules = (f'[[rule]]\nname = "at-{step}"\npattern = "^step {step}$"\nseverity = "leave"\n' for step in (2, 4))
    (here.folder / "leave.toml").write_text("\n".join(rules))
    with start(here, "verdicts", *SPARED, "--log-rules", "leave.toml") as job:
        agents_of(here, "verdicts", job)
        job.wait_for(MOVED)
        outcome = planned(here, "verdicts", job)
    assert "ranks 0, 1 move away from node0, which is in quarantine" in outcome.output
    assert_equal(outcome, undisturbed, lost={0, 1, 2, 3})
    assert nodes_of(here, "verdicts")[-1] == ["node2", "node2", "node1", "node1"]
    here.assert_nothing_left()


@pytest.mark.full
def test_a_drain_behind_a_move_lets_all_train_until_those_who_leave_are_gone(here: Site, undisturbed: Outcome) -> None:
    script = here.script(LINGERING.format(folder=str(SCRIPTS), script=TRAINING))
    (lingers := here.folder / "linger").touch()
    with start(here, "behind", *SPARED, script=script) as job:
        agents_of(here, "behind", job)
        move(here, "behind", "node1")
        job.wait_for(MOVED)
        drained = here.regrow("drain", "behind", "node2", "--grace", "10min")
        assert drained.returncode == 0, drained.stderr
        step = json.loads(here.regrow("status", "behind", "--json").stdout)["step"]
        job.wait_for(f"step {step + 8}\n")
        assert job.output.count(MOVED) == 1, "the slots of node1 are not free yet"
        lingers.unlink()
        job.wait_for(MOVED, times=2)
        outcome = end(here, "behind", job)
    assert [(each.kind, each.faults, each.steps_lost) for each in outcome.ledger.incidents] == [
        ("move", 0, 0),
        ("preempt", 0, 0),
    ]
    assert "was lost" not in outcome.output, outcome.output
    assert_equal(outcome, undisturbed, lost={0, 1, 2, 3})
    assert nodes_of(here, "behind")[-1] == ["node0", "node0", "node1", "node1"]
    here.assert_nothing_left()


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "fault"),
    [
        ("a newcomer that forms", Fault(2, 1, "form")),
        ("a newcomer that is hydrated", Fault(3, 1, "hydrate")),
        ("a survivor that forms", Fault(0, 1, "form")),
        ("a holder during hydration", Fault(1, 1, "hydrate")),
    ],
)
def test_a_kill_in_the_middle_of_a_move_is_mended(here: Site, undisturbed: Outcome, case: str, fault: Fault) -> None:
    name = case.replace(" ", "-")
    (here.folder / f"{name}.toml").write_text(fault.toml())
    with start(here, name, *SPARED, "--fault-plan", f"{name}.toml") as job:
        agents_of(here, name, job)
        move(here, name, "node1")
        job.wait_for("goes on after")
        outcome = end(here, name, job)
    assert_equal(outcome, undisturbed, lost={0, 1, 2, 3})
    assert sum(incident.faults for incident in outcome.ledger.incidents) == 1
    assert nodes_of(here, name)[-1] == ["node0", "node0", "node2", "node2"]


@pytest.mark.full
def test_all_nodes_are_restarted_in_turns_and_the_bits_are_the_same(here: Site, undisturbed: Outcome) -> None:
    with start(here, "rolling", *SPARED) as job:
        agents = agents_of(here, "rolling", job)
        job.wait_for("step 10\n")
        (spare,) = set(agents_below(job)) - set(agents.values())
        pids = json.dumps({**agents, "node2": spare})
        kill = f"import json, os; os.kill(json.loads({pids!r})[os.environ['REGROW_NODE']], {int(signal.SIGKILL)})"
        restart = f"{shlex.quote(sys.executable)} -c {shlex.quote(kill)}"
        done = here.regrow("rolling-restart", "rolling", "--run", restart, "--patience", "2min")
        assert done.returncode == 0, done.stdout + done.stderr
        outcome = end(here, "rolling", job)
    assert "all 3 nodes are restarted" in done.stdout
    assert done.stdout.index("1 of 3: node2") < done.stdout.index("2 of 3: node0") < done.stdout.index("3 of 3: node1")
    assert_equal(outcome, undisturbed, lost={0, 1, 2, 3})
    assert not (here.home / "jobs" / "rolling" / "rolling-restart.json").exists()
