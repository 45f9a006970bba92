"""Kills, stops, signals to all and logouts drawn at random, for jobs with and without a disk: nothing is lost.

A job that ends with 0 has the losses of the run without faults, bit by bit. One that ends otherwise is started again by
the same command, goes on from no older state than torchrun's checkpoint would have been, and ends so too.
`REGROW_SOAK_KILLS` says how many kills there are at least, `REGROW_SOAK_SEED` which; `REGROW_SOAK_LOG` names a file for
a line of each job.
"""

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from tests.process.faulting import ENDING, STEPS, Act, Attempt, Harassed, Plan, drawn
from tests.process.launching import SHARED, Site, site
from tests.process.training import Outcome, alive_and_ahead, outcome_of, train

from regrow.core.exit_codes import RUN_AGAIN, SCRIPT_ERROR

KILLS = int(os.environ.get("REGROW_SOAK_KILLS", "1000"))
SEED = int(os.environ.get("REGROW_SOAK_SEED", "1"))
LOG = os.environ.get("REGROW_SOAK_LOG", "")
STROKES = 30
"""Acts and faults of one job."""
SLACK_S = 0.5
"""Time before a world is formed again in which a worker may be killed without being seen to be gone by then."""
PATIENCE = 240.0


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Plan], Outcome]]:
    """The run without faults of a script in a world, made when it is asked for."""
    made: dict[tuple[str, int], Outcome] = {}
    with site(tmp_path_factory.mktemp("calm")) as here:

        def of(plan: Plan) -> Outcome:
            key = plan.script, plan.world
            if key not in made:
                name = f"{Path(plan.script).stem}-{plan.world}"
                made[key] = train(here, name, world=plan.world, steps=STEPS, script=plan.script, extra=plan.extra[2:])
                assert made[key].code == 0, made[key].output
            return made[key]

        yield of
        here.assert_nothing_left()


@pytest.fixture
def here() -> Iterator[Site]:
    # Short: sockets lie in a folder below it.
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    with site(folder) as made:
        yield made
    shutil.rmtree(folder)


