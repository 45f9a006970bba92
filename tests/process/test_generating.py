"""Bodies that sample from a sharded model, killed in the sampling: the same tokens, rewards and state."""

from collections.abc import Iterator

import pytest
from tests.process.launching import Site, site
from tests.process.training import Fault, Outcome, assert_equal, train

STEPS = 6
KILLS = ("generate 1 2", "generate 0 3", "reward 1 1", "update 0 4")
"""Steps with an even number sample by shards, the others with all weights summoned."""
FAULTS = [Fault(0, 5, "backward")]
LLAMA = ("transformers.models.llama.modeling_llama", "transformers.generation.utils")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("generating")) as made:
        yield made
        made.assert_nothing_left()


def run(here: Site, name: str, *flags: str, world: int, extra: tuple[str, ...], kills: tuple[str, ...] = ()) -> Outcome:
    (here.folder / f"{name}.kills").write_text("\n".join(kills))
    faults = FAULTS if kills else []
    outcome = train(
        here, name, *flags, world=world, steps=STEPS, faults=faults, extra=extra, script="train_generating.py"
    )
    assert outcome.code == 0, outcome.output
    died = {path.suffix for path in here.folder.glob(f"{name}.died-*")}
    assert died == {f".died-{kill.replace(' ', '-')}" for kill in kills}, outcome.output
    return outcome


def sampled(outcome: Outcome) -> dict[tuple[int, int], tuple[float, float]]:
    """By step and rank, the sampled tokens as a sum over places, and their reward."""
    return {
        (step, rank): (commit.metrics["tokens"], commit.metrics["reward"])
        for step, ranks in outcome.ledger.commits.items()
        for rank, commit in ranks.items()
        if "tokens" in commit.metrics
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "flags", "extra"),
    [
        pytest.param(2, ("--buddy-every", "1"), (), id="fsdp2"),
        pytest.param(4, (), (), id="hsdp"),
        pytest.param(4, (), ("--llama",), id="hsdp, transformers' generate"),
    ],
)
def test_what_a_sharded_model_samples_is_sampled_again_where_ranks_die_in_it(
    here: Site, world: int, flags: tuple[str, ...], extra: tuple[str, ...]
) -> None:
    at = here.importing(LLAMA) if extra else here
    name = f"{world}{len(extra)}"
    calm = run(at, f"calm-{name}", *flags, world=world, extra=extra)
    assert len(set(sampled(calm).values())) > STEPS, "all ranks sampled the same"
    struck = run(at, f"struck-{name}", *flags, world=world, extra=extra, kills=KILLS)
    assert sampled(struck) == {at: calm_said for at, calm_said in sampled(calm).items() if at in sampled(struck)}
    assert_equal(struck, calm, faults=len(FAULTS), lost=1 if flags else None)
