"""The probes on a real accelerator: what a healthy one says, and that nothing of it is taken for a fault."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from regrow.core.ids import NodeId
from regrow.health.judging import judge
from regrow.health.probes import QUICK
from regrow.health.readings import (
    BandwidthReading,
    GpuReading,
    MemoryReading,
    NotApplicable,
    ProbeFailed,
    ProbeResult,
    ProbeSettings,
    ProductReading,
)
from regrow.health.run import ProbeRunner

FOUND = torch.accelerator.current_accelerator(check_available=True)
NVIDIA = FOUND is not None and FOUND.type == "cuda" and torch.version.cuda is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(FOUND is None, reason="torch has no accelerator here"),
]
needs_nvml = pytest.mark.skipif(
    not NVIDIA or find_spec("pynvml") is None, reason="needs an NVIDIA GPU and nvidia-ml-py"
)


def run(tmp_path: Path, *probes: str) -> list[ProbeResult]:
    results = ProbeRunner(ProbeSettings(str(tmp_path)), os.environ).run(probes)
    assert [each for each in results if isinstance(each.reading, ProbeFailed)] == []
    return results


def test_each_device_multiplies_exactly_keeps_its_memory_and_copies(tmp_path: Path) -> None:
    readings = [result.reading for result in run(tmp_path, "accelerator")]
    count = torch.accelerator.device_count()
    memory = [each for each in readings if isinstance(each, MemoryReading)]
    assert [each.wrong for each in memory] == [0] * count
    products = [each for each in readings if isinstance(each, ProductReading)]
    assert {(each.device, each.dtype) for each in products} >= {(each.device, "float32") for each in memory}
    assert [each.first for each in products if each.wrong] == []
    copies = [each for each in readings if isinstance(each, BandwidthReading)]
    assert all(each.bytes_per_s > 20e9 for each in copies)


@needs_nvml
def test_the_driver_says_of_each_gpu_what_it_is(tmp_path: Path) -> None:
    gpus = [result.reading for result in run(tmp_path, "nvml")]
    assert gpus
    for gpu in gpus:
        assert isinstance(gpu, GpuReading)
        assert gpu.error is None
        assert gpu.name
        assert gpu.uuid.startswith("GPU-")
        assert gpu.memory_total


@needs_nvml
def test_the_quick_probes_take_no_context(tmp_path: Path) -> None:
    """By the memory that the driver counts as used, before, between and after."""

    def used() -> list[int | None]:
        readings = [result.reading for result in run(tmp_path, "nvml")]
        return [each.memory_used for each in readings if isinstance(each, GpuReading)]

    before = used()
    run(tmp_path, *QUICK)
    assert used() == before


def test_a_healthy_machine_is_given_no_verdict_to_leave(tmp_path: Path) -> None:
    verdicts = judge(NodeId("here"), run(tmp_path, *QUICK, "accelerator"))
    assert [each.text for each in verdicts if each.severity.failed] == []


def test_doctor_tells_it_as_json(tmp_path: Path) -> None:
    environ = {**os.environ, "REGROW_HOME": str(tmp_path)}
    line = [sys.executable, "-m", "regrow", "doctor", "--json"]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sources = {each["source"] for each in json.loads(done.stdout)["verdicts"]}
    assert {"accelerator", "processor", "disk"} <= sources


@needs_nvml
def test_gpus_that_are_hidden_are_not_looked_at(tmp_path: Path) -> None:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    results = ProbeRunner(ProbeSettings(str(tmp_path), visible=[]), environ).run(["nvml", "accelerator"])
    assert [each for each in results if not isinstance(each.reading, NotApplicable)] == []
