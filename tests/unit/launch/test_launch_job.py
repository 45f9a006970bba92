"""From flags to a job's description."""

from pathlib import Path
from typing import Any

import pytest

from regrow.core.errors import UsageError
from regrow.core.messages.vocabulary import Warmth
from regrow.launch.job import HostEnvironment, JobPlan, RunFlags, make_plan


def around(**changes: Any) -> HostEnvironment:
    values: dict[str, Any] = {"cpus": 6, "gpus": 0, "stamp": "s", "jobs_home": Path("/j")}
    return HostEnvironment(**values | changes)


def plan(surroundings: HostEnvironment | None = None, **flags: Any) -> JobPlan:
    return make_plan(RunFlags(**{"script": "train.py"} | flags), surroundings or around())


def test_a_bare_script_is_one_rank_that_only_this_machine_can_reach() -> None:
    made = plan()
    assert (made.spec.world, made.spec.nodes, made.bind, made.port) == (1, 1, "127.0.0.1", 0)
    assert made.spec.job == "train-s"
    assert made.spec.max_restarts is None
    assert not made.spec.durable


@pytest.mark.parametrize(
    ("text", "gpus", "ranks"), [("4", 0, 4), ("cpu", 2, 6), ("auto", 0, 6), ("auto", 2, 2), ("gpu", 8, 8)]
)
def test_nproc_is_a_number_or_what_the_machine_has(text: str, gpus: int, ranks: int) -> None:
    assert plan(around(gpus=gpus), nproc_per_node=text).spec.world == ranks


def test_durations_and_warmth_are_read() -> None:
    made = plan(window="30min", checkpoint_every="90s", checkpoint_dir="/ck", hang_timeout="2m", warmth="built")
    assert (made.spec.window, made.spec.checkpoint_every, made.spec.hang_timeout) == (1800.0, 90.0, 120.0)
    assert made.spec.warmth is Warmth.BUILT
    assert made.spec.durable


@pytest.mark.parametrize(
    ("flags", "flag"), [({"checkpoint_every": "90s"}, "--checkpoint-every"), ({"resume": "auto"}, "--resume")]
)
def test_flags_about_checkpoints_are_refused_without_their_folder(flags: dict[str, Any], flag: str) -> None:
    with pytest.raises(
        UsageError, match=rf"{flag} needs to know where the checkpoints are \(add --checkpoint-dir DIR\)"
    ):
        plan(**flags)
    made = plan(checkpoint_dir="/ck", resume="auto")
    assert made.spec.checkpoint_every == 600.0 and plan().spec.checkpoint_every == 0.0


def test_torchruns_word_for_no_name_is_a_tag_like_any_other() -> None:
    spec = plan(job="none", rdzv_id="none", tag="none").spec
    assert (spec.job, spec.tag) == ("train-s", "none")


def test_a_range_of_nodes_starts_with_the_least_and_may_grow_to_the_most() -> None:
    made = plan(around(token="t"), nnodes="2:4", nproc_per_node="2", node_rank=0, rdzv_endpoint="127.0.0.1:29400")
    spec = made.spec
    assert (spec.nodes, spec.node_limit, spec.min_replicas, spec.max_replicas) == (2, 4, 4, 8)
    assert made.slots == 2


def test_another_coordinator_is_elected_where_there_is_a_majority_and_the_job_can_do_without_a_node() -> None:
    def elects(**options: object) -> bool:
        return plan(around(token="t"), node_rank=0, rdzv_endpoint="127.0.0.1:29400", **options).spec.can_elect

    assert elects(nnodes="4", spares=1) and elects(nnodes="2:4")
    assert not elects(nnodes="4"), "it would end a node that only paused, and have nothing to replace it with"
    assert not elects(nnodes="2", spares=1), "one of two is no majority"
    assert not elects(nnodes="4", spares=1, no_elect=True)


def test_one_node_that_others_may_join_needs_no_secret_unless_they_come_from_elsewhere() -> None:
    made = plan(nnodes="1:2")
    assert (made.bind, made.advertise, made.spec.can_lose_nodes) == ("127.0.0.1", "127.0.0.1", True)
    with pytest.raises(UsageError, match="needs a secret"):
        plan(nnodes="1:2", bind="10.0.0.1")
    made = plan(around(token="t"), nnodes="1:2", bind="10.0.0.1")
    assert (made.bind, made.advertise) == ("10.0.0.1", "10.0.0.1")
    with pytest.raises(UsageError, match="add --rdzv-endpoint"):
        plan(around(token="t"), nnodes="1:2", bind="0.0.0.0")


