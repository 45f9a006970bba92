"""Sides of `peers.py`: the commands that start each tool, its settings, and the document that these come from."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workload import WORLD

HERE = Path(__file__).resolve().parent
CHECKPOINT_EVERY = 10
SPARES = 2


@dataclass(frozen=True)
class Side:
    """A tool and its settings.

    Attributes:
        commands: what is started, given the folder and the words of the training script.
        settings: what was set, and where that is documented.
        script: its training script, whose lines are counted.
        environment: variables of the process of each number.
    """

    commands: Callable[[Path, list[str]], list[list[str]]]
    settings: str
    script: str
    environment: Callable[[int], dict[str, str]] = lambda _: {}


def python(script: str, *words: str) -> list[str]:
    """A script of this folder in this interpreter."""
    return [sys.executable, str(HERE / script), *words]


def _launched(module: str, *flags: str) -> Callable[[Path, list[str]], list[list[str]]]:
    def commands(folder: Path, words: list[str]) -> list[list[str]]:
        script = [str(HERE / "peer_torchrun.py"), *words, f"--checkpoint-every={CHECKPOINT_EVERY}"]
        return [[sys.executable, "-m", module, "--standalone", f"--nproc-per-node={WORLD}", *flags, *script]]

    return commands


def _torchft(folder: Path, words: list[str]) -> list[list[str]]:
    one = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=10"]
    groups = [[*one, str(HERE / "peer_torchft.py"), *words, f"--rank={rank}"] for rank in range(WORLD)]
    house = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--min_replicas=1", "--bind=127.0.0.1:29510"]
    return [[*house, "--join_timeout_ms=1000", "--heartbeat_timeout_ms=1000", "--quorum_tick_ms=50"], *groups]


def _inprocess(folder: Path, words: list[str]) -> list[list[str]]:
    return [python("peer_inprocess.py", *words, f"--checkpoint-every={CHECKPOINT_EVERY}")] * (WORLD + SPARES)


def _ray(folder: Path, words: list[str]) -> list[list[str]]:
    return [python("peer_ray.py", *words, f"--checkpoint-every={CHECKPOINT_EVERY}")]


def _regrow(standbys: int) -> Callable[[Path, list[str]], list[list[str]]]:
    def commands(folder: Path, words: list[str]) -> list[list[str]]:
        flags = [f"--nproc-per-node={WORLD}", f"--standby={standbys}", "--hang-timeout=10s", "--max-faults=100"]
        script = [str(HERE / "peer_regrow.py"), *words]
        return [[sys.executable, "-m", "regrow", "run", "--standalone", "--quiet", *flags, *script]]

    return commands


def _rank_variables(number: int) -> dict[str, str]:
    return {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(WORLD + SPARES)} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29610",
    }


SIDES = {
    "torchrun": Side(
        _launched("torch.distributed.run", "--max-restarts=10"),
        "a checkpoint each 10 steps, timeout of collectives 10 s, --max-restarts 10 (torch's elastic tutorial)",
        "peer_torchrun.py",
        # Without this variable torchrun's restarts hang or die now and then: it would lose more than it has to.
        lambda _: {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
    "nvrx-launcher": Side(
        _launched(
            "nvidia_resiliency_ext.fault_tolerance.launcher",
            "--max-restarts=10",
            "--ft-initial-rank-heartbeat-timeout=60",
            "--ft-rank-heartbeat-timeout=10",
            "--ft-workload-check-interval=0.5",
            "--ignore-missing-fault-tol-cfg",
        ),
        "as torchrun, and heartbeats of 10 s after its example basic_ft_example.py",
        "peer_torchrun.py",
        lambda _: {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
    "nvrx-inprocess": Side(
        _inprocess,
        f"{SPARES} processes in reserve, a checkpoint each 10 steps, soft timeout 10 s and hard 15 s, intervals of "
        "0.2 to 0.5 s; after its example inprocess/basic_example.py",
        "peer_inprocess.py",
        _rank_variables,
    ),
    "torchft": Side(
        _torchft,
        "a replica group of one process under a torchrun each, which restarts it; join and heartbeat timeouts 1 s, "
        "gloo 5 s; after its own train_ddp.py",
        "peer_torchft.py",
        lambda _: {"TORCHFT_LIGHTHOUSE": "http://127.0.0.1:29510"},
    ),
    "ray": Side(
        _ray,
        "TorchTrainer with max_failures 10, a checkpoint each 10 steps that is copied beside the training, "
        "timeouts of collectives and of looks at workers 10 s; after its guides on fault tolerance and checkpoints",
        "peer_ray.py",
        lambda _: {
            "RAY_TRAIN_V2_ENABLED": "1",
            "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "10",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        },
    ),
    "regrow-standby": Side(_regrow(1), "one standby, --hang-timeout 10s", "peer_regrow.py"),
    "regrow-fork": Side(_regrow(0), "no standby, --hang-timeout 10s", "peer_regrow.py"),
}
