"""World-invariant mode: any number of replicas ends with the same bits; with dropout, clipping, AdamW, a schedule."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.process.launching import Site, site
from tests.process.training import SCRIPTS, Fault, Outcome, assert_equal, train

SCRIPT, STEPS = "train_micro.py", 18
INVARIANT = ("--invariant", "--tokens", "--microbatches", "7")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("invariant")) as made:
        yield made
        made.assert_nothing_left()


def run(here: Site, name: str, world: int, *more: str, flags: tuple[str, ...] = (), **options: object) -> Outcome:
    outcome = train(here, name, *flags, world=world, steps=STEPS, script=SCRIPT, extra=more, **options)  # type: ignore[arg-type]
    assert outcome.code == 0, outcome.output
    return outcome


def state(outcome: Outcome) -> set[str]:
    """The digests of all ranks' parameters, optimizer and schedule."""
    return {str(final["digest"]) for final in outcome.finals.values()}


def curve(outcome: Outcome) -> list[set[float]]:
    """Losses that the ranks have committed, for each step."""
    return [{loss for (at, _), loss in outcome.losses.items() if at == step} for step in range(STEPS)]


@pytest.fixture(scope="module")
def alone(here: Site) -> Outcome:
    return run(here, "alone", 1, "--mode", "plain", *INVARIANT)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_loss_and_the_final_state_are_the_same_in_any_world(here: Site, alone: Outcome, world: int) -> None:
    outcome = run(here, f"ddp-{world}", world, *INVARIANT)
    assert len(outcome.losses) == world * STEPS
    assert curve(outcome) == curve(alone)
    assert state(outcome) == state(alone)


def test_the_default_mode_is_equal_only_nearly(here: Site, alone: Outcome) -> None:
    """Show that the test above sees the difference that the order of a sum makes."""
    outcome = run(here, "default", 3, *INVARIANT[1:])
    assert state(outcome) != state(alone)


def test_hsdp_over_its_replicate_dimension(here: Site) -> None:
    one, two, three = (
        run(here, f"hsdp-{replicas}", 2 * replicas, "--mode", "hsdp", *INVARIANT) for replicas in (1, 2, 3)
    )
    assert curve(one) == curve(two) == curve(three)
    assert all(len(losses) == 1 for losses in curve(three))
    # Two shards, so two digests.
    assert len(state(one)) == 2
    assert state(one) == state(two) == state(three)


def test_kills_change_no_bit(here: Site, alone: Outcome) -> None:
    faults = [Fault(0, 3, "forward"), Fault(2, 6, "reduce"), Fault(1, 9, "update"), Fault(0, 12, "commit")]
    outcome = run(here, "killed", 3, *INVARIANT, "--die", "1:5:1", flags=("--standby", "1"), faults=faults)
    assert (here.folder / "killed.died").exists()
    undisturbed = run(here, "undisturbed", 3, *INVARIANT)
    assert_equal(outcome, undisturbed, faults=len(faults))
    assert curve(outcome) == curve(alone)
    assert state(outcome) == state(alone)


def test_kills_in_a_sharded_world_change_no_bit(here: Site) -> None:
    undisturbed = run(here, "hsdp-undisturbed", 4, "--mode", "hsdp", *INVARIANT)
    faults = [Fault(0, 6, "reduce"), Fault(3, 9, "vote"), Fault(2, 12, "backward")]
    outcome = run(here, "hsdp-killed", 4, "--mode", "hsdp", *INVARIANT, "--die", "1:3:1", faults=faults)
    assert_equal(outcome, undisturbed, faults=len(faults))


def test_another_launcher_without_recovery_gives_the_same(here: Site, alone: Outcome) -> None:
    """torchrun and gloo, which know no tree: by an all-to-all and an all-gather."""
    out = here.folder / "torchrun.out"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--standalone"]
    done = subprocess.run(
        [*launcher, str(SCRIPTS / SCRIPT), "--steps", str(STEPS), "--out", str(out), *INVARIANT],
        env=here.environment(),
        capture_output=True,
        text=True,
        timeout=here.patience,
    )
    assert done.returncode == 0, done.stderr
    assert not out.with_suffix(".groups").exists(), "its threads would outlive the interpreter"
    finals = [json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in range(3)]
    assert {final["digest"] for final in finals} == state(alone)
    assert [{final["losses"][step] for final in finals} for step in range(STEPS)] == curve(alone)


def test_running_statistics_are_refused_with_the_reason(here: Site) -> None:
    outcome = train(here, "statistics", world=2, steps=3, script=SCRIPT, extra=(*INVARIANT, "--norm", "batch"))
    assert outcome.code == 1
    assert "BatchNorm1d whose running statistics change in training" in outcome.output