def test_a_node_has_room_for_its_part_of_the_largest_world() -> None:
    assert plan(nproc_per_node="2", replicas="1:4").slots == 4
    assert plan(local_nodes=2, nproc_per_node="1", replicas="2:5").slots == 3
    assert plan(nproc_per_node="2", replicas="1:4", slots=6).slots == 6
    assert plan(nproc_per_node="2").slots == 2


def test_replicas_have_whole_units_and_sizes_set_their_limits() -> None:
    spec = plan(nproc_per_node="4", replica_ranks=2, replica_sizes="4,1,2").spec
    assert (spec.unit, spec.replicas, spec.sizes) == (2, 2, [1, 2, 4])
    assert (spec.min_replicas, spec.max_replicas) == (1, 4)
    fixed = plan(nproc_per_node="4").spec
    assert (fixed.min_replicas, fixed.max_replicas, fixed.elastic) == (None, None, False)


def test_node_0_listens_where_the_others_look() -> None:
    made = plan(around(token="t"), nnodes="2", node_rank=1, rdzv_endpoint="localhost:4711")
    assert (made.endpoint, made.node, made.advertise) == (("127.0.0.1", 4711), "node1", "127.0.0.1")


def test_the_static_rendezvous_of_torchrun_names_node_0_by_its_master_address() -> None:
    made = plan(around(token="t"), nnodes="2", node_rank=0, master_addr="10.0.0.1", master_port=4711, bind="10.0.0.1")
    assert (made.endpoint, made.bind, made.advertise, made.master_port) == (
        ("10.0.0.1", 4711),
        "10.0.0.1",
        "10.0.0.1",
        0,
    )


def test_standalone_ignores_the_rendezvous_flags() -> None:
    assert plan(standalone=True, rdzv_endpoint="far.example:1").endpoint == ("127.0.0.1", 0)


def test_several_nodes_on_this_machine_need_no_secret_and_no_address() -> None:
    made = plan(
        local_nodes=3,
        nproc_per_node="2",
        domain="a,a,b",
        node_timeout="90s",
        buddy_every=4,
        digest_every=5,
        node_lease="3s",
    )
    spec = made.spec
    assert (spec.nodes, spec.world, made.node_ranks, made.bind) == (3, 6, [0, 1, 2], "127.0.0.1")
    assert spec.node_lease == 3.0
    assert (spec.node_deadline, spec.buddy_every, spec.digest_every, made.notes) == (90.0, 4, 5, [])
    configs = [
        made.agent_config(spec, node_rank=rank, coordinator="", token="", job_dir=Path("/d"), advertise="")
        for rank in made.node_ranks
    ]
    assert [(config.node, config.node_rank, config.domain) for config in configs] == [
        ("node0", 0, "a"),
        ("node1", 1, "a"),
        ("node2", 2, "b"),
    ]
    assert all(config.one_machine for config in configs)


def test_copies_of_one_node_alone_are_noted_to_be_lost_with_it() -> None:
    made = plan(buddy_every=1)
    assert made.spec.buddy_every == 1
    assert "lost with it" in made.notes[0]


def test_one_label_is_for_all_nodes_of_this_machine() -> None:
    assert plan(local_nodes=2, domain="rack-7").domains == ["rack-7", "rack-7"]


