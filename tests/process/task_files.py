"""Task files of `deploy/skypilot` and `deploy/dstack`, run as these systems do: by a shell, with their variables."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
SETUP = "pip install regrow"
GOOGLE = "/computeMetadata/v1/instance/preempted"


def sky(name: str) -> Any:
    """A task file of SkyPilot's."""
    return yaml.safe_load((ROOT / "deploy" / "skypilot" / f"{name}.yaml").read_text())


def dstack(name: str) -> Any:
    """A task file of dstack's."""
    return yaml.safe_load((ROOT / "deploy" / "dstack" / f"{name}.dstack.yml").read_text())


def sky_script(task: Any) -> str:
    """Script of a node after its set-up."""
    return str(task["run"])


def dstack_script(task: Any) -> str:
    """The commands of a node as dstack's runner joins them, without those that install."""
    return " && ".join(each for each in task["commands"] if not each.startswith(SETUP))


def dstack_env(task: Any) -> dict[str, str]:
    """Its variables that have a value in the file."""
    return dict(each.split("=", 1) for each in task["env"] if "=" in each)


def sky_place(rank: int, nodes: int) -> dict[str, str]:
    """Variables of a node: docs.skypilot.co, Distributed Multi-Node Jobs."""
    return {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": str(nodes),
        "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * nodes),
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
    }


def dstack_place(rank: int, nodes: int) -> dict[str, str]:
    """Variables of a node: dstack.ai/docs, Tasks, Distributed tasks."""
    return {
        "DSTACK_NODE_RANK": str(rank),
        "DSTACK_NODES_NUM": str(nodes),
        "DSTACK_NODES_IPS": "\n".join(["127.0.0.1"] * nodes),
        "DSTACK_MASTER_NODE_IP": "127.0.0.1",
        "DSTACK_GPUS_PER_NODE": "1",
    }


def start(script: str, env: Mapping[str, str], folder: Path, name: str) -> "subprocess.Popen[bytes]":
    """Run a script as a machine of this name would, with a home of its own."""
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {**os.environ, **env, "PATH": paths, "REGROW_HOME": str(folder / f"{name}.home")}
    with (folder / f"{name}.log").open("wb") as log:
        words = ["bash", "-c", script]
        return subprocess.Popen(words, env=given, cwd=folder, stdout=log, stderr=log, start_new_session=True)
