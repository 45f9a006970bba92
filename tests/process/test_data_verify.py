"""`regrow data verify` on trainings that really ran: killed, resumed in other worlds, and disturbed in their data."""

import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.process.launching import Site, site
from tests.process.test_nodes import agents_of
from tests.process.training import SCRIPTS, Fault, train

STAGES = ("data", "forward", "backward", "reduce", "update", "commit")
SCRIPT = "train_global.py"
LOADERS = {"regrow's": (), "torch's": ("--plain",), "nothing logged": ("--silent",)}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("verify")) as made:
        yield made
        made.assert_nothing_left()


def verify(here: Site, *words: str, code: int = 0) -> dict[str, object]:
    """The proof, as programs get it."""
    done = here.regrow("data", "verify", *words, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    proof: dict[str, object] = json.loads(done.stdout)
    return proof


def run(here: Site, name: str, *flags: str, world: int, steps: int, **more: object) -> None:
    outcome = train(here, name, *flags, world=world, steps=steps, script=SCRIPT, **more)  # type: ignore[arg-type]
    assert outcome.code == 0, outcome.output
    assert len(outcome.ledger.injected) == len(more.get("faults") or ()), outcome.output  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole(here: Site) -> str:
    """Forty steps of four ranks that nobody disturbed."""
    run(here, "whole", world=4, steps=40)
    return "whole"


def durable(here: Site, folder: str) -> tuple[str, ...]:
    return ("--checkpoint-dir", str(here.folder / folder), "--checkpoint-every", "1h", "--checkpoint-keep", "9")


# --- kills -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", LOADERS)
def test_every_sample_was_read_once_by_ranks_that_died_at_every_stage(here: Site, loader: str) -> None:
    name = f"killed-{list(LOADERS).index(loader)}"
    faults = [Fault(at % 3, 2 + 2 * at, stage) for at, stage in enumerate([*STAGES, "update", "commit"])]
    run(here, name, world=3, steps=22, faults=faults, extra=LOADERS[loader])
    proof = verify(here, name)
    assert (proof["verdict"], proof["steps"], proof["reasons"]) == ("proven", 22, [])
    assert (proof["read"], proof["padding"]) == ((378, 6) if loader == "torch's" else (528, 0))
    lines = [line for path in (here.home / "jobs" / name).glob("steps.*") for line in path.read_text().splitlines()]
    adopted = [json.loads(line) for line in lines if '"adopted":true' in line]
    assert [line for line in adopted if line["data"] is None] == []
    assert adopted or loader != "nothing logged"


def test_a_loader_of_its_own_order_is_held_to_shares_and_digests(here: Site) -> None:
    run(here, "opaque", world=3, steps=16, faults=[Fault(1, 5, "update"), Fault(0, 9, "commit")], extra=("--opaque",))
    proof = verify(here, "opaque", code=1)
    assert (proof["verdict"], proof["samples_known"]) == ("unproven", False)
    assert proof["reasons"] == ["the loader has an order of its own"]


def test_the_lines_of_an_agent_that_was_killed_are_missed_and_not_called_wrong(here: Site) -> None:
    nodes, go_on = ("--local-nodes", "2", "--nproc-per-node", "2"), here.folder / "go-on"
    script = (str(SCRIPTS / SCRIPT), "--steps", "150", "--say-steps", "--hold", f"20:{go_on}", "--pace", "0.05")
    with here.start("run", "--job", "agent", *nodes, *script) as job:
        agents = agents_of(here, "agent", job)
        go_on.touch()
        job.wait_for("step 21\n")
        os.kill(agents["node1"], signal.SIGKILL)
        (here.folder / "hurry").touch()  # steps are left until then, however fast they are
        assert job.wait() == 0, job.output
    (here.folder / "hurry").unlink()
    done = here.regrow("data", "verify", "agent", "--json")
    proof = json.loads(done.stdout)
    assert (proof["findings"], proof["steps"]) == ([], 150)
    assert (done.returncode, proof["verdict"]) in [(0, "proven"), (1, "unproven")]
    assert all("node1 was lost" in reason for reason in proof["reasons"])


# --- worlds ------------------------------------------------------------------------------------------------------


def test_worlds_of_4_3_4_and_2_with_kills_have_read_what_the_undisturbed_run_has(here: Site, whole: str) -> None:
    parts: Sequence[tuple[str, int, int, list[Fault]]] = [
        ("a", 4, 10, [Fault(1, 3, "commit"), Fault(2, 6, "update")]),
        ("b", 3, 18, [Fault(0, 14, "reduce")]),
        ("c", 4, 30, [Fault(3, 22, "update"), Fault(0, 27, "commit")]),
        ("d", 2, 40, [Fault(1, 35, "data")]),
    ]
    for name, world, steps, faults in parts:
        resume = () if name == "a" else ("--resume",)
        run(here, name, *durable(here, "worlds"), *resume, world=world, steps=steps, faults=faults)
    proof = verify(here, "a", "b", "c", "d", "--against", whole)
    assert (proof["verdict"], proof["findings"], proof["reasons"]) == ("proven", [], [])
    assert (proof["steps"], proof["read"], proof["compared"]) == (40, 960, 40)
    assert [(world["shares"], world["first"]) for world in _worlds(proof)] == [(4, 0), (3, 10), (4, 18), (2, 30)]
    out_of_order = verify(here, "a", "c", "d", code=1)
    assert out_of_order["verdict"] == "unproven"


def _worlds(proof: dict[str, object]) -> list[dict[str, int]]:
    worlds = proof["worlds"]
    assert isinstance(worlds, list)
    return worlds


# --- steps that run again ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twelve(here: Site) -> list[str]:
    """Two jobs of six steps each; their states are in the folder `twelve`."""
    run(here, "twelve-0", *durable(here, "twelve"), world=2, steps=6)
    run(here, "twelve-1", *durable(here, "twelve"), "--resume", world=2, steps=12)
    return ["twelve-0", "twelve-1"]


def resume_at_six(here: Site, name: str, *extra: str) -> str:
    """A job that starts from the state of the first of the two, so that it runs again what the second one had done."""
    shutil.copytree(here.folder / "twelve", here.folder / name)
    shutil.rmtree(here.folder / name / "step-12")
    run(here, name, *durable(here, name), "--resume", world=2, steps=16, extra=extra)
    return name


def test_steps_that_ran_again_have_read_the_same(here: Site, twelve: list[str]) -> None:
    proof = verify(here, *twelve, resume_at_six(here, "again"))
    assert (proof["verdict"], proof["steps"], proof["agreed"]) == ("proven", 16, 6)


def test_a_data_set_that_was_changed_between_two_jobs_is_found(here: Site, twelve: list[str]) -> None:
    proof = verify(here, *twelve, resume_at_six(here, "perturbed", "--perturb"), code=1)
    assert (proof["verdict"], proof["causes"]) == ("wrong", {"changed the second time": 2})
    found, _ = found_in(proof)  # in two epochs
    assert "content" in str(found["text"])
    assert found["run"] == "perturbed"


def test_a_data_set_that_shrank_between_two_jobs_is_found(here: Site, twelve: list[str]) -> None:
    proof = verify(here, *twelve, resume_at_six(here, "shrunk", "--size", "99"), code=1)
    assert proof["verdict"] == "wrong"
    texts = [found["text"] for found in found_in(proof)]
    assert "sources TensorDataset of 100 became TensorDataset of 99" in texts


def found_in(proof: dict[str, object]) -> list[dict[str, object]]:
    findings = proof["findings"]
    assert isinstance(findings, list)
    return findings


# --- words -------------------------------------------------------------------------------------------------------


def test_people_read_a_few_lines(here: Site, whole: str) -> None:
    done = here.regrow("data", "verify", whole)
    assert done.returncode == 0
    assert done.stdout.splitlines()[:3] == [
        "verdict   proven: whole has read every sample of its order once",
        "steps     0 to 39",
        "worlds    4 (steps 0 to 39)",
    ]


def test_records_from_which_a_line_was_taken_are_wrong(here: Site, whole: str, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    shutil.copytree(here.home / "jobs" / whole, folder)
    path = folder / "steps.node0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    line = next(line for line in lines if '"step":17,"rank":2,' in line)
    path.write_text("".join(each for each in lines if each is not line))
    done = here.regrow("data", "verify", str(folder))
    assert done.returncode == 1
    assert "step 17, share 2, rank 2, generation 1: share missing" in done.stdout


def test_a_job_that_is_not_there_is_a_usage_error(here: Site, whole: str) -> None:
    done = here.regrow("data", "verify", "nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no job 'nope'" in done.stderr
