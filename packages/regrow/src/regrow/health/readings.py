"""Readings of probes, and the messages by which the child process sends them. No I/O. Pure."""

from enum import StrEnum

import msgspec

from regrow.core.ids import Seconds


class GpuReading(msgspec.Struct, frozen=True, tag=True):
    """NVML's reading of one GPU. None: not available from this driver or GPU.

    `bus`: its PCI address as in the kernel log, `0000:3b:00`. `error`: NVML's error code if the GPU cannot be queried.
    `throttle`: bits of `nvmlClocksEventReason*`. `recovery`: `nvmlDeviceGpuRecoveryAction_t`, the driver's own verdict.
    """

    device: str
    name: str = ""
    uuid: str = ""
    bus: str = ""
    memory_total: int | None = None
    memory_used: int | None = None
    recovery: int | None = None
    ecc_uncorrected: int | None = None
    """Number of uncorrectable errors since the driver was loaded."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    throttle: int | None = None
    temperature: int | None = None
    """Temperature in degrees Celsius."""
    error: int | None = None
    said: str = ""
    """The text of `error`."""
    only_ours: bool = False
    """True if `CUDA_VISIBLE_DEVICES` is set, so that other GPUs of the node may be hidden."""


class XidReading(msgspec.Struct, frozen=True, tag=True):
    """One line of the kernel log in which the NVIDIA driver reports an Xid. `ago`: its age in seconds."""

    bus: str
    number: int
    ago: Seconds
    text: str


class QuietLog(msgspec.Struct, frozen=True, tag=True):
    """The kernel log was read, and has no Xid within `window`."""

    window: Seconds


class MemoryReading(msgspec.Struct, frozen=True, tag=True):
    """A context was made on an accelerator and memory written and read back. `wrong`: bytes that came back changed."""

    device: str
    name: str
    tried: int
    wrong: int
    seconds: Seconds
    free: int | None = None
    total: int | None = None


class ProductReading(msgspec.Struct, frozen=True, tag=True):
    """A matrix product whose exact elements are known. `wrong`: number of wrong elements; `first`: the first one."""

    device: str
    dtype: str
    products: int
    wrong: int
    first: str = ""


class BandwidthReading(msgspec.Struct, frozen=True, tag=True):
    """Speed of copies in a device's memory: bytes read and written per second."""

    device: str
    bytes_per_s: float


class DiskReading(msgspec.Struct, frozen=True, tag=True):
    """A file was written, synced and read back. `error`: the errno of a failure; None: it succeeded."""

    folder: str
    free: int
    write_s: Seconds
    wrong: bool = False
    error: int | None = None


class ClockReading(msgspec.Struct, frozen=True, tag=True):
    """The coordinator's wall clock minus this node's; `uncertainty`: half of the round trip."""

    skew: Seconds
    uncertainty: Seconds


class NetworkReading(msgspec.Struct, frozen=True, tag=True):
    """A connection to loopback or a peer. `bytes_per_s`: None if nothing was sent. `error`: reason of a failure."""

    peer: str
    connect_s: Seconds = 0.0
    bytes_per_s: float | None = None
    wrong: bool = False
    error: str = ""


class NotApplicable(msgspec.Struct, frozen=True, tag=True):
    """There is nothing to read on this node, or it cannot be read from here."""

    reason: str
    device: str = ""


class FailedHow(StrEnum):
    """The way in which a probe failed."""

    HUNG = "hung"
    DIED = "died"
    RAISED = "raised"
    GARBLED = "garbled"


class ProbeFailed(msgspec.Struct, frozen=True, tag=True):
    """A probe gave no reading of a device. `detail`: exception, exit status, or output."""

    how: FailedHow
    device: str
    detail: str


Reading = (
    GpuReading
    | XidReading
    | QuietLog
    | MemoryReading
    | ProductReading
    | BandwidthReading
    | DiskReading
    | ClockReading
    | NetworkReading
    | NotApplicable
    | ProbeFailed
)


class ProbeResult(msgspec.Struct, frozen=True):
    """A reading with the name of the probe that made it."""

    probe: str
    reading: Reading


class ProbeSettings(msgspec.Struct, frozen=True):
    """Settings of probes.

    `folder`: where the disk is tested. `peers`: `HOST:PORT` of nodes to connect to. `clock`: URL of the coordinator's
    time; `token`: its secret. `window`: seconds of the kernel log to consider. `visible`: the usable GPUs, as in
    `CUDA_VISIBLE_DEVICES`; None: all. `skip`: devices that the probe has already finished.
    """

    folder: str
    peers: list[str] = []
    clock: str = ""
    token: str = ""
    window: Seconds = 3600.0
    visible: list[str] | None = None
    skip: list[str] = []


class ProbeOrder(msgspec.Struct, frozen=True):
    """The order for the child process, on its standard input. `settings.skip` applies to the first probe."""

    probes: list[str]
    settings: ProbeSettings


class ProbeAt(msgspec.Struct, frozen=True, tag=True):
    """The probe starts with this device (empty: the node), and should finish it within its deadline."""

    probe: str
    device: str = ""


class Gave(msgspec.Struct, frozen=True, tag=True):
    """The probe has made a reading."""

    probe: str
    reading: Reading


class Raised(msgspec.Struct, frozen=True, tag=True):
    """The probe raised an exception; the child ends too, as a device's context may be corrupted."""

    probe: str
    device: str
    error: str


class Through(msgspec.Struct, frozen=True, tag=True):
    """The probe has finished."""

    probe: str


Line = ProbeAt | Gave | Raised | Through
