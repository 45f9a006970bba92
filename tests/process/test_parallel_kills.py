"""Every parallelism goes straight through kills: FSDP2, HSDP, tensor and pipeline parallel, and mixes of them."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from tests.compiling import COMPILER
from tests.process.disk_watch import DiskWatch, watched
from tests.process.kill_lists import AGAIN, EVERY_STAGE_AND_RANK, ROLL, STEPS, WORLD
from tests.process.launching import Site, site
from tests.process.training import Fault, Outcome, assert_equal, train

REPLICATED = ("hsdp", "tp_dp", "pp_dp")
QUICKER = ("hsdp", "pp_dp", pytest.param("tp_dp", marks=pytest.mark.soak))
"""The same where tensor parallel adds least: its newcomers take longest to build, and others of these tests have it."""
SCRIPT = "train_parallel.py"
Reference = Callable[..., Outcome]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("parallel")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> Reference:
    """The run of a mode that nobody disturbs; made once."""
    known: dict[tuple[str, ...], Outcome] = {}

    def of(mode: str, *more: str) -> Outcome:
        if (mode, *more) not in known:
            outcome = run(here, "-".join(["undisturbed", mode, *more]), mode, more=more)
            assert outcome.code == 0, outcome.output
            assert len(outcome.losses) == WORLD * STEPS
            known[mode, *more] = outcome
        return known[mode, *more]

    return of


def run(
    here: Site,
    name: str,
    mode: str,
    *flags: str,
    faults: list[Fault] | None = None,
    more: tuple[str, ...] = (),
    nodes: int = 1,
) -> Outcome:
    extra = ("--mode", mode, *more)
    if "--compile" in more:
        here = here.importing(COMPILER)
    return train(here, name, *flags, world=WORLD, steps=STEPS, faults=faults, extra=extra, script=SCRIPT, nodes=nodes)


@contextmanager
def checkpoints(here: Site, name: str) -> Iterator[tuple[str, DiskWatch]]:
    """A folder for durable checkpoints, and who reads in it."""
    folder = here.folder / f"{name}.checkpoints"
    folder.mkdir()
    with watched(folder) as disk:
        yield str(folder), disk
        disk.update()
        assert disk.opens != {}, "nothing was written there at all: the watch proves nothing"


@pytest.mark.parametrize("mode", REPLICATED)
def test_any_rank_killed_at_every_stage(here: Site, undisturbed: Reference, mode: str) -> None:
    reference, faults = undisturbed(mode), EVERY_STAGE_AND_RANK
    with checkpoints(here, f"{mode}-stages") as (folder, disk):
        outcome = run(here, f"{mode}-stages", mode, "--checkpoint-dir", folder, faults=faults)
    assert_equal(outcome, reference, faults=len(faults))
    assert disk.reads == {}


@pytest.mark.parametrize("mode", QUICKER)
def test_killed_twice_in_a_row_and_during_a_recovery(here: Site, undisturbed: Reference, mode: str) -> None:
    assert_equal(run(here, f"{mode}-again", mode, faults=AGAIN), undisturbed(mode), faults=len(AGAIN))


@pytest.mark.parametrize("mode", REPLICATED)
def test_survivors_roll_forward_a_step_that_another_has_committed(
    here: Site, undisturbed: Reference, mode: str
) -> None:
    outcome = run(here, f"{mode}-roll", mode, faults=ROLL)
    assert_equal(outcome, undisturbed(mode), faults=len(ROLL))
    assert [incident.steps_lost for incident in outcome.ledger.incidents] == [0] * len(outcome.ledger.incidents)


@pytest.mark.parametrize("mode", QUICKER)
def test_each_rank_has_a_standby_of_its_own(here: Site, undisturbed: Reference, mode: str) -> None:
    faults = [Fault(rank, 8 + 6 * rank, "reduce") for rank in range(WORLD)]
    outcome = run(here, f"{mode}-standby", mode, "--standby", str(WORLD), faults=faults)
    assert_equal(outcome, undisturbed(mode), faults=len(faults))
    assert "standby" in {incident.rung for incident in outcome.ledger.incidents}


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


@pytest.mark.parametrize(
    "more", [("--clip",), ("--checkpoint-activations",), pytest.param(("--compile",), marks=needs_compiler)]
)
@pytest.mark.parametrize("each", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_clipping_recomputation_and_compiled_blocks(
    here: Site, undisturbed: Reference, more: tuple[str, ...], each: int
) -> None:
    """At each second stage, and in `make soak` at all."""
    reference, faults = undisturbed("hsdp", *more), EVERY_STAGE_AND_RANK[each - 1 :: each]
    assert_equal(run(here, f"hsdp{more[0]}-{each}", "hsdp", faults=faults, more=more), reference, faults=len(faults))


@pytest.mark.parametrize(
    ("mode", "every"), [("fsdp2", 1), ("fsdp2", 4), ("tp_dp", 1), pytest.param("tp_dp", 4, marks=pytest.mark.soak)]
)
def test_shards_without_a_replica_come_from_copies(here: Site, undisturbed: Reference, mode: str, every: int) -> None:
    """Two nodes of two ranks; the killed ranks' shards are in the memory of their own node's agent."""
    more = ("--tp-fsdp",) if mode == "tp_dp" else ()
    reference, faults = undisturbed(mode, *more), EVERY_STAGE_AND_RANK
    name, flags = f"{mode}-copies-{every}", ("--buddy-every", str(every))
    with checkpoints(here, name) as (folder, disk):
        outcome = run(here, name, mode, *flags, "--checkpoint-dir", folder, faults=faults, more=more, nodes=2)
    assert_equal(outcome, reference, faults=len(faults), lost=every)
    assert disk.reads == {}


def test_killed_again_while_going_back(here: Site, undisturbed: Reference) -> None:
    faults = [
        Fault(2, 9, "backward"),
        Fault(1, 9, "hydrate"),
        Fault(0, 22, "vote", "pause"),
        Fault(3, 22, "commit"),
        Fault(1, 27, "reduce"),
        Fault(2, 27, "form"),
    ]
    outcome = run(here, "fsdp2-again", "fsdp2", "--buddy-every", "3", faults=faults, nodes=2)
    assert_equal(outcome, undisturbed("fsdp2"), faults=len(faults), lost=3)


def test_the_last_copy_of_a_shard_lost_without_a_checkpoint_ends_the_job(here: Site) -> None:
    outcome = run(here, "fsdp2-nothing", "fsdp2", faults=[Fault(2, 5, "backward")])
    assert outcome.code == 1
    assert "the state of rank 2 is held by no remaining worker" in outcome.output
    assert "--checkpoint-dir" in outcome.output