def test_output_goes_to_files_only_when_redirected() -> None:
    assert [plan(redirects=r, tee=t).forward_output for r, t in (("", ""), ("3", ""), ("3", "3"))] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"nproc_per_node": "0"}, "--nproc-per-node '0'"),
        ({"nproc_per_node": "-2"}, "--nproc-per-node '-2'"),
        ({"nproc_per_node": "many"}, "cpu, gpu or auto"),
        ({"nproc_per_node": "gpu"}, "no GPU"),
        ({"nnodes": "0"}, "--nnodes '0'"),
        ({"nnodes": "3:2"}, "MIN <= MAX"),
        ({"nnodes": "2"}, "add --node-rank, from 0 to 1"),
        ({"nnodes": "2", "node_rank": 2}, "--node-rank 2 is out of range"),
        ({"nnodes": "2", "node_rank": 0}, "add --rdzv-endpoint"),
        ({"nnodes": "2", "node_rank": 0, "rdzv_endpoint": "10.1.1.1:1"}, "add --bind"),
        ({"nnodes": "2", "node_rank": 0, "rdzv_endpoint": "127.0.0.1:99999"}, "give HOST:PORT"),
        ({"nnodes": "2", "node_rank": 0, "rdzv_endpoint": "127.0.0.1:0"}, "names no port"),
        ({"nnodes": "2", "node_rank": 0, "rdzv_endpoint": "127.0.0.1:1"}, "REGROW_TOKEN"),
        ({"nnodes": "2", "standalone": True}, "--standalone is for one node"),
        ({"standby": -1}, "--standby -1 is out of range"),
        ({"max_faults": -1}, "--max-faults -1"),
        ({"max_restarts": -1}, "--max-restarts -1"),
        ({"master_port": 70000}, "--master-port 70000"),
        ({"window": "soon"}, "--window: 'soon' is not a duration"),
        ({"window": "0s"}, "no time at all"),
        ({"warmth": "hot"}, "imports, built"),
        ({"resume": "auto"}, "add --checkpoint-dir"),
        ({"job": "../x"}, "cannot name a job"),
        ({"module": True, "no_python": True}, "exclude each other"),
        ({"no_script_rewrite": True, "proof": "fork"}, "allows neither --proof fork"),
        ({"no_script_rewrite": True, "warmth": "built"}, "nor --warmth built"),
        ({"local_nodes": 0}, "--local-nodes 0"),
        ({"local_nodes": 2, "nnodes": "2"}, "--local-nodes and --nnodes exclude each other"),
        ({"local_nodes": 2, "node_rank": 0}, "--local-nodes and --node-rank exclude each other"),
        ({"local_nodes": 2, "bind": "0.0.0.0"}, "--local-nodes and --bind exclude each other"),
        ({"local_nodes": 3, "domain": "a,b"}, "2 names for 3 nodes"),
        ({"domain": "a,b"}, "2 names for 1 node"),
        ({"local_nodes": 2, "domain": "a,"}, "--domain ''"),
        ({"buddy_every": -1}, "--buddy-every -1"),
        ({"digest_every": -1}, "--digest-every -1"),
        ({"node_lease": "0.5s"}, "--node-lease '0.5s' is too short"),
        ({"node_timeout": "later"}, "--node-timeout: 'later' is not a duration"),
        ({"replicas": "0:2"}, "--replicas '0:2' is no number of replicas"),
        ({"replicas": "2:4"}, "the job starts with 1 rank, but 1 replica is fewer than the minimum of 2"),
        ({"nproc_per_node": "4", "replicas": "1:2"}, "4 replicas are more than the maximum of 2"),
        ({"nproc_per_node": "3", "replica_ranks": 2}, "no whole replicas of 2"),
        ({"replica_ranks": 0}, "--replica-ranks 0"),
        ({"nproc_per_node": "3", "replica_sizes": "1,2,4"}, "3 replicas are none of the allowed sizes (1, 2, 4)"),
        ({"replica_sizes": "1,0"}, "--replica-sizes '1,0'"),
        ({"replica_sizes": "1,"}, "--replica-sizes '1,'"),
        ({"nproc_per_node": "2", "slots": 1}, "less than the 2 ranks"),
        ({"replicas": "1:4", "slots": 3}, "4 replicas of 1 ranks have no room"),
        ({"change_pause": "often"}, "--change-pause: 'often'"),
        ({"drain_grace": "0s"}, "--drain-grace '0s' is no time"),
        ({"nnodes": "1:2", "node_rank": 1}, "bring others in with regrow agent --join"),
        ({"nnodes": "1:2", "standalone": True}, "--standalone is for one node, --nnodes is 1:2"),
    ],
)
def test_a_wrong_flag_is_refused_with_its_cure(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        plan(**flags)
    assert said in str(refused.value)


def test_without_rewrites_no_standby_runs_ahead_and_nothing_is_proven() -> None:
    usual, spec = plan().spec, plan(no_script_rewrite=True).spec
    assert (usual.rewrites, usual.warmth, usual.proof) == (True, Warmth.BUILT, True)
    assert (spec.rewrites, spec.warmth, spec.proof) == (False, Warmth.IMPORTS, False)
