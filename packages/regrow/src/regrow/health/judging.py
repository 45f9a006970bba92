"""Judges readings. Pure: equal readings give equal verdicts everywhere.

The first rule is to do no harm: only evidence of a fault gives `leave` or `fatal`. A slow, busy, unknown or unavailable
reading is `suspect` at most.
"""

import errno
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from regrow.core.ids import NodeId, Seconds
from regrow.core.verdicts import Action, HealthVerdict, Severity
from regrow.health import xids
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
    XidReading,
)


class HealthLimits(NamedTuple):
    """Limits beyond which a reading is suspect.

    They are wide on purpose, as a probe runs once, beside other work. `slow_device`, `slow_host`: bytes per second; any
    server core of the last ten years copies several GB/s, an accelerator a hundred or more. `odd_device`: fraction of
    the median of this node's devices, which are of one kind. `skew`: wall clocks matter to certificates, tokens and
    records, not to steps; NTP keeps within milliseconds. `disk_s`: for 2 MiB and a sync: milliseconds on an SSD, tens
    of them on a disk. `connect_s`: a round trip in a data centre takes less than 1 ms, a lost SYN costs a second.
    """

    slow_host: float = 0.5e9
    slow_device: float = 20e9
    odd_device: float = 0.5
    skew: Seconds = 1.0
    disk_s: Seconds = 5.0
    disk_free: int = 1 << 30
    connect_s: Seconds = 0.9


LIMITS = HealthLimits()

_RECOVERY = {
    1: (Severity.LEAVE, Action.RESET, "GPU reset"),
    2: (Severity.FATAL, Action.REBOOT, "node reboot"),
    3: (Severity.LEAVE, Action.RESET, "drain of peer-to-peer traffic"),
    4: (Severity.LEAVE, Action.RESET, "drain and reset"),
    5: (Severity.SUSPECT, Action.NONE, "recovery of the IMEX domain"),
    6: (Severity.LEAVE, Action.RESET, "PCIe bus reset"),
    7: (Severity.FATAL, Action.REBOOT, "system reboot"),
}
"""Values of `nvmlDeviceGpuRecoveryAction_t`, the driver's own verdict: 0 means that the GPU can be used at once.

https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html
"""
_GPU_LOST, _RESET_REQUIRED, _VERSIONS_DIFFER = 15, 16, 18
"""`NVML_ERROR_GPU_IS_LOST`, `NVML_ERROR_RESET_REQUIRED`, `NVML_ERROR_LIB_RM_VERSION_MISMATCH`."""
_THROTTLED = {0x08: "hardware slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake", 0x20: "thermal limit"}
"""Bits of `nvmlClocksEventReason*` that are not part of normal operation, unlike idle, power cap and settings."""
_BUSY = ("out of memory", "busy or unavailable", "insufficient memory")
"""Texts in the errors of an accelerator that other processes use."""
_ACCELERATOR = ("accelerator", "nvml")
_GIB = 1 << 30

Finding = tuple[Severity, Action, str]


def judge(
    node: NodeId, results: Sequence[ProbeResult], limits: HealthLimits = LIMITS, *, busy: bool = False
) -> list[HealthVerdict]:
    """Verdicts on each reading; none for readings that do not apply.

    `busy`: the probes ran beside a training, on the CPU time that it left: a late probe may only have been starved.
    """
    gpus = [result.reading for result in results if isinstance(result.reading, GpuReading)]
    copies = [
        result.reading.bytes_per_s
        for result in results
        if isinstance(result.reading, BandwidthReading) and result.probe in _ACCELERATOR
    ]
    verdicts = []
    for result in results:
        for device, finding in _findings(result, gpus, copies, limits):
            severity, action, evidence = finding
            if busy and isinstance(result.reading, ProbeFailed) and result.reading.how is FailedHow.HUNG:
                severity, action = Severity.SUSPECT, Action.NONE
            verdicts.append(HealthVerdict(node, device, severity, action, result.probe, evidence))
    return verdicts


