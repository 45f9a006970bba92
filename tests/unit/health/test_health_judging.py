"""From readings to verdicts: what is a fault, and above all what is none."""

import errno

import pytest

from regrow.core.ids import NodeId
from regrow.core.verdicts import Action, HealthVerdict, Severity, worst
from regrow.health.judging import judge
from regrow.health.probes.kernel_log import xids
from regrow.health.readings import (
    BandwidthReading,
    ClockReading,
    DiskReading,
    FailedHow,
    GpuReading,
    MemoryReading,
    NetworkReading,
    NotApplicable,
    ProbeFailed,
    ProbeResult,
    ProductReading,
    QuietLog,
    Reading,
    XidReading,
)

NODE = NodeId("node0")


def judged(probe: str, *readings: Reading) -> list[HealthVerdict]:
    return judge(NODE, [ProbeResult(probe, reading) for reading in readings])


def only(probe: str, reading: Reading) -> tuple[Severity, Action]:
    (verdict,) = judged(probe, reading)
    assert (verdict.node, verdict.source) == (NODE, probe)
    assert verdict.evidence
    return verdict.severity, verdict.action


WELL: list[tuple[str, Reading]] = [
    ("kernel-log", QuietLog(3600.0)),
    ("processor", ProductReading("cpu", "float32", 8, 0)),
    ("memory-bandwidth", BandwidthReading("cpu", 5e9)),
    ("disk", DiskReading("/job", 50 << 30, 0.02)),
    ("clock", ClockReading(0.02, 0.001)),
    ("network", NetworkReading("loopback", 0.0001, 9e8)),
    ("accelerator", MemoryReading("cuda0", "H100", 64 << 20, 0, 1.0, 79 << 30, 80 << 30)),
    ("accelerator", ProductReading("cuda0", "bfloat16", 8, 0)),
    ("accelerator", BandwidthReading("cuda0", 2.5e12)),
]
SICK: list[tuple[str, Reading, Severity, Action]] = [
    ("processor", ProductReading("cpu", "float32", 8, 1, "on core 3"), Severity.FATAL, Action.REPLACE),
    ("accelerator", ProductReading("cuda0", "float32", 8, 4), Severity.FATAL, Action.REPLACE),
    ("accelerator", MemoryReading("cuda0", "H100", 1 << 20, 7, 1.0), Severity.FATAL, Action.REPLACE),
    ("memory-bandwidth", BandwidthReading("cpu", 1e8), Severity.SUSPECT, Action.NONE),
    ("accelerator", BandwidthReading("cuda0", 1e9), Severity.SUSPECT, Action.NONE),
    ("disk", DiskReading("/job", 50 << 30, 0.02, wrong=True), Severity.FATAL, Action.REPLACE),
    ("disk", DiskReading("/job", 50 << 30, 0.0, error=errno.EIO), Severity.LEAVE, Action.REPLACE),
    ("disk", DiskReading("/job", 50 << 30, 0.0, error=errno.EROFS), Severity.LEAVE, Action.REPLACE),
    ("disk", DiskReading("/job", 0, 0.0, error=errno.ENOSPC), Severity.SUSPECT, Action.NONE),
    ("disk", DiskReading("/job", 50 << 30, 0.0, error=errno.EACCES), Severity.SUSPECT, Action.NONE),
    ("disk", DiskReading("/job", 1 << 20, 0.02), Severity.SUSPECT, Action.NONE),
    ("disk", DiskReading("/job", 50 << 30, 8.0), Severity.SUSPECT, Action.NONE),
    ("clock", ClockReading(-30.0, 0.001), Severity.SUSPECT, Action.NONE),
    ("network", NetworkReading("loopback", 0.001, 1e9, wrong=True), Severity.LEAVE, Action.REPLACE),
    ("network", NetworkReading("node1:29400", error="timed out"), Severity.SUSPECT, Action.NONE),
    ("network", NetworkReading("node1:29400", 1.01), Severity.SUSPECT, Action.NONE),
]


@pytest.mark.parametrize(("probe", "reading"), WELL)
def test_what_is_well_is_ok(probe: str, reading: Reading) -> None:
    assert only(probe, reading) == (Severity.OK, Action.NONE)


@pytest.mark.parametrize(("probe", "reading", "severity", "action"), SICK)
def test_what_is_not_well_is_told(probe: str, reading: Reading, severity: Severity, action: Action) -> None:
    assert only(probe, reading) == (severity, action)


def test_what_cannot_be_read_is_no_fault() -> None:
    assert judged("nvml", NotApplicable("no driver")) == []


def test_a_clock_is_not_blamed_for_a_slow_network() -> None:
    assert only("clock", ClockReading(1.5, 0.8)) == (Severity.OK, Action.NONE)
    assert only("clock", ClockReading(1.5, 0.1)) == (Severity.SUSPECT, Action.NONE)


