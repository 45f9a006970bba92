"""The words of the command line: what is passed on, and what is refused in one sentence."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from tests.process.agent_harness import spec

from regrow import cli
from regrow.cli import elsewhere, tree
from regrow.cli.help_sections import MOST_USED, SECTIONS
from regrow.cli.training import run
from regrow.core.config import jobs_home
from regrow.core.ids import Generation, JobId, Rank, StepNo, WorkerId
from regrow.core.process.extras import install_line
from regrow.core.records import GenerationFormed, IncidentOpened, JobEnded, JobStarted, StepCommitted
from regrow.launch import folder, join_node, local
from regrow.launch.job import JobPlan


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGROW_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[JobPlan]]:
    """The plans that `regrow run` would carry out."""
    plans: list[JobPlan] = []

    def keep(plan: JobPlan, rejoin: object = None, given_back_code: int = 0) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr(local, "run", keep)
    monkeypatch.setattr(join_node, "join", keep)
    yield plans


@pytest.mark.parametrize(
    "line",
    [
        "run --nproc-per-node 4 --standalone --max-restarts 3 train.py --lr 0.1 --help -m x --nnodes 9 -- --y",
        "run --nproc_per_node=4 --standalone --max_restarts=3 train.py --lr 0.1 --help -m x --nnodes 9 -- --y",
        "run --nproc 4 --stand --max_r 3 -- train.py --lr 0.1 --help -m x --nnodes 9 -- --y",
    ],
)
def test_a_torchrun_line_passes_through_as_it_is(line: str, planned: list[JobPlan]) -> None:
    assert cli.main(line.split()) == 0
    (plan,) = planned
    assert (plan.spec.nproc, plan.spec.max_restarts) == (4, 3)
    assert plan.script.target == "train.py"
    assert plan.script.args == ["--lr", "0.1", "--help", "-m", "x", "--nnodes", "9", "--", "--y"]
    assert plan.notes == []


def test_flags_of_torchrun_without_meaning_are_taken_with_a_note_each(planned: list[JobPlan]) -> None:
    line = "run --rdzv_backend c10d --monitor-interval=5 --start_method fork --role r --virtual-local-rank train.py"
    assert cli.main(line.split()) == 0
    flags = ("--rdzv-backend", "--monitor-interval", "--start-method", "--role", "--virtual-local-rank")
    assert sorted(planned[0].notes) == sorted(f"{flag} means nothing to regrow and is ignored" for flag in flags)


def test_workers_are_bound_as_torchrun_would_and_no_other_word_is_taken(
    planned: list[JobPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    for mode in ("node", "socket", "exclusive", "core-complex"):
        assert cli.main(["run", f"--numa_binding={mode}", "train.py"]) == 0
    assert [plan.spec.numa_binding for plan in planned] == ["node", "socket", "exclusive", "core-complex"]
    assert [plan.notes for plan in planned] == [[]] * 4
    assert cli.main(["run", "--numa-binding", "nodes", "train.py"]) == 2
    assert "--numa-binding 'nodes' is not known (it is one of node, socket" in capsys.readouterr().err


def test_flags_of_hyperpodrun_are_taken_and_its_scripts_refused(
    planned: list[JobPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    line = "run --server-host=0.0.0.0 --server-port=8080 --inprocess-restart --nproc_per_node=2 --tee=3 train.py"
    assert cli.main(line.split()) == 0
    flags = ("--server-host", "--server-port", "--inprocess-restart")
    assert sorted(planned[0].notes) == sorted(f"{flag} means nothing to regrow and is ignored" for flag in flags)
    assert planned[0].spec.nproc == 2
    assert cli.main(["run", "--pre-train-script", "pre.sh", "train.py"]) == 2
    assert "--pre-train-script names a script that regrow run does not run" in capsys.readouterr().err


def test_variables_of_hyperpodrun_are_told_to_be_ignored(
    planned: list[JobPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HPCT_USE_CONN_DATA", "TORCH_SKIP_TCPSTORE"):
        monkeypatch.setenv(name, "1")
    assert cli.main(["run", "train.py"]) == 0
    told = [f"{name} means nothing to regrow and is ignored" for name in ("HPCT_USE_CONN_DATA", "TORCH_SKIP_TCPSTORE")]
    assert planned[0].notes == told


def test_torchruns_variables_stand_in_for_its_flags(planned: list[JobPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    assert cli.main(["run", "train.py"]) == 0
    assert cli.main(["run", "--nproc-per-node=2", "train.py"]) == 0
    assert [plan.spec.nproc for plan in planned] == [3, 2]


def test_our_own_flags_reach_the_plan(planned: list[JobPlan], home: Path) -> None:
    (home / "faults.toml").write_text("[[fault]]\nrank = 3\nstep = 9\n")
    line = (
        "run --nproc-per-node 4 --standby 2 --warmth built --max-faults 7 --window 2h --fault-plan faults.toml "
        "--checkpoint-dir ck --checkpoint-every 5min --resume --hang-timeout 40s --preload json --preload email.mime "
        "--job mine --quiet train.py"
    )
    assert cli.main(line.split()) == 0
    (plan,) = planned
    spec = plan.spec
    assert (spec.job, spec.standbys, spec.warmth, spec.max_faults, spec.window) == ("mine", 2, "built", 7, 7200.0)
    assert [(fault.rank, fault.step) for fault in plan.faults] == [(3, 9)]
    assert (plan.checkpoint_dir, plan.spec.checkpoint_every) == (str(home / "ck"), 300.0)
    assert (plan.spec.hang_timeout, plan.preload, plan.resume, plan.quiet) == (
        40.0,
        ["json", "email.mime"],
        "auto",
        True,
    )


@pytest.mark.parametrize(
    ("words", "meant", "script"),
    [
        ("--resume --job x", "auto", []),
        ("--resume", "auto", []),
        ("--resume=must", "must", []),
        ("--resume=never", "never", []),
        ("", "never", ["--resume", "--resume=latest"]),
        ("--resume", "auto", ["--resume"]),
    ],
)
def test_resume_stands_alone_or_with_a_word_and_a_scripts_own_is_its_own(
    planned: list[JobPlan], words: str, meant: str, script: list[str]
) -> None:
    command = ["run", "--checkpoint-dir", "ck", *words.split(), "train.py", *script]
    assert cli.main(command) == 0
    assert (planned[0].resume, planned[0].script.args) == (meant, script)
    assert planned[0].spec.must_resume == (meant == "must")
    assert cli.main(["run", "--checkpoint-dir", "ck", "--resume=newest", "train.py"]) == 2


def test_flags_about_nodes_reach_the_plan(planned: list[JobPlan]) -> None:
    line = "run --local-nodes 2 --node-timeout 90s --domain a,b --buddy-every 2 --digest-every 3 train.py"
    assert cli.main(line.split()) == 0
    (plan,) = planned
    assert (plan.spec.nodes, plan.local, plan.domains) == (2, True, ["a", "b"])
    assert (plan.spec.node_deadline, plan.spec.buddy_every, plan.spec.digest_every) == (90.0, 2, 3)


def test_another_node_joins(planned: list[JobPlan], home: Path) -> None:
    (home / "token").write_text("very secret\n")
    line = "run --nnodes 2 --node-rank 1 --rdzv-endpoint 127.0.0.1:29400 --token-file token train.py"
    assert cli.main(line.split()) == 0
    assert (planned[0].node, planned[0].token) == ("node1", "very secret")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "Usage"),
        ("run", "Missing argument 'SCRIPT'"),
        ("run --nprocs 4 train.py", "No such option"),
        ("run --standby x train.py", "'x' is not a valid integer"),
        ("run --standby -1 train.py", "--standby -1 is out of range"),
        ("run nothere.py", "there is no script nothere.py"),
        ("run .", "folder without a __main__.py"),
        ("run caf\udce9.py", "caf\\udce9.py is not in UTF-8"),
        ("run train.py --data caf\udce9", "caf\\udce9 is not in UTF-8"),
        ("run -m no.such.module", "-m no.such.module: there is no such module"),
        ("run -m email", "that package has no __main__"),
        ("run --no-python nosuchprogram", "there is no program nosuchprogram"),
        ("run --preload no_such train.py", "--preload no_such"),
        ("run --fault-plan no.toml train.py", "no.toml cannot be read"),
        ("run --fault-plan train.py train.py", "train.py has no fault"),
        ("run --token-file no train.py", "--token-file no cannot be read"),
        ("kill --rank 0", "no job is running"),
        ("kill gone --rank 0", "there is no job 'gone'"),
        ("kill --rank 0 --how politely", "'politely' is not one of"),
        ("kill", "Missing option '--rank'"),
        ("status", "no job is running"),
        ("stop gone", "there is no job 'gone'"),
        ("logs --rank 0", "there is no job"),
        ("dance", "No such command 'dance'"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    told = capsys.readouterr()
    assert said in told.err + told.out
    assert "Traceback" not in told.err


def test_a_verb_of_a_package_that_is_not_installed_is_answered_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(elsewhere, "announced", dict)
    for verb, package in elsewhere.ELSEWHERE.items():
        assert cli.main([verb, "--help"]) == 2
        told = capsys.readouterr().err
        assert told == f"regrow: `regrow {verb}` comes with {package} ({install_line(package=package)})\n"


def test_a_command_that_cannot_be_imported_says_whose_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = {
        "away": EntryPoint("away", "no_such_package.commands:away", elsewhere.GROUP),
        "odd": EntryPoint("odd", "regrow.core.errors:UsageError", elsewhere.GROUP),
    }
    monkeypatch.setattr(elsewhere, "announced", lambda: points)
    assert cli.main(["away"]) == 2
    assert "`regrow away` of no_such_package cannot be imported: No module named" in capsys.readouterr().err
    assert cli.main(["odd"]) == 2
    assert "regrow.core.errors:UsageError of regrow is no command, but a type" in capsys.readouterr().err


def test_help_has_the_engines_verbs_in_sections_and_others_by_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for title, verbs in tree.SECTIONS.items():
        section = shown.partition(f"{title}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  ([a-z]+) ", section, re.M) == list(verbs)
    assert sum(map(len, tree.SECTIONS.values())) == 16
    assert re.search(r"^  regrow +agent, data, rolling-restart, spans, token$", shown, re.M)
    assert re.search(r"^  regrow-clusters +k8s, operator, slurm$", shown, re.M)
    assert re.search(r"^  regrow-guests +guest$", shown, re.M)


def entry(jobs: Path, name: str, **changes: Any) -> None:
    job, job_dir = folder.make_job_dir(jobs, JobId(name))
    made = folder.describe(spec(job=job), "127.0.0.1:1", "s", command=["t.py"], log_dir=str(job_dir / "logs"))
    (job_dir / "logs").mkdir()
    (job_dir / "logs" / "rank1.log").write_text("from rank 1\n")
    folder.write_entry(job_dir, folder.JobEntry(**{f: getattr(made, f) for f in made.__struct_fields__} | changes))


def test_jobs_and_logs_of_ended_jobs_are_shown(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert cli.main(["jobs"]) == 0
    entry(jobs_home(), "a", ended=time.time(), code=1)
    assert cli.main(["jobs"]) == 0
    assert cli.main(["logs", "a", "--rank", "1"]) == 0
    assert cli.main(["logs", "--rank", "5"]) == 2
    told = capfdbinary.readouterr()
    assert b"no jobs yet" in told.out
    assert b"ended (1)" in told.out
    assert told.out.endswith(b"from rank 1\n")
    assert b"there is no output of rank 5 (job a was started with ranks 0 to 1)" in told.err


def test_jobs_of_a_tag_are_a_table_with_what_their_records_tell(capfd: pytest.CaptureFixture[str]) -> None:
    for name, tag, code in (("a", "sweep", 0), ("b", "", 0), ("c", "sweep", None)):
        entry(jobs_home(), name, tag=tag, ended=None if code is None else time.time(), code=code, pid_started=1.0)
    workers = {"0": WorkerId("w0")}
    records = [
        JobStarted(0.0, JobId("a"), 1, 1, 0, ["t.py"]),
        GenerationFormed(1.0, Generation(1), StepNo(0), workers),
        *(StepCommitted(2.0 + n, StepNo(n), Rank(0), WorkerId("w0"), Generation(1), 1.0, {}) for n in range(3)),
        IncidentOpened(5.0, 1, Generation(1), StepNo(3), "lost", [Rank(0)], ""),
        IncidentOpened(9.0, 2, Generation(2), StepNo(1), "move", [], "regrow move"),  # a planned change is none
        GenerationFormed(6.0, Generation(2), StepNo(1), workers),  # back to a step whose commits do not count now
        JobEnded(10.0, 0, ""),
    ]
    (jobs_home() / "a" / "events.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in records))
    (jobs_home() / "c" / "events.jsonl").write_text("no record\n")
    assert cli.main(["jobs", "--tag", "sweep"]) == 0
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert rows == [
        ["JOB", "TAG", "STATE", "STEP", "INCIDENTS", "GOODPUT"],
        ["a", "sweep", "ended", "(0)", "1", "1", rows[1][-1]],
        ["c", "sweep", "died", "-", "-", "-"],
    ]
    assert cli.main(["jobs", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert [(row["job"], row["tag"], row["state"], row["step"]) for row in told] == [
        ("a", "sweep", "ended", 1),
        ("b", "", "ended", 0),
        ("c", "sweep", "died", None),
    ]
    assert cli.main(["story", "a"]) == 0
    assert f"goodput {told[0]['goodput']:.1%} from the first step on" in capfd.readouterr().out, (
        "a word means one thing"
    )
    assert [row["goodput"] for row in told[1:]] == [None, None], "nothing was trained"
    assert cli.main(["jobs", "--tag", "other"]) == 0
    assert capfd.readouterr().out == "no jobs of this tag\n"


def test_a_coordinator_that_does_not_answer_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    entry(jobs_home(), "a")
    assert cli.main(["kill", "--rank", "1"]) == 2
    assert "no coordinator answers at 127.0.0.1:1" in capsys.readouterr().err


def test_a_defect_of_ours_is_one_sentence_and_a_file(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(plan: JobPlan, rejoin: object) -> int:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(local, "run", broken)
    assert cli.main(["run", "train.py"]) == 70
    said = capsys.readouterr().err
    (file,) = (home / "home").glob("crash-*.txt")
    assert said == f"regrow: a defect of regrow: ZeroDivisionError: oops; please report it with {file}\n"
    assert "in broken" in file.read_text()


def test_ctrl_c_before_anything_runs_asks_to_be_run_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(plan: JobPlan, rejoin: object) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return 0

    monkeypatch.setattr(local, "run", interrupted)
    assert cli.main(["run", "train.py"]) == 75
    assert capsys.readouterr().err.strip() == "regrow: interrupted"


def test_help_shows_ten_flags_first_and_help_all_every_flag_in_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--help"]) == 0
    short = capsys.readouterr().out
    assert len(re.findall(r"^  -", short, re.M)) == 10 and "--help-all" in short
    assert cli.main(["run", "--help-all"]) == 0
    whole = capsys.readouterr().out
    flags = {max(each.opts, key=len) for each in run.params if isinstance(each, click.Option) and not each.hidden}
    placed = [name for names in SECTIONS.values() for name in names]
    assert sorted(placed) == sorted(flags | {"--help"}), "each flag that is shown is in one section"
    assert "Other:" not in whole and all(f"{title}:" in whole for title in SECTIONS)
    assert set(MOST_USED) <= set(placed)
