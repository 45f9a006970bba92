"""The environment that torchrun promises to a script, as this agent provides it."""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from regrow.agent.workers.compile_caches import local_caches
from regrow.agent.workers.zygote_messages import SpawnRequest
from regrow.core.config import AgentConfig, Script, WorkerEnv, rootless
from regrow.core.ids import Generation, Seconds
from regrow.core.messages import orders
from regrow.core.messages.data import CacheSettings

_THREADS = "OMP_NUM_THREADS"
_PATIENCE_S: Seconds = 3600.0
"""Time for which a worker waits for an order after the coordinator's own wait for nodes is over."""
_LAZY_WORLD = 16
"""Largest world in which gloo connects all ranks at once, as that is as fast; larger worlds connect on first use."""
_RANKS_PER_ROOT = 32
"""Number of ranks that send their addresses to one root in NCCL's bootstrap. torch's default is 128."""


class MasterPorts:
    """A port for `env://` in each generation, the same for all of its workers.

    Args:
        config: a fixed `master_port` is used as given; only in a job of one node may the agent choose it.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._fixed = config.master_port
        self._bind = config.bind
        self._ports: dict[Generation, int] = {}

    def of(self, generation: Generation) -> int:
        """The port for a generation, which was free at the first call for it."""
        if self._fixed:
            return self._fixed
        if generation not in self._ports:
            for old in [known for known in self._ports if known < generation - 8]:
                del self._ports[old]
            self._ports[generation] = _free_port(self._bind)
        return self._ports[generation]


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def master_address(config: AgentConfig) -> str:
    """Address at which rank 0 listens: on the job's first node, which is the coordinator's."""
    if config.spec.node_limit == 1:
        return config.bind if config.bind not in ("0.0.0.0", "::", "") else "127.0.0.1"
    return urlsplit(config.coordinator).hostname or config.advertise


def script_variables(
    order: orders.SpawnWorker, config: AgentConfig, *, port: int, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The variables that torchrun sets for one worker, in addition to `inherited`, the user's environment."""
    spec = config.spec
    variables = {
        "RANK": str(order.rank),
        "LOCAL_RANK": str(order.local_rank),
        "WORLD_SIZE": str(order.world),
        "LOCAL_WORLD_SIZE": str(spec.nproc),
        "GROUP_RANK": str(config.node_rank),
        "GROUP_WORLD_SIZE": str(spec.nodes),
        "ROLE_RANK": str(order.rank),
        "ROLE_WORLD_SIZE": str(order.world),
        "ROLE_NAME": "default",
        "MASTER_ADDR": master_address(config),
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": spec.job,
        "TORCHELASTIC_RESTART_COUNT": str(order.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_faults if spec.max_restarts is None else spec.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if one_thread_each(config, inherited):
        variables[_THREADS] = "1"
    return variables | _without_a_root(order.world, inherited)


def _without_a_root(world: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Settings that keep ranks from all connecting to a single rank; the user's settings take precedence."""
    if not rootless(inherited):
        return {}
    wanted = {"TORCH_GLOO_LAZY_INIT": "1"} if world > _LAZY_WORLD else {}
    if world > _RANKS_PER_ROOT:
        wanted["TORCH_NCCL_RANKS_PER_ROOT"] = str(_RANKS_PER_ROOT)
    return {name: value for name, value in wanted.items() if name not in inherited}


def one_thread_each(config: AgentConfig, inherited: Mapping[str, str]) -> bool:
    """True if workers get one thread each, as under torchrun: several fit on a node, and the user set no number."""
    return max(config.spec.nproc, config.slots) > 1 and _THREADS not in inherited


def worker_script(script: Script, local_rank: int) -> Script:
    """The script with torchrun's macro `${local_rank}` filled in."""
    args = [argument.replace("${local_rank}", str(local_rank)) for argument in script.args]
    return Script(target=script.target, args=args, module=script.module, binary=script.binary)


def path_entry(script: Script) -> str | None:
    """Entry that `python` would put first into `sys.path` for this script; None: it would put none."""
    if script.binary:
        return None
    return os.getcwd() if script.module else str(Path(script.target).resolve().parent)


class SpawnRequests:
    """Requests to the zygote that describe each worker of this node.

    Args:
        config: configuration of the agent.
        inherited: the user's environment.
        mounts: the text of `/proc/mounts`.
    """

    def __init__(self, config: AgentConfig, inherited: Mapping[str, str], mounts: str) -> None:
        self._config = config
        self._caches, self.said = local_caches(inherited, mounts)
        self._inherited = inherited
        self._ports = MasterPorts(config)

    def request(self, order: orders.SpawnWorker, *, store: str) -> SpawnRequest:
        """The request for one worker. `store`: address at which this node's agent serves the keys."""
        config, port = self._config, self._ports.of(order.generation)
        variables = script_variables(order, config, port=port, inherited=self._inherited) | self._caches
        return SpawnRequest(
            worker_env(order, config, store=store),
            worker_script(config.script, order.local_rank),
            variables,
            time.monotonic(),
        )


def worker_env(order: orders.SpawnWorker, config: AgentConfig, *, store: str) -> WorkerEnv:
    """The description of its place that a worker receives; the worker itself fills in the descriptors.

    Args:
        store: address at which this node's agent serves the keys.
    """
    return WorkerEnv(
        spec=config.spec,
        worker=order.worker,
        role=order.role,
        rank=order.rank,
        local_rank=order.local_rank,
        world=order.world,
        generation=order.generation,
        store=store,
        token=config.token,
        channel=-1,
        board=-1,
        socket_dir=config.socket_dir,
        bind=config.bind,
        advertise=config.advertise,
        ways=config.ways,
        warmth=order.warmth or config.spec.warmth,
        local=config.local,
        patience=_PATIENCE_S + config.spec.node_deadline,
        resume=order.resume,
        avoid=order.avoid,
        restored=order.restored,
        checkpoint_dir=config.checkpoint_dir,
        faults=order.faults,
        data=CacheSettings(config.data_dir, config.data_budget) if config.data_dir else None,
        restarts=order.restarts,
        finished=order.finished,
    )
