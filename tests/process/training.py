"""Running a training to its end, with and without faults, and comparing what came out bit by bit."""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from tests.process.launching import Site

from regrow.core.records import IncidentClosed
from regrow.observe.ledger import Ledger, read_records

SCRIPTS = Path(__file__).parents[1] / "scripts"


@dataclass(frozen=True)
class Fault:
    """A line of a fault plan."""

    rank: int
    step: int
    at: str = "forward"
    how: str = "sigkill"

    def toml(self) -> str:
        return f'[[fault]]\nrank = {self.rank}\nstep = {self.step}\nat = "{self.at}"\nhow = "{self.how}"\n'


@dataclass
class Outcome:
    """Result of one run: exit code, every committed loss, the final state of every rank."""

    code: int
    output: str
    ledger: Ledger
    finals: dict[int, dict[str, object]] = field(default_factory=dict)

    @property
    def losses(self) -> dict[tuple[int, int], float]:
        """(step, rank) to the committed loss."""
        return {
            (step, rank): commit.metrics["loss"]
            for step, ranks in self.ledger.commits.items()
            for rank, commit in ranks.items()
            if "loss" in commit.metrics
        }


def train(
    site: Site,
    name: str,
    *flags: str,
    world: int = 3,
    steps: int = 20,
    faults: list[Fault] | None = None,
    extra: tuple[str, ...] = (),
    script: str = "train_small.py",
    nodes: int = 1,
    env: dict[str, str] | None = None,
) -> Outcome:
    """Run a script under `regrow run` to its end, on `nodes` nodes of this machine."""
    words = ["run", "--job", name, "--nproc-per-node", str(world // nodes), *flags]
    if nodes > 1:
        words += ["--local-nodes", str(nodes)]
    if faults:
        plan = site.folder / f"{name}.toml"
        plan.write_text("\n".join(fault.toml() for fault in faults))
        words += ["--fault-plan", str(plan)]
    out = site.folder / f"{name}.out"
    done = site.regrow(*words, str(SCRIPTS / script), "--steps", str(steps), "--out", str(out), *extra, **(env or {}))
    return outcome_of(site, name, world, done.returncode, done.stdout + done.stderr)


def outcome_of(site: Site, name: str, world: int, code: int, output: str) -> Outcome:
    """Result of a run that had `--out NAME.out` in the site's folder."""
    finals = {}
    for rank in range(world):
        path = site.folder / f"{name}.{rank}.json"
        if path.exists():
            final = json.loads(path.read_text())
            # What a worker has seen itself is not the job's: a newcomer has not seen all.
            finals[rank] = {key: value for key, value in final.items() if key != "losses"}
    return Outcome(code, output, Ledger(read_records(site.home / "jobs" / name)), finals)


def assert_equal(
    disturbed: Outcome,
    undisturbed: Outcome,
    *,
    faults: int,
    missed: int = 0,
    lost: int | None = None,
    unsaid: Collection[tuple[int, int]] = (),
) -> None:
    """Bitwise the same, nothing done twice, and all faults but at most `missed` really happened.

    `lost`: how many committed steps each incident may have cost, where there is nobody to get newer state from.
    `unsaid`: (step, rank) of losses that may be nowhere, as of who died in its update on an accelerator.
    """
    assert disturbed.code == 0, disturbed.output
    assert faults - missed <= len(disturbed.ledger.injected) <= faults, disturbed.output
    assert disturbed.finals == undisturbed.finals
    assert sorted(undisturbed.losses.keys() - disturbed.losses.keys() - set(unsaid)) == [], (
        "losses that were never committed"
    )
    assert {at: loss for at, loss in disturbed.losses.items() if undisturbed.losses.get(at) != loss} == {}
    assert redone(disturbed.ledger) == []
    assert disturbed.ledger.open_incidents == {}
    assert [found.text for found in disturbed.ledger.divergences] == []
    if lost is not None:
        assert all(incident.steps_lost <= lost for incident in disturbed.ledger.incidents)
        return
    assert_only_the_dead_lose(disturbed.ledger)


def assert_only_the_dead_lose(ledger: Ledger) -> None:
    """A step that only the dead had committed runs again: they had not given its state to anybody. No other does."""
    for incident in ledger.incidents:
        assert incident.steps_lost <= 1, incident
        assert not incident.steps_lost or alive_and_ahead(ledger, incident) == [], incident


def alive_and_ahead(ledger: Ledger, incident: IncidentClosed) -> list[tuple[int, int]]:
    """(step, rank) of what survivors of an incident had committed, of the steps that ran again after it."""
    before = max(formed.generation for formed in ledger.generations if formed.generation < incident.generation)
    return [
        (step, rank)
        for (step, rank), commits in ledger.history.items()
        if step >= incident.step and rank not in incident.ranks
        for commit in commits
        if not commit.adopted and commit.generation == before
    ]


def redone(ledger: Ledger) -> list[tuple[int, int, int]]:
    """(step, rank, generation) of every commit of a step older than the state that its generation started with.

    A generation starts with the newest state that any survivor has. A commit that only dying workers had reached does
    not count: the state it made died with them.
    """
    started = {formed.generation: formed.step for formed in ledger.generations}
    return [
        (step, rank, commit.generation)
        for (step, rank), commits in ledger.history.items()
        for commit in commits
        if not commit.adopted and commit.generation in started and step < started[commit.generation]
    ]
