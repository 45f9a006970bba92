from typing import Any

import msgspec
import pytest
from tests.process.agent_harness import spec

from regrow.agent.workers.environment import (
    MasterPorts,
    master_address,
    one_thread_each,
    script_variables,
    worker_script,
)
from regrow.core.config import AgentConfig, Script
from regrow.core.ids import Generation, NodeId, Rank, WorkerId
from regrow.core.messages import orders
from regrow.core.messages.vocabulary import Role


def config(*, job: dict[str, Any] | None = None, **changes: Any) -> AgentConfig:
    fields: dict[str, Any] = {
        "spec": spec(**(job or {})),
        "node": NodeId("n1"),
        "node_rank": 1,
        "coordinator": "http://10.0.0.1:999",
        "token": "t",
        "script": Script("s.py", []),
        "job_dir": "/j",
        "log_dir": "/j/logs",
        "socket_dir": "/s",
    }
    return AgentConfig(**(fields | changes))


def order(generation: int = 1) -> orders.SpawnWorker:
    return orders.SpawnWorker(
        NodeId("n1"), WorkerId("w"), Role.RANK, Rank(3), 1, 4, Generation(generation), restarts=2, resume=False
    )


def test_all_workers_of_a_generation_get_the_same_port_and_the_next_generation_a_port_of_its_own() -> None:
    ports = MasterPorts(config())
    assert ports.of(Generation(1)) == ports.of(Generation(1)) > 0
    assert ports.of(Generation(2)) != ports.of(Generation(1))


def test_a_fixed_port_is_used_as_it_is() -> None:
    assert MasterPorts(config(master_port=4711)).of(Generation(3)) == 4711


def test_several_nodes_meet_at_the_coordinators() -> None:
    assert master_address(config(job={"nodes": 2})) == "10.0.0.1"
    assert master_address(config()) == "127.0.0.1"


def test_the_variables_name_the_place_in_node_and_world() -> None:
    told = script_variables(order(), config(job={"nodes": 2}), port=5, inherited={})
    assert told["RANK"] == "3" and told["LOCAL_RANK"] == "1" and told["WORLD_SIZE"] == "4"
    assert told["GROUP_RANK"] == "1" and told["GROUP_WORLD_SIZE"] == "2" and told["LOCAL_WORLD_SIZE"] == "2"
    assert told["TORCHELASTIC_RESTART_COUNT"] == "2" and told["TORCHELASTIC_MAX_RESTARTS"] == "3"


ROOTLESS = {"TORCH_GLOO_LAZY_INIT": "1", "TORCH_NCCL_RANKS_PER_ROOT": "32"}


@pytest.mark.parametrize(
    ("world", "inherited", "expected"),
    [
        (64, {}, ROOTLESS),
        (8, {}, {}),
        (64, {"REGROW_ROOTLESS": "0"}, {}),
        (64, {"TORCH_GLOO_LAZY_INIT": "0"}, {"TORCH_NCCL_RANKS_PER_ROOT": "32"}),
    ],
)
def test_large_worlds_meet_without_a_root_unless_the_user_says_otherwise(
    world: int, inherited: dict[str, str], expected: dict[str, str]
) -> None:
    large = msgspec.structs.replace(order(), world=world)
    told = script_variables(large, config(), port=5, inherited=inherited)
    assert {name: told[name] for name in ROOTLESS if name in told} == expected


@pytest.mark.parametrize(
    ("nproc", "inherited", "expected"), [(2, {}, True), (1, {}, False), (2, {"OMP_NUM_THREADS": "3"}, False)]
)
def test_threads_are_limited_where_torchrun_limits_them(nproc: int, inherited: dict[str, str], expected: bool) -> None:
    assert one_thread_each(config(job={"nproc": nproc}), inherited) is expected


def test_the_local_rank_macro_is_filled_in() -> None:
    assert worker_script(Script("s", ["--gpu=${local_rank}", "x"]), 3).args == ["--gpu=3", "x"]
