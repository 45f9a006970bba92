"""What a world that changes its size reads: each global batch is the same set, every sample comes once."""

import pytest
from tests.corpora import tiny_corpus
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
        job = Elastic(here, "job", started)
        job.settled(2)
        for size in (4, 1, 3):
            job.reach(size)
        job.kill(job.worker("member", 2))
        job.settled(3)
        ledger = job.finish()
    assert redone(ledger) == []
    _verify(here, "job")
    _verify(here, "job", "--against", "undisturbed")


def test_batches_of_each_rank_fix_the_size_of_the_world_and_that_is_said(here: Site) -> None:
    with here.start(*_words("job", 2, "--plain", "--pace", "0.05", flags=("--replicas", "1:4"))) as started:
        job = Elastic(here, "job", started)
        job.settled(2)
        answer = job.scale(3)
        assert not answer.accepted
        assert "the global batch would follow the number of ranks" in answer.reason
        assert "global_batch_size" in answer.reason
        assert job.finish().incidents == []
