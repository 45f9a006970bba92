"""Answers of Slurm's commands, recorded from 22.05.8, and their parsing."""

from pathlib import Path

import pytest

from regrow_clusters.slurm.reading import (
    JobNote,
    JobRequests,
    SlurmJob,
    failure_domain,
    host_list,
    node_address,
    note_text,
    read_node_count,
    read_nodes,
    read_note,
    read_queue,
    read_topology,
    submitted,
)
from regrow_clusters.slurm.requests import read_requests, requests_file, write_requests

QUEUE = """\
5|gpt+2|COMPLETED|None|node0|node0||(null)
7|gpt+3|PENDING|Resources|n/a||node[2-3]|(null)
1|sh|COMPLETED|None|localhost|node[0-3]||(null)
4|gpt|RUNNING|None|node0|node[0-1]||regrow at=10.78.0.11:20004 home=/root
8|gpt2|RUNNING|None|node2|node2||(null)
9|other+1|RUNNING|None|node3|node3||
"""


def test_the_queue_has_the_jobs_of_one_name_alone_the_oldest_first() -> None:
    assert read_queue(QUEUE, "gpt") == [
        SlurmJob(4, "gpt", None, "RUNNING", "", "node0", ("node0", "node1"), "regrow at=10.78.0.11:20004 home=/root"),
        SlurmJob(5, "gpt+2", 2, "COMPLETED", "", "node0", ("node0",)),
        SlurmJob(7, "gpt+3", 3, "PENDING", "Resources", excluded=("node2", "node3")),
    ]
    assert [job.done for job in read_queue(QUEUE, "gpt")] == [False, True, False]


@pytest.mark.parametrize("state", ["SIGNALING", "RESIZING"])
def test_a_job_that_was_sent_a_signal_or_has_lost_a_node_runs(state: str) -> None:
    (job,) = read_queue(f"4|gpt|{state}|None|node0|node[0-1]||\n", "gpt")
    assert job.state == "RUNNING"


def test_lines_that_are_no_jobs_are_left_out() -> None:
    assert read_queue("slurm_load_jobs error: nothing\n\n4_[1-3]|gpt|PENDING|None|n/a|||\n", "gpt") == []


@pytest.mark.parametrize(
    ("short", "hosts"),
    [
        ("", ()),
        ("node0", ("node0",)),
        ("node[0-2]", ("node0", "node1", "node2")),
        ("gpu[01-03,7],login1", ("gpu01", "gpu02", "gpu03", "gpu7", "login1")),
        ("gpu[08-10]-ib,a[1]", ("gpu08-ib", "gpu09-ib", "gpu10-ib", "a1")),
    ],
)
def test_host_lists_are_written_out_in_their_order(short: str, hosts: tuple[str, ...]) -> None:
    assert host_list(short) == hosts


def test_states_of_nodes_are_told_once_and_without_marks() -> None:
    told = "node0|idle|none\nnode1|draining*|xid 79 | fallen off\nnode1|draining*|xid 79 | fallen off\nnode2|down*|x\n"
    assert [(each.node, each.state, each.reason) for each in read_nodes(told)] == [
        ("node0", "idle", ""),
        ("node1", "draining", "xid 79 | fallen off"),
        ("node2", "down", "x"),
    ]
    assert read_node_count(told) == (3, 2)


def test_the_number_of_a_submitted_job_and_the_address_of_a_node() -> None:
    assert submitted("17\n") == 17
    assert submitted("sbatch: a word of the site\n18;cluster\n") == 18
    assert submitted("") is None
    assert node_address("NodeName=node0 NodeAddr=10.78.0.11 NodeHostName=node0 Port=17000") == "10.78.0.11"
    assert node_address("slurm_load_node error") == ""


@pytest.mark.parametrize("note", [JobNote(), JobNote("[fe80::1]:20004", "/home/a user/.regrow|=x")])
def test_a_note_is_read_as_it_was_written(note: JobNote) -> None:
    assert read_note(note_text(note)) == note
    assert "|" not in note_text(note)


def test_a_comment_of_somebody_else_is_no_note() -> None:
    assert read_note("project=7 at=x:1") == JobNote()
    assert read_note("") == JobNote()


def test_what_users_ask_is_kept_in_a_file_of_the_runs_own(tmp_path: Path) -> None:
    file = requests_file(tmp_path, "gpt-7")
    assert read_requests(file) == JobRequests()
    asked = JobRequests(replicas=3, avoid={"node1": 1800.5}, over=True)
    write_requests(file, asked)
    assert read_requests(file) == asked
    assert read_requests(requests_file(tmp_path, "gpt-8")) == JobRequests()
    assert asked.avoided(1800.0) == {"node1": 1800.5} and asked.avoided(1801.0) == {}
    assert asked.on_clock(40.0, 1800.0).avoid == {"node1": 40.5}
    file.write_text("{")
    assert read_requests(file) == JobRequests()


TREE = """\
SwitchName=leaf0 Level=0 LinkSpeed=1 Nodes=node[0,2]
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=node[1,3]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=node[0-3] Switches=leaf[0-1]
"""
BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=node[1-2] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=node[0,3] BlockSize=2
"""


def test_the_switches_above_a_host_are_read_from_the_root_down() -> None:
    assert read_topology(TREE) == {
        "node0": ["spine", "leaf0"],
        "node1": ["spine", "leaf1"],
        "node2": ["spine", "leaf0"],
        "node3": ["spine", "leaf1"],
    }
    assert read_topology(BLOCKS) == {"node1": ["b1"], "node2": ["b1"], "node0": ["b2"], "node3": ["b2"]}
    assert read_topology("No topology information available\n") == {}


def test_a_node_fails_together_with_its_switch() -> None:
    assert failure_domain("spine.leaf0.node1", "switch.switch.node") == "leaf0"
    assert failure_domain("node1", "node") == ""
    assert failure_domain("spine.leaf[0-1].node1", "switch.switch.node") == "leaf_0-1_"
