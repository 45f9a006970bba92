"""The harness can complain: of a job that is silently wrong after a kill, whoever has made the undisturbed run."""

from pathlib import Path

import pytest
from tests.process.judging import ALLOWED, Command
from tests.process.launching import Site, site
from tests.process.training import SCRIPTS, Fault

WRONG = ("--nproc-per-node", "2", "--proof", "off", "--no-audit")
"""A script that keeps a tensor in an attribute nobody protects, in a job that is not to look."""


def train(here: Site, job: str, *faults: Fault) -> None:
    plan = here.folder / f"{job}.toml"
    plan.write_text("\n".join(fault.toml() for fault in faults))
    flags = ("--fault-plan", str(plan)) if faults else ()
    script = (str(SCRIPTS / "train_shadowed.py"), "--fault", "statistic", "--steps", "8")
    done = here.regrow("run", "--job", job, *WRONG, *flags, *script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("by", ["the test", "the harness"])
def test_a_job_that_is_wrong_after_a_kill_and_ends_with_0_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setenv(ALLOWED, "0" if by == "the test" else "1e9")
    with pytest.raises(AssertionError, match="job killed of .* ended with 0: step/rank/name"), site(tmp_path) as here:
        if by == "the test":
            train(here, "calm")
        train(here, "killed", Fault(1, 4))
        here.assert_nothing_left()


def test_jobs_are_compared_that_differ_in_nothing_but_faults_and_names(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass")

    def key(*words: str) -> str:
        command = Command.of(words, {}, tmp_path)
        assert command is not None
        return command.key

    script = ("train.py", "--steps", "8", "--out")
    calm = key("run", "--job", "calm", "--nproc-per-node", "2", *script, "/tmp/a/calm.out")
    plan = ("--fault-plan", "plan.toml", "--standby", "1", "--quiet")
    assert key("run", "--job", "struck", *plan, "--nproc-per-node", "2", *script, "/tmp/b/struck.out") == calm
    assert key("run", "--job", "calm", "--nproc-per-node", "3", *script, "/tmp/a/calm.out") != calm
    assert Command.of(("run", "--job", "old", "--resume=must", "train.py"), {}, tmp_path) is None
    assert Command.of(("run", "--job", "grown", "--replicas", "1:4", "train.py"), {}, tmp_path) is None