def _findings(
    result: ProbeResult, gpus: Sequence[GpuReading], copies: Sequence[float], limits: HealthLimits
) -> Iterable[tuple[str, Finding]]:
    match result.reading:
        case NotApplicable():
            return []
        case QuietLog(window=window):
            return [("", (Severity.OK, Action.NONE, f"no Xid in the last {window / 60:g} min"))]
        case GpuReading() as gpu:
            return [(gpu.device, finding) for finding in _gpu(gpu)]
        case XidReading() as xid:
            return _xid(xid, gpus)
        case ProductReading() as product:
            return [(product.device, _product(product))]
        case MemoryReading() as memory:
            return [(memory.device, _memory(memory))]
        case BandwidthReading() as copy:
            return [(copy.device, _bandwidth(copy, result.probe, copies, limits))]
        case DiskReading() as disk:
            return [(disk.folder, _disk(disk, limits))]
        case ClockReading() as clock:
            return [("", _clock(clock, limits))]
        case NetworkReading() as network:
            return [(network.peer, _network(network, limits))]
        case ProbeFailed() as failed:
            return [(failed.device, _failed(failed, result.probe))]


# --- accelerators ------------------------------------------------------------------------------------------------


def _gpu(gpu: GpuReading) -> list[Finding]:
    """All problems of a GPU; if there are none, one finding with `ok`."""
    if gpu.error is not None:
        return [_unanswered(gpu)]
    found: list[Finding] = []
    if gpu.recovery:
        known = _RECOVERY.get(gpu.recovery, (Severity.SUSPECT, Action.NONE, f"recovery action {gpu.recovery}"))
        found.append((known[0], known[1], f"the driver asks for: {known[2]}"))
    if gpu.remap_failed:
        found.append((Severity.LEAVE, Action.REPLACE, "a memory row could not be remapped"))
    if gpu.remap_pending:
        # "Unaffected applications can continue running, and new workloads can be launched" (NVIDIA, as above).
        found.append((Severity.SUSPECT, Action.RESET, "a memory row waits to be remapped by a reset"))
    if gpu.ecc_uncorrected:
        text = f"{gpu.ecc_uncorrected} uncorrected ECC errors since the driver was loaded"
        found.append((Severity.SUSPECT, Action.RESET, text))
    slowed = [name for bit, name in _THROTTLED.items() if gpu.throttle is not None and gpu.throttle & bit]
    if slowed:
        heat = f" at {gpu.temperature} °C" if gpu.temperature is not None else ""
        found.append((Severity.SUSPECT, Action.NONE, f"clocks are held down: {', '.join(slowed)}{heat}"))
    return found or [(Severity.OK, Action.NONE, _gpu_text(gpu))]


def _unanswered(gpu: GpuReading) -> Finding:
    match gpu.error:
        case code if code == _GPU_LOST:
            return Severity.FATAL, Action.REBOOT, f"the GPU is lost: {gpu.said}"
        case code if code == _RESET_REQUIRED:
            return Severity.LEAVE, Action.RESET, f"the GPU needs a reset: {gpu.said}"
        case code if code == _VERSIONS_DIFFER:
            return Severity.SUSPECT, Action.REBOOT, f"driver and its library are of two versions: {gpu.said}"
        case _:
            return Severity.SUSPECT, Action.NONE, f"NVML cannot ask it: {gpu.said}"


def _gpu_text(gpu: GpuReading) -> str:
    parts = [gpu.name]
    if gpu.memory_total and gpu.memory_used is not None:
        parts.append(f"{gpu.memory_used / _GIB:.1f} of {gpu.memory_total / _GIB:.1f} GiB used")
    if gpu.temperature is not None:
        parts.append(f"{gpu.temperature} °C")
    if gpu.recovery is not None:
        parts.append("no recovery action")
    if gpu.ecc_uncorrected is not None:
        parts.append("no uncorrected ECC error")
    return ", ".join(part for part in parts if part)


def _xid(xid: XidReading, gpus: Sequence[GpuReading]) -> list[tuple[str, Finding]]:
    """Findings from a line of the kernel log, combined with the driver's present state of that GPU."""
    # Some lines have the PCI function too, `0000:3b:00.0`.
    gpu = next((gpu for gpu in gpus if gpu.bus and xid.bus.startswith(gpu.bus)), None)
    if gpu is None and any(each.only_ours for each in gpus):
        return []  # a GPU of the node that is hidden from this process
    meant = xids.meaning(xid.number)
    severity, action, note = meant.severity, meant.action, ""
    if gpu is not None and gpu.recovery == 0 and severity.failed and xid.number != xids.FALLEN_OFF:
        # The driver no longer asks for a recovery, for example after a reset; that is newer than the log line.
        severity, action, note = Severity.SUSPECT, Action.NONE, "; the driver asks for no recovery now"
    said = f": {xid.text}" if xid.text else ""
    evidence = f"Xid {xid.number} ({meant.name}) {xid.ago:.0f} s ago{said}{note}"
    return [(gpu.device if gpu is not None else xid.bus, (severity, action, evidence))]