def count() -> int:
    """Number of jobs: a job's strokes are kills, but for some."""
    return -(-KILLS // 15)


@pytest.mark.soak
@pytest.mark.timeout(20 * PATIENCE)
@pytest.mark.parametrize("place", range(count()))
def test_nothing_is_lost_whatever_strikes(here: Site, calm: Callable[[Plan], Outcome], place: int) -> None:
    plan = drawn(SEED, place, STROKES)
    name = f"faults-{SEED}-{place}"
    wanted = calm(plan)
    shared = shared_memory()
    job = Harassed(here, name, plan, PATIENCE)
    failure = ""
    try:
        job.run()
        done = outcome_of(here, name, plan.world, job.attempts[-1].code or 0, "")
        done.ledger = job.attempts[-1].ledger
        failure = judged(plan, job.attempts, done, wanted) or left(here, job, shared)
    except AssertionError as error:
        failure = str(error)[:3000]
        raise
    finally:
        tell(name, plan, job, failure)
    assert not failure, f"{failure}\n{job.told()}"


def shared_memory() -> set[str]:
    """Files in shared memory, without those that name another living process."""
    return {path.name for path in SHARED.iterdir()}


def judged(plan: Plan, attempts: list[Attempt], done: Outcome, wanted: Outcome) -> str:
    """Errors of a job; empty: none."""
    found = [said for at, attempt in enumerate(attempts) if (said := ended_rightly(plan, attempts, at, attempt))]
    losses: dict[tuple[int, int], float] = {}
    for attempt in attempts:
        for step, ranks in attempt.ledger.commits.items():
            for rank, commit in ranks.items():
                if commit.metrics["loss"] != wanted.losses[step, rank]:
                    found.append(f"{attempt.name}: another loss at step {step} of rank {rank}")
                losses[step, rank] = commit.metrics["loss"]
        if attempt.ledger.divergences:
            found.append(f"{attempt.name}: replicas differ")
        for incident in attempt.ledger.incidents:
            ahead = incident.steps_lost and alive_and_ahead(attempt.ledger, incident)
            if incident.rung not in ("restart", "all") and (ahead or incident.steps_lost > incident.faults):
                found.append(f"{attempt.name}: {incident}")
    missing = wanted.losses.keys() - losses.keys()
    if any({Act.AGENT, Act.POWER, Act.TERM}.intersection(attempt.struck) for attempt in attempts):
        # An agent that is killed has not written down what its workers have told it last. A rank that dies behind a
        # step's last collective has not committed it, and a job that is told to end then saves what another has made.
        missing -= {(step, rank) for step, rank in missing if any(step == other for other, _ in losses)}
    missing -= {(step, rank) for step, rank in missing if step in unwritten(attempts)}
    if missing:
        found.append(f"never committed: {sorted(missing)[:5]} and so on, {len(missing)}")
    if done.finals != wanted.finals:
        found.append(f"other state: {done.finals} {wanted.finals}")
    if done.ledger.open_incidents:
        found.append(f"open: {done.ledger.open_incidents}")
    return "; ".join(found[:8])


def unwritten(attempts: list[Attempt]) -> set[int]:
    """Steps that may be in no record: an agent that is stopped when its launcher is killed writes no more lines."""
    steps: set[int] = set()
    for attempt, following in pairwise(each for each in attempts if each.ledger.commits):
        if {Act.LAUNCHER, Act.STOP_AGENT}.issubset(attempt.struck):
            steps.update(range(max(attempt.ledger.commits) + 1, min(following.ledger.commits)))
    return steps


def ended_rightly(plan: Plan, attempts: list[Attempt], at: int, attempt: Attempt) -> str:
    """Why an attempt may not have ended as it did, or begun where it did."""
    asked = ENDING.intersection(attempt.struck)
    before = max((each.saved for each in attempts[:at]), default=-1)
    first = min(attempt.ledger.commits, default=None)
    if plan.disk and first is not None and first < before:
        return f"{attempt.name} begins at {first}, and {before} was on disk"
    if attempt.code == 0:
        return ""
    gone = attempt.killed_since_it_stood(SLACK_S) >= plan.world
    if Act.TERM in asked and attempt.code == RUN_AGAIN:
        later = [each for each in attempts[at + 1 :] if each.ledger.commits]
        begins = min(later[0].ledger.commits) if later else STEPS
        ledger = attempt.ledger
        newest = ledger.generations[-1].generation if ledger.generations else None
        stood = [step for (step, _), made in ledger.history.items() if any(each.generation == newest for each in made)]
        had = min(attempt.asked, max(stood, default=-1))  # what was lost before is not the signal's
        if plan.disk and not gone and begins <= had:
            return f"{attempt.name} was told to end at {had}, and the next begins at {begins}"
        return ""
    if asked and attempt.code in (-9, RUN_AGAIN):
        return ""
    if not plan.disk and attempt.code in (SCRIPT_ERROR, RUN_AGAIN):
        if Act.AGENT in attempt.struck and plan.nodes == 1:
            return ""
        if "the last copy of the training state" in attempt.said and gone:
            return ""
    return f"{attempt.name} ended with {attempt.code} after {[str(act) for act in attempt.struck]}"


def left(here: Site, job: Harassed, shared: set[str]) -> str:
    """Things that a job has left behind."""
    here.assert_no_process_left()
    here.runtime.mkdir(exist_ok=True)
    power = any(Act.POWER in attempt.struck for attempt in job.attempts)
    found = [*here.runtime.iterdir(), *here.caches()]
    tmp = here.folder / "tmp"
    found += [path for path in tmp.iterdir() if not path.name.startswith("torchinductor")] if tmp.exists() else []
    found += [SHARED / name for name in shared_memory() - shared if "regrow" not in name and not owned(name)]
    disk = here.folder / "disk"
    found += [path for path in disk.iterdir() if not path.name.startswith("step-")] if disk.exists() else []
    if found and power:  # nobody was there to remove it; the next run does what it can
        found = []
    return f"left: {found}" if found else ""


def owned(name: str) -> bool:
    """True if it names a process that lives: another job's."""
    numbers = [int(part) for part in name.replace("-", "_").split("_") if part.isdigit()]
    return any(Path(f"/proc/{number}").exists() for number in numbers)


def tell(name: str, plan: Plan, job: Harassed, failure: str) -> None:
    """A line for whoever adds up."""
    if not LOG:
        return
    incidents = [incident for each in job.attempts for incident in each.ledger.incidents]
    line = {
        "name": name,
        "kills": job.kills,
        "seconds": round(job.seconds),
        "acts": Counter(str(act) for each in job.attempts for act in each.struck),
        "stages": Counter(str(fault.stage) for each in job.attempts for fault in each.ledger.injected),
        "codes": [each.code for each in job.attempts],
        "rungs": Counter(incident.rung for incident in incidents),
        "lost": [
            [incident.rung, incident.kind, incident.ranks, incident.step, incident.faults, incident.steps_lost]
            for incident in incidents
            if incident.steps_lost and incident.rung != "restart"
        ],
        "script": [plan.script, plan.world, plan.nodes, plan.standbys, plan.disk, plan.failing, plan.load],
        "failure": failure,
    }
    with open(LOG, "a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")
    if failure:
        folder = Path(LOG).with_suffix(".failed") / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "told").write_text(job.told())
        for each in job.attempts:
            if job_folder(job, each).exists():
                shutil.copytree(job_folder(job, each), folder / each.name, dirs_exist_ok=True)


def job_folder(job: Harassed, attempt: Attempt) -> Path:
    """Folder of its records."""
    return job.here.home / "jobs" / attempt.name
