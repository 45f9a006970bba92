"""Exchanges between ranks before their loop are repeated to a newcomer: losses are bitwise the same.

In the script a newcomer's own values are others, so that an answer which is not the first ranks' changes every loss.
"""

import os
import signal
from collections.abc import Iterator

import pytest
from tests.process.elastic import Elastic
from tests.process.launching import Site, site
from tests.process.test_nodes import agents_of
from tests.process.training import SCRIPTS, Fault, Outcome, assert_equal, outcome_of, train

from regrow.core.records import Noted, ReplacementJudged
from regrow.observe.ledger import read_records

SCRIPT = str(SCRIPTS / "train_set_up.py")
ALIKE = "broadcast,all_reduce,largest,broadcast_object_list,barriers,asynchronous,coalesced,functional"
GATHERED = "all_gather,all_gather_into_tensor,all_gather_object"
OWN = (
    "gather,gather_object,scatter,scatter_object_list,reduce,reduce_scatter,reduce_scatter_tensor,all_to_all,"
    "all_to_all_single,send_and_receive,receive_from_any,batched"
)
ALL = f"{ALIKE},{GATHERED},{OWN},groups,mesh"
STEPS = 12
KILLS = [Fault(1, 4), Fault(0, 8)]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("set_up")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> dict[tuple[str, int], Outcome]:
    """By what is called, and the size of the world; filled as it is asked for."""
    return {}


def calm(here: Site, known: dict[tuple[str, int], Outcome], calls: str, world: int) -> Outcome:
    if (calls, world) not in known:
        name = f"calm-{len(known)}"
        outcome = train(here, name, world=world, steps=STEPS, script="train_set_up.py", extra=("--calls", calls))
        assert outcome.code == 0, outcome.output
        known[calls, world] = outcome
    return known[calls, world]


@pytest.mark.parametrize(
    ("calls", "world", "flags"),
    [
        pytest.param(ALL, 4, ("--standby", "0"), id="every kind, forks"),
        pytest.param(ALIKE, 2, ("--standby", "1"), id="alike, standbys"),
        pytest.param(ALL, 4, ("--standby", "1"), id="every kind, standbys"),
        pytest.param(ALL, 4, ("--standby", "1", "--warmth", "imports"), id="every kind, standbys before the script"),
    ],
)
def test_who_takes_a_rank_hears_what_that_rank_has_heard(
    here: Site, undisturbed: dict[tuple[str, int], Outcome], calls: str, world: int, flags: tuple[str, ...]
) -> None:
    disturbed = train(
        here,
        f"kills-{world}-{'-'.join(flags).strip('-')}-{len(calls)}",
        *flags,
        world=world,
        steps=STEPS,
        faults=KILLS,
        script="train_set_up.py",
        extra=("--calls", calls),
    )
    assert_equal(disturbed, calm(here, undisturbed, calls, world), faults=len(KILLS))


@pytest.mark.parametrize(
    ("nodes", "flags"),
    [
        pytest.param(2, (), id="its node starts again"),
        pytest.param(3, ("--spares", "1"), id="a spare node"),
        pytest.param(3, ("--spares", "1", "--standby", "1"), id="standbys of a spare node"),
    ],
)
@pytest.mark.parametrize("lost", ["node0", "node1"])
def test_what_a_lost_node_has_heard_is_known_elsewhere(
    here: Site, undisturbed: dict[tuple[str, int], Outcome], nodes: int, flags: tuple[str, ...], lost: str
) -> None:
    expected = calm(here, undisturbed, ALL, 4)
    name = f"{lost}-{nodes}-{len(flags)}"
    (here.folder / "hurry").unlink(missing_ok=True)
    words = ("--calls", ALL, "--steps", str(STEPS), "--pace", "0.3", "--out", str(here.folder / f"{name}.out"))
    run = ("run", "--job", name, "--local-nodes", str(nodes), "--nproc-per-node", "2", *flags)
    with here.start(*run, SCRIPT, *words) as job:
        agents = agents_of(here, name, job)
        os.kill(agents[lost], signal.SIGKILL)
        job.wait_for("goes on after")
        (here.folder / "hurry").touch()
        code = job.wait()
    outcome = outcome_of(here, name, 4, code, job.output)
    assert code == 0, job.output
    assert outcome.finals == expected.finals
    assert {at: loss for at, loss in outcome.losses.items() if expected.losses[at] != loss} == {}


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        pytest.param(ALIKE, "", id="alike answers are right in a larger world"),
        pytest.param("broadcast,all_gather", "all_gather at train_set_up.py:", id="a gathered one is of one size"),
        pytest.param("scatter", "scatter at train_set_up.py:", id="a rank's own is of its world"),
    ],
)
def test_a_grown_world(here: Site, calls: str, why: str) -> None:
    name = f"grown-{calls.partition(',')[0]}-{len(calls)}"
    (here.folder / "hurry").unlink(missing_ok=True)
    words = (
        "--any-world",
        "--calls",
        calls,
        "--steps",
        "60",
        "--pace",
        "0.1",
        "--out",
        str(here.folder / f"{name}.out"),
    )
    run = ("run", "--job", name, "--nproc-per-node", "2", "--replicas", "1:3")
    with here.start(*run, SCRIPT, *words) as job:
        job.wait_for("step 2\n")
        answer = Elastic(here, name, job).scale(3)
        assert answer.accepted is not bool(why)
        assert why in answer.reason
        if not why:
            job.wait_for("grown from 2 to 3")
        (here.folder / "hurry").touch()
        code = job.wait()
    outcome = outcome_of(here, name, 3, code, job.output)
    assert code == 0, job.output
    assert why or len({str(final["heard"]) for final in outcome.finals.values()}) == 1, outcome.finals
    assert len(outcome.finals) == (2 if why else 3)


