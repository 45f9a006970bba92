"""A corpus that is mapped is its own cache: no producer, no entries; and training goes through kills as ever."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.corpora import tiny_corpus
from tests.process.launching import Site, site
from tests.process.training import Fault, Outcome, assert_equal, train

STEPS, WORLD = 22, 3
STAGES = ("data", "forward", "backward", "reduce", "update", "commit")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("in-place")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def corpus(here: Site) -> Path:
    return tiny_corpus(here.folder / "corpus", 1700)


def _run(here: Site, name: str, corpus: Path, *flags: str, faults: list[Fault] | None = None) -> Outcome:
    extra = ("--corpus", str(corpus))
    return train(here, name, *flags, world=WORLD, steps=STEPS, faults=faults, extra=extra, script="train_global.py")


@pytest.mark.parametrize("flags", [(), ("--standby", "1")], ids=["fork", "standby"])
def test_kills_at_every_stage_change_nothing_and_nobody_makes_batches_ahead(
    here: Site, corpus: Path, flags: tuple[str, ...]
) -> None:
    name = f"killed-{len(flags)}"
    undisturbed = _run(here, f"{name}-not", corpus)
    assert undisturbed.code == 0, undisturbed.output
    faults = [Fault(at % WORLD, 2 + 2 * at, stage) for at, stage in enumerate(STAGES)]
    disturbed = _run(here, name, corpus, *flags, faults=faults)
    assert_equal(disturbed, undisturbed, faults=len(faults))
    assert not list((here.home / "jobs" / name).rglob("*producer*"))
    proof = here.regrow("data", "verify", name, "--against", f"{name}-not", "--json")
    assert proof.returncode == 0, proof.stdout + proof.stderr
    assert json.loads(proof.stdout)["verdict"] == "proven"


def test_a_corpus_that_was_damaged_ends_the_job_with_its_error(here: Site, tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path / "corpus", 1700)
    shard = corpus / "tokens-000001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    outcome = _run(here, "damaged", corpus)
    assert outcome.code == 1
    assert f"{shard} has" in outcome.output