def test_a_device_is_compared_with_its_neighbours() -> None:
    copies = [BandwidthReading(f"cuda{index}", 2.5e12) for index in range(7)]
    found = judged("accelerator", *copies, BandwidthReading("cuda7", 1.1e12))
    assert [each.device for each in found if each.severity is Severity.SUSPECT] == ["cuda7"]
    assert "2500.0 GB/s (median)" in found[-1].evidence


@pytest.mark.parametrize("how", [FailedHow.HUNG, FailedHow.DIED, FailedHow.RAISED])
def test_a_probe_that_fails_on_a_device_is_a_verdict_on_it(how: FailedHow) -> None:
    failed = ProbeFailed(how, "cuda1", "its process was ended by SIGSEGV")
    assert only("accelerator", failed) == (Severity.LEAVE, Action.RESET)


@pytest.mark.parametrize(
    ("probe", "failed"),
    [
        ("disk", ProbeFailed(FailedHow.HUNG, "/job", "no answer within 10 s")),
        ("accelerator", ProbeFailed(FailedHow.HUNG, "", "no answer within 60 s")),
        ("accelerator", ProbeFailed(FailedHow.RAISED, "cuda0", "OutOfMemoryError: CUDA out of memory")),
        ("accelerator", ProbeFailed(FailedHow.RAISED, "cuda0", "CUDA-capable device(s) is/are busy or unavailable")),
        ("accelerator", ProbeFailed(FailedHow.DIED, "cuda0", "its process was ended by SIGKILL")),
        ("accelerator", ProbeFailed(FailedHow.GARBLED, "cuda0", "the probe said 'hello'")),
    ],
)
def test_a_probe_that_fails_for_other_reasons_is_only_suspect(probe: str, failed: ProbeFailed) -> None:
    assert only(probe, failed) == (Severity.SUSPECT, Action.NONE)


def xid(number: int, bus: str = "0000:3b:00") -> XidReading:
    return XidReading(bus, number, 12.0, "pid=7, name=python")


@pytest.mark.parametrize(
    ("number", "severity", "action"),
    [
        (79, Severity.FATAL, Action.REBOOT),
        (48, Severity.LEAVE, Action.RESET),
        (95, Severity.LEAVE, Action.RESET),
        (119, Severity.LEAVE, Action.RESET),
        (94, Severity.SUSPECT, Action.NONE),
        (63, Severity.SUSPECT, Action.NONE),
        (13, Severity.OK, Action.NONE),
        (31, Severity.OK, Action.NONE),
        (43, Severity.OK, Action.NONE),
        (45, Severity.OK, Action.NONE),
        (999, Severity.SUSPECT, Action.NONE),
    ],
)
def test_each_xid_means_what_nvidias_catalog_says(number: int, severity: Severity, action: Action) -> None:
    assert only("kernel-log", xid(number)) == (severity, action)


def test_the_drivers_word_of_now_counts_more_than_an_old_xid() -> None:
    gpu = GpuReading("gpu0", name="H100", bus="0000:3b:00", recovery=0)
    results = [ProbeResult("nvml", gpu), *(ProbeResult("kernel-log", xid(number)) for number in (48, 79))]
    assert [(each.device, each.severity) for each in judge(NODE, results)] == [
        ("gpu0", Severity.OK),
        ("gpu0", Severity.SUSPECT),
        ("gpu0", Severity.FATAL),
    ]


def test_xids_of_gpus_that_are_not_ours_are_not_told() -> None:
    ours = GpuReading("gpu0", name="H100", bus="0000:3b:00", only_ours=True)
    results = [ProbeResult("nvml", ours), ProbeResult("kernel-log", xid(79, "0000:9f:00"))]
    assert [each.source for each in judge(NODE, results)] == ["nvml"]


KERNEL_LOG = [
    "6,1201,1500000000,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.65.06",
    "4,1300,1990000000,-;NVRM: Xid (PCI:0000:3B:00): 79, GPU has fallen off the bus.\n SUBSYSTEM=pci",
    "4,1301,1999000000,-;NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x2",
    "4,1302,100000000,-;NVRM: Xid (PCI:0000:3b:00): 48, an old one",
    "not a record",
    "4,x,y,-;NVRM: Xid (PCI:0000:3b:00): 48, without a time",
]


def test_xids_are_found_in_the_kernel_log_by_their_time() -> None:
    found = list(xids(KERNEL_LOG, now=2000.0, window=600.0))
    assert [(each.number, each.bus, each.ago) for each in found] == [(79, "0000:3b:00", 10.0), (154, "0000:3b:00", 1.0)]
    assert [each.number for each in xids(KERNEL_LOG, now=2000.0, window=3600.0)] == [79, 154, 48]


def test_the_worst_of_several_counts() -> None:
    assert worst([]) is Severity.OK
    assert worst([Severity.LEAVE, Severity.OK, Severity.FATAL, Severity.SUSPECT]) is Severity.FATAL
    assert [each for each in Severity if each.failed] == [Severity.LEAVE, Severity.FATAL]
