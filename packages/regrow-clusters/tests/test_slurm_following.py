"""Coordinator of a job on Slurm, and its keeper, when the first node is lost and another is elected."""

from pathlib import Path

import msgspec
import pytest
from tests.process.agent_harness import spec

from regrow.core.errors import UsageError
from regrow.core.ids import Generation, JobId, NodeId, StepNo
from regrow.launch.folder import describe, write_entry
from regrow.membership.view import JobView, NodeView
from regrow_clusters.slurm.following import FollowedCoordinator
from regrow_clusters.slurm.job_file import read_job_file
from regrow_clusters.slurm.node_arguments import GangNode, gang_arguments
from regrow_clusters.slurm.observing import looks_after
from regrow_clusters.slurm.scripts import JobPart

JOB = 'name = "gpt"\nscript = ["train.py"]\nreplicaCount = 2\nmaxReplicaCount = 3\nelect = true\n'


def write(records: Path, address: str, code: int | None = None) -> None:
    entry = describe(spec(job=JobId("gpt-1")), address, "t", command=["train.py"], log_dir="")
    write_entry(records, entry if code is None else msgspec.structs.replace(entry, ended=1.0, code=code))


def follow(records: Path | None, monkeypatch: pytest.MonkeyPatch) -> FollowedCoordinator:
    monkeypatch.setattr("regrow_clusters.slurm.following._READ_EVERY_S", 0.0)
    return FollowedCoordinator("10.0.0.1:29400", "t", records)


def test_the_folder_of_records_says_who_is_coordinator_and_how_the_job_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = follow(tmp_path, monkeypatch)
    assert (seen.moved, seen.over) == (False, None), "nothing is written yet"
    write(tmp_path, "10.0.0.1:29400", code=0)
    assert (seen.moved, seen.over) == (False, None), "of the first one its own node says how it ended"
    write(tmp_path, "10.0.0.2:41000")
    assert (seen.moved, seen.at, seen.over) == (True, "10.0.0.2:41000", None)
    write(tmp_path, "10.0.0.2:41000", code=3)
    assert seen.over == 3


def test_without_elections_nobody_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "10.0.0.2:41000")
    assert not follow(None, monkeypatch).moved


@pytest.mark.parametrize(
    ("away", "after"),
    [((), [True, False, False]), (("node0",), [True, True, False]), (("node0", "node1"), [True, True, True])],
)
def test_the_first_node_that_is_there_looks_after_the_job(away: tuple[str, ...], after: list[bool]) -> None:
    nodes = [NodeView(NodeId(name), name, "", away=name in away) for name in ("node0", "node1", "node2")]
    view = JobView("gpt-1", "training", Generation(1), StepNo(7), 0, 0, [], [], nodes)
    assert [looks_after(view, index, 3) for index in range(3)] == after


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", "elect needs a gang of 3 nodes or more, spares included"),
        ("spares = 1\nleaseInSeconds = 10", "leaseInSeconds is 10: with elect give 30 or more"),
    ],
)
def test_what_elections_need_is_said(more: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_job_file(JOB + more, place="job.toml")


def test_the_gang_elects_where_it_is_asked_for() -> None:
    spec, gang_node = read_job_file(JOB + "spares = 1", place="job.toml"), GangNode(1, 0, "n0", "n[0-2]")
    assert "--no-elect" not in gang_arguments(JobPart(spec), gang_node, "h:1", "h")
    off = msgspec.structs.replace(spec, elect=False)
    assert "--no-elect" in gang_arguments(JobPart(off), gang_node, "h:1", "h")
