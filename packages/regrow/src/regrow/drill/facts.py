"""Facts about this machine and its installed packages; runs in a check's own process, as it imports torch."""

import os
import platform
import re
import resource
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from regrow.devices import accelerators, nvidia
from regrow.drill.ground import Ground
from regrow.drill.judging import MachineFacts, judge_facts
from regrow.drill.verdict import Judgement

_PACKAGES = ("regrow", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy")


def check(ground: Ground) -> Judgement:
    """Gather the facts and judge them."""
    return judge_facts(gather(ground.settings.ranks))


def gather(ranks: int) -> MachineFacts:
    """Collect the facts that matter for this number of ranks."""
    shared = Path("/dev/shm")
    return MachineFacts(
        device=_device(),
        descriptors=_limit(resource.RLIMIT_NOFILE),
        locked=_limit(resource.RLIMIT_MEMLOCK),
        infiniband=_names(Path("/sys/class/infiniband")),
        shared_free=psutil.disk_usage(str(shared)).free if shared.is_dir() else None,
        memory_free=psutil.virtual_memory().available,
        ranks=ranks,
    )


def versions() -> dict[str, str]:
    """Versions and limits, by name, for the report."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "kernel": platform.release()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["device"] = _device()
    if nvidia.toolkit():
        found[nvidia.KIND] = nvidia.toolkit()
    driver = Path("/proc/driver/nvidia/version")
    if driver.is_file():
        found["driver"] = driver_version(driver.read_text(errors="replace"))
    found["processors"] = str(len(os.sched_getaffinity(0)))
    for name, number in (("descriptors", resource.RLIMIT_NOFILE), ("memlock", resource.RLIMIT_MEMLOCK)):
        limit = _limit(number)
        found[name] = "unlimited" if limit is None else str(limit)
    found["infiniband"] = ", ".join(_names(Path("/sys/class/infiniband"))) or "none"
    found["memory_free"] = str(psutil.virtual_memory().available)
    return found


def driver_version(reported: str) -> str:
    """The NVIDIA driver's version in the text of its `/proc` file; the whole first line if it contains no version."""
    first = reported.partition("\n")[0]
    found = re.search(r"\b\d+\.\d+(\.\d+)*\b", first)
    return found.group() if found else first


def _device() -> str:
    kind = accelerators.kind() if torch.accelerator.is_available() else ""
    if not kind:
        return f"{len(os.sched_getaffinity(0))} processors, no accelerator"
    names = [accelerators.name_of(torch.device(kind, at)) or kind for at in range(torch.accelerator.device_count())]
    return ", ".join(f"{names.count(each)} × {each}" for each in dict.fromkeys(names))


def _limit(number: int) -> int | None:
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft


def _names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
