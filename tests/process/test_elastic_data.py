"""Reads of a world that changes its size: each global batch is the same set, every sample comes once."""

from collections import Counter

import pytest
from tests.corpora import tiny_corpus
from tests.process.cached import BATCH, MICRO, MICROBATCHES, counted
from tests.process.elastic import Elastic
from tests.process.launching import Site
from tests.process.training import SCRIPTS, redone

STEPS = 100


def _words(name: str, nproc: int, *extra: str, flags: tuple[str, ...] = ()) -> list[str]:
    script = [str(SCRIPTS / "train_global.py"), "--steps", str(STEPS), *extra]
    return ["run", "--job", name, "--nproc-per-node", str(nproc), *flags, *script]


def _verify(here: Site, *words: str) -> None:
    proof = here.regrow("data", "verify", *words)
    assert proof.returncode == 0, proof.stdout + proof.stderr


@pytest.mark.parametrize("cache", ["cached", "not cached", "in place"])
def test_shares_of_a_global_batch_follow_the_world(here: Site, cache: str) -> None:
    extra = ("--corpus", str(tiny_corpus(here.folder / "corpus", 1700))) if cache == "in place" else ()
    undisturbed = here.regrow(*_words("undisturbed", 2, *extra))
    assert undisturbed.returncode == 0, undisturbed.stdout + undisturbed.stderr
    flags = ("--replicas", "1:4", *(("--data-cache", "off") if cache == "not cached" else ()))
    with here.start(*_words("job", 2, "--pace", "0.12", *extra, flags=flags)) as started:
        ledger = Elastic(here, "job", started).through_changes()
    assert redone(ledger) == []
    _verify(here, "job")
    _verify(here, "job", "--against", "undisturbed")


def test_micro_batches_that_were_made_stay_of_use_in_a_world_of_another_size(here: Site) -> None:
    cache, reads, steps = here.folder / "cache", here.folder / "reads", 60
    cache.mkdir()
    script = [str(SCRIPTS / "train_cached.py"), f"--steps={steps}", f"--reads={reads}", f"--cache={cache}", *MICRO]
    words = ["run", "--job=job", "--nproc-per-node=2", "--replicas=1:4", f"--data-cache={cache}", *script]
    with here.start(*words, "--sample-s=0.002", "--pace=0.12") as started:
        ledger = Elastic(here, "job", started).through_changes()
    assert redone(ledger) == []
    again = sum(map(Counter.total, counted(reads))) - steps * MICROBATCHES * BATCH
    # Of each rank that there was before a change, its loader worker may have had two under way.
    assert 0 <= again <= 2 * BATCH * sum(each.before for each in ledger.incidents), "what lay ahead was made anew"
    _verify(here, "job")


def test_batches_of_each_rank_fix_the_size_of_the_world_and_that_is_said(here: Site) -> None:
    with here.start(*_words("job", 2, "--plain", "--pace", "0.05", flags=("--replicas", "1:4"))) as started:
        job = Elastic(here, "job", started)
        job.settled(2)
        answer = job.scale(3)
        assert not answer.accepted
        assert "the global batch would follow the number of ranks" in answer.reason
        assert "global_batch_size" in answer.reason
        assert job.finish().incidents == []
