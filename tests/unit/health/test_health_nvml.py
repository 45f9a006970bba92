"""Answers of NVML become readings, and those verdicts, on GPUs that are well, sick, old, hidden or gone."""

import sys

import pytest
from tests.unit.health.health_nvml import (
    DRIVER_NOT_LOADED,
    LOST,
    MISMATCH,
    NO_PERMISSION,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    Gpu,
    Nvml,
)

from regrow.core.ids import NodeId
from regrow.core.process.extras import install_line
from regrow.core.verdicts import Action, HealthVerdict, Severity
from regrow.health.judging import judge
from regrow.health.probes import nvml
from regrow.health.readings import GpuReading, NotApplicable, ProbeAt, ProbeResult, ProbeSettings, Reading

NODE = NodeId("node0")


def readings(binding: Nvml, monkeypatch: pytest.MonkeyPatch, visible: list[str] | None = None) -> list[Reading]:
    monkeypatch.setitem(sys.modules, "pynvml", binding)
    found = list(nvml.read(ProbeSettings("/tmp", visible=visible)))
    assert not binding.open, "NVML was left open"
    return [each for each in found if not isinstance(each, ProbeAt)]


def verdicts(binding: Nvml, monkeypatch: pytest.MonkeyPatch) -> list[HealthVerdict]:
    return judge(NODE, [ProbeResult("nvml", reading) for reading in readings(binding, monkeypatch)])


def test_a_gpu_that_is_well_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    (verdict,) = verdicts(Nvml(Gpu()), monkeypatch)
    assert (verdict.device, verdict.severity, verdict.action) == ("gpu0", Severity.OK, Action.NONE)
    assert verdict.evidence.startswith("NVIDIA H100 80GB HBM3, 1.0 of 80.0 GiB used, 34 °C, no recovery action")


@pytest.mark.parametrize(
    ("gpu", "severity", "action", "said"),
    [
        (Gpu(recovery=1), Severity.LEAVE, Action.RESET, "GPU reset"),
        (Gpu(recovery=2), Severity.FATAL, Action.REBOOT, "node reboot"),
        (Gpu(recovery=4), Severity.LEAVE, Action.RESET, "drain and reset"),
        (Gpu(recovery=99), Severity.SUSPECT, Action.NONE, "recovery action 99"),
        (Gpu(rows=(0, 9, 0, 1)), Severity.LEAVE, Action.REPLACE, "could not be remapped"),
        (Gpu(rows=(0, 1, 1, 0)), Severity.SUSPECT, Action.RESET, "waits to be remapped"),
        (Gpu(ecc=3), Severity.SUSPECT, Action.RESET, "3 uncorrected ECC errors"),
        (Gpu(throttle=0x48), Severity.SUSPECT, Action.NONE, "hardware slowdown, hardware thermal slowdown at 34 °C"),
        (Gpu(handle=LOST), Severity.FATAL, Action.REBOOT, "is lost"),
        (Gpu(handle=RESET_REQUIRED), Severity.LEAVE, Action.RESET, "needs a reset"),
        (Gpu(refuse={"memory": LOST}), Severity.FATAL, Action.REBOOT, "is lost"),
    ],
)
def test_each_sickness_has_its_verdict(
    gpu: Gpu, severity: Severity, action: Action, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (verdict,) = verdicts(Nvml(gpu), monkeypatch)
    assert (verdict.severity, verdict.action) == (severity, action)
    assert said in verdict.evidence


def test_power_caps_and_idle_clocks_are_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    (verdict,) = verdicts(Nvml(Gpu(throttle=0x1 | 0x2 | 0x4 | 0x10 | 0x100)), monkeypatch)
    assert verdict.severity is Severity.OK


def test_what_an_older_gpu_cannot_say_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Gpu(refuse=dict.fromkeys(("rows", "ecc", "recovery", "throttle", "memory"), NOT_SUPPORTED))
    (reading,) = readings(Nvml(old), monkeypatch)
    assert isinstance(reading, GpuReading)
    assert (reading.recovery, reading.ecc_uncorrected, reading.remap_failed, reading.throttle) == (None,) * 4
    (verdict,) = verdicts(Nvml(old), monkeypatch)
    assert verdict.severity is Severity.OK


def test_an_older_binding_does_without_its_newer_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(Nvml):
        @property
        def NVML_FI_DEV_GET_GPU_RECOVERY_ACTION(self) -> int:  # type: ignore[override]
            raise AttributeError

        @property
        def nvmlDeviceGetCurrentClocksEventReasons(self) -> None:  # type: ignore[override]
            raise AttributeError

    (reading,) = readings(Old(Gpu(recovery=1)), monkeypatch)
    assert isinstance(reading, GpuReading)
    assert (reading.recovery, reading.throttle, reading.error) == (None, None, None)


def test_one_lost_gpu_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(Nvml(Gpu("GPU-a"), Gpu("GPU-b", handle=LOST), Gpu("GPU-c")), monkeypatch)
    assert [(each.device, each.severity) for each in found] == [
        ("gpu0", Severity.OK),
        ("gpu1", Severity.FATAL),
        ("gpu2", Severity.OK),
    ]


@pytest.mark.parametrize("init", [DRIVER_NOT_LOADED, NO_PERMISSION, 12])
def test_no_driver_is_no_fault(init: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (reading,) = readings(Nvml(init=init), monkeypatch)
    assert isinstance(reading, NotApplicable)


def test_a_driver_and_a_library_of_two_versions_are_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    (verdict,) = verdicts(Nvml(init=MISMATCH), monkeypatch)
    assert (verdict.severity, verdict.action) == (Severity.SUSPECT, Action.REBOOT)


def test_without_the_binding_there_is_nothing_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (found,) = nvml.read(ProbeSettings("/tmp"))
    assert isinstance(found, NotApplicable)
    assert install_line("gpu") in found.reason


def test_gpus_of_others_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (Gpu("GPU-aa1"), Gpu("GPU-bb2", recovery=2), Gpu("GPU-cc3"), Gpu("GPU-dd4", handle=LOST))
    for visible in (["0", "2"], ["GPU-aa", "GPU-cc3"]):
        found = readings(Nvml(*gpus), monkeypatch, visible)
        assert [each.device for each in found if isinstance(each, GpuReading)] == ["gpu0", "gpu2"]
    assert readings(Nvml(*gpus), monkeypatch, []) == []
    assert len(readings(Nvml(*gpus), monkeypatch, ["MIG-1"])) == 4


def test_a_handle_that_we_may_not_have_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert readings(Nvml(Gpu(handle=NO_PERMISSION)), monkeypatch) == []


def test_the_stand_in_has_no_name_that_the_binding_lacks() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    mine = [name for name in dir(Nvml) if name.startswith(("nvml", "NVML"))]
    assert [name for name in mine if not hasattr(pynvml, name)] == []
    numbers = {name: getattr(Nvml, name) for name in mine if isinstance(getattr(Nvml, name), int)}
    assert {name: getattr(pynvml, name) for name in numbers} == numbers