@pytest.mark.parametrize(
    ("calls", "extra", "why"),
    [
        pytest.param(
            "all_reduce,broadcast", ("--newcomers-skip",), "it calls broadcast at train_set_up.py:", id="other"
        ),
        pytest.param("broadcast,broadcast", ("--newcomers-skip",), "it did not call broadcast", id="fewer"),
    ],
)
def test_a_newcomer_that_calls_something_else_is_refused_by_line(
    here: Site, calls: str, extra: tuple[str, ...], why: str
) -> None:
    name = f"other-{len(calls)}"
    outcome = train(
        here,
        name,
        "--standby",
        "0",
        world=2,
        steps=STEPS,
        faults=[Fault(1, 4)],
        script="train_set_up.py",
        extra=("--calls", calls, *extra),
    )
    judged = [line for line in read_records(here.home / "jobs" / name) if isinstance(line, ReplacementJudged)]
    assert any(why in line.reason for line in judged), outcome.output


def test_what_is_too_large_is_refused_at_the_start_and_training_goes_on(here: Site) -> None:
    outcome = train(here, "large", world=2, script="train_set_up.py", extra=("--calls", "large", "--mebibytes", "80"))
    judged = [line for line in read_records(here.home / "jobs" / "large") if isinstance(line, ReplacementJudged)]
    assert outcome.code == 0, outcome.output
    assert {line.reason.partition(":")[0] for line in judged} == {"broadcast at train_set_up.py"}
    assert {line.reason.rpartition("makes ")[2] for line in judged} == {
        "80 MiB of answers that all ranks share before the loop; 64 MiB are noted"
    }


def test_large_answers_come_in_pieces_and_parameters_need_none(here: Site) -> None:
    """4 MiB of data, and 81 MiB of parameters that a wrapper of the script's own brings to all ranks."""
    calls = ("--calls", "large,own_wrapper", "--mebibytes", "4", "--size", "4600")
    expected = train(here, "parts-calm", world=2, steps=6, script="train_set_up.py", extra=calls)
    outcome = train(
        here, "parts", "--standby", "0", world=2, steps=6, faults=[Fault(1, 3)], script="train_set_up.py", extra=calls
    )
    assert_equal(outcome, expected, faults=1)


def test_when_all_start_again_they_speak_again(here: Site, undisturbed: dict[tuple[str, int], Outcome]) -> None:
    expected = calm(here, undisturbed, ALIKE, 2)
    outcome = train(
        here,
        "again",
        "--checkpoint-dir",
        str(here.folder / "again"),
        "--checkpoint-every",
        "1s",
        "--standby",
        "1",
        world=2,
        steps=STEPS,
        faults=[Fault(0, 4), Fault(1, 4, "form"), Fault(1, 8)],  # rank 1 is the last one with the state
        script="train_set_up.py",
        extra=("--calls", ALIKE),
    )
    assert outcome.code == 0, outcome.output
    assert outcome.finals == expected.finals
    assert any(
        "all workers are started again" in line.text
        for line in read_records(here.home / "jobs" / "again")
        if isinstance(line, Noted)
    )
