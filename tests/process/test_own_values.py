"""Values that each rank has for itself come through kills, by what its agent finds of them; else they are told."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.process.elastic import Elastic
from tests.process.launching import Site, site
from tests.process.training import SCRIPTS, Fault, Outcome, assert_equal, outcome_of, train

from regrow.core.records import IncidentClosed
from regrow.membership.view import JobView

NAMES = {"running in train()", "worst in train()", "meter.sum"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("own")) as made:
        yield made
        made.assert_nothing_left()


def run(here: Site, name: str, world: int, *flags: str, faults: list[Fault] | None = None, nodes: int = 1) -> Outcome:
    known = () if "--no-audit" in flags else ("--known",)
    script = "train_own_values.py"
    return train(here, name, *flags, world=world, steps=16, faults=faults, script=script, extra=known, nodes=nodes)


@pytest.fixture(scope="module")
def calm(here: Site) -> dict[int, Outcome]:
    return {world: run(here, f"calm{world}", world) for world in (2, 3)}


def lacking(outcome: Outcome, incident: IncidentClosed, faults: list[Fault]) -> set[int]:
    """Ranks of which nobody knows for certain what they had at the step that goes on: it had not begun there."""
    adopted = {rank for step, rank in adoptions(outcome) if step == incident.step - 1}
    return adopted | {each.rank for each in faults if each.rank in incident.ranks and each.step == incident.step - 1}


def adoptions(outcome: Outcome) -> set[tuple[int, int]]:
    """(step, rank) of what survivors got from others who were a step ahead, as may come of a kill among three."""
    return {at for at, commits in outcome.ledger.history.items() if any(commit.adopted for commit in commits)}


def without_sums(outcome: Outcome) -> Outcome:
    return replace(outcome, finals={rank: {"digest": final["digest"]} for rank, final in outcome.finals.items()})


def more(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("world", "faults", "flags", "nodes"),
    [
        (2, [Fault(0, 8, "backward"), Fault(1, 11, "update")], (), 1),
        (3, [Fault(2, 8, "backward"), Fault(2, 11, "forward")], (), 1),
        more(2, [Fault(1, 8, "begin"), Fault(1, 11, "commit")], ("--standby", "1"), 1),
        more(3, [Fault(1, 8, "backward"), Fault(1, 8, "hydrate"), Fault(2, 12, "begin")], ("--standby", "1"), 1),
        more(2, [Fault(0, 8, "forward"), Fault(1, 8, "forward", "exception"), Fault(1, 12, "reduce")], (), 2),
    ],
    ids=["two ranks", "three ranks", "standbys", "twice", "two nodes"],
)
def test_sums_of_each_ranks_own_are_those_of_the_undisturbed_run(
    here: Site, calm: dict[int, Outcome], world: int, faults: list[Fault], flags: tuple[str, ...], nodes: int
) -> None:
    name = "-".join([f"struck{world}", *(each.at for each in faults)])
    struck = run(here, name, world, *flags, faults=faults, nodes=nodes)
    seen = without_sums if adoptions(struck) else replace
    assert_equal(seen(struck), seen(calm[world]), faults=len(faults))
    for incident in struck.ledger.incidents:
        ranks = lacking(struck, incident, faults)
        assert incident.not_kept == ({name: sorted(ranks) for name in NAMES} if ranks else {}), incident
    assert ("may have another's values" in struck.output) == any(i.not_kept for i in struck.ledger.incidents)


@pytest.mark.full
def test_they_go_along_when_ranks_move_and_when_their_node_is_drained(here: Site) -> None:
    """Moves come at a boundary: the values are those with which the next step would have begun."""
    steps, spared = 60, ("--local-nodes", "3", "--spares", "1", "--nproc-per-node", "1")
    extra = ("--known", "--pace", "1.0")
    (here.folder / "hurry").touch()
    still = train(here, "still", world=2, steps=steps, script="train_own_values.py", extra=extra)
    (here.folder / "hurry").unlink()
    words = (str(SCRIPTS / "train_own_values.py"), "--steps", str(steps), "--out", str(here.folder / "moves.out"))
    with here.start("run", "--job", "moves", *spared, *words, *extra) as job:
        seen = Elastic(here, "moves", job)
        for times, node in enumerate(("node1", "node0"), 1):
            seen.until(lambda view: view.step > 6 and _warm(view) > 0, "a standby on the spare node")
            assert here.regrow("move", "moves", node).returncode == 0
            job.wait_for("moved at step", times)
        seen.until(lambda view: _warm(view) > 0, "a standby on the spare node")
        seen.drain("node2", grace=60.0)
        job.wait_for("moved at step", 3)
        (here.folder / "hurry").touch()
        code = job.wait()
        moved = outcome_of(here, "moves", 2, code, job.output)
    assert_equal(moved, still, faults=0)
    assert [(each.kind, each.not_kept) for each in moved.ledger.incidents] == [
        ("move", {}),
        ("move", {}),
        ("preempt", {}),
    ]


def _warm(view: JobView) -> int:
    """Number of standbys that are ready on nodes without ranks."""
    busy = {worker.node for worker in view.ranks}
    return sum(each.stage == "ready" and each.node not in busy for each in view.standbys)


def test_those_that_nobody_has_looked_for_are_told_where_holders_do_not_have_them_alike(here: Site) -> None:
    struck = run(here, "untold", 3, "--no-audit", faults=[Fault(1, 8, "backward")])
    assert struck.code == 0, struck.output
    (incident,) = struck.ledger.incidents
    assert incident.not_kept == {name: [1] for name in NAMES}
    assert "rank 1 may have another's values in `meter.sum`, `running in train()`" in struck.output