def _product(product: ProductReading) -> Finding:
    where = "cores" if product.device == "cpu" else "products"
    if product.wrong:
        text = f"{product.wrong} wrong elements in products of {product.dtype}: {product.first}"
        return Severity.FATAL, Action.REPLACE, text
    return Severity.OK, Action.NONE, f"products of {product.dtype} are exact ({product.products} {where})"


def _memory(memory: MemoryReading) -> Finding:
    if memory.wrong:
        return Severity.FATAL, Action.REPLACE, f"{memory.wrong} of {memory.tried} bytes came back changed"
    free = ""
    if memory.free is not None and memory.total is not None:
        free = f", {memory.free / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    text = f"{memory.name}: context and {memory.tried >> 20} MiB tried in {memory.seconds:.1f} s{free}"
    return Severity.OK, Action.NONE, text


def _bandwidth(copy: BandwidthReading, probe: str, copies: Sequence[float], limits: HealthLimits) -> Finding:
    rate = f"copies {copy.bytes_per_s / 1e9:.1f} GB/s"
    if probe not in _ACCELERATOR:
        slow = copy.bytes_per_s < limits.slow_host
        return (Severity.SUSPECT if slow else Severity.OK), Action.NONE, rate
    middle = statistics.median(copies)
    if copy.bytes_per_s < limits.slow_device or copy.bytes_per_s < limits.odd_device * middle:
        return Severity.SUSPECT, Action.NONE, f"{rate}, the node's devices {middle / 1e9:.1f} GB/s (median)"
    return Severity.OK, Action.NONE, rate


# --- the node ----------------------------------------------------------------------------------------------------


def _disk(disk: DiskReading, limits: HealthLimits) -> Finding:
    if disk.wrong:
        return Severity.FATAL, Action.REPLACE, "a file came back changed"
    if disk.error in (errno.EIO, errno.EROFS, errno.EUCLEAN):
        return Severity.LEAVE, Action.REPLACE, f"a file cannot be written: {_strerror(disk.error)}"
    if disk.error is not None:
        return Severity.SUSPECT, Action.NONE, f"a file cannot be written: {_strerror(disk.error)}"
    text = f"wrote 2 MiB in {disk.write_s * 1e3:.0f} ms, {disk.free / _GIB:.1f} GiB free"
    narrow = disk.write_s > limits.disk_s or disk.free < limits.disk_free
    return (Severity.SUSPECT if narrow else Severity.OK), Action.NONE, text


def _strerror(number: int) -> str:
    return f"{errno.errorcode.get(number, number)}"


def _clock(clock: ClockReading, limits: HealthLimits) -> Finding:
    text = f"{clock.skew:+.3f} s (± {clock.uncertainty:.3f}) to the coordinator's"
    certain = abs(clock.skew) - clock.uncertainty > limits.skew
    return (Severity.SUSPECT if certain else Severity.OK), Action.NONE, text


def _network(network: NetworkReading, limits: HealthLimits) -> Finding:
    if network.error:
        # The faulty end is unknown here; a broken loopback would make everything else fail too.
        return Severity.SUSPECT, Action.NONE, f"no connection: {network.error}"
    if network.wrong:
        return Severity.LEAVE, Action.REPLACE, "bytes came back changed"
    rate = f", {network.bytes_per_s / 1e6:.0f} MB/s" if network.bytes_per_s is not None else ""
    text = f"connected in {network.connect_s * 1e3:.1f} ms{rate}"
    return (Severity.SUSPECT if network.connect_s > limits.connect_s else Severity.OK), Action.NONE, text


def _failed(failed: ProbeFailed, probe: str) -> Finding:
    """The finding for a probe without a reading: a fault of an accelerator if its context cannot be made or used."""
    text = f"the probe {_HOW[failed.how]}: {failed.detail}"
    of_device = probe in _ACCELERATOR and failed.device != ""
    if not of_device or failed.how is FailedHow.GARBLED or any(busy in failed.detail for busy in _BUSY):
        return Severity.SUSPECT, Action.NONE, text
    if "SIGKILL" in failed.detail:  # sent by another process, or by the kernel when memory is short
        return Severity.SUSPECT, Action.NONE, text
    return Severity.LEAVE, Action.RESET, text


_HOW = {
    FailedHow.HUNG: "hung",
    FailedHow.DIED: "died",
    FailedHow.RAISED: "raised",
    FailedHow.GARBLED: "garbled its answer",
}
