"""Reads the state of NVIDIA GPUs from the driver, by NVML, without a context on them.

NVML: https://docs.nvidia.com/deploy/nvml-api/; `nvidia-ml-py` is its Python binding (`pip install 'regrow[gpu]'`).
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from regrow.core.process.extras import install_line
from regrow.health.readings import GpuReading, NotApplicable, ProbeAt, ProbeSettings, Reading

Value = TypeVar("Value")


def read(settings: ProbeSettings) -> Iterator[ProbeAt | Reading]:
    """Yield one reading of each usable GPU."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        yield NotApplicable(f"nvidia-ml-py is not installed ({install_line('gpu')})")
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        yield from _without_driver(nvml, error)
        return
    try:
        yield from _all(nvml, settings)
    finally:
        nvml.nvmlShutdown()


def _without_driver(nvml: Any, error: Any) -> Iterator[Reading]:
    """Readings without a usable driver: not applicable if the library, the driver or the permission is missing."""
    absent = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED, nvml.NVML_ERROR_NO_PERMISSION)
    if error.value in absent:
        yield NotApplicable(f"no NVIDIA driver answers: {error}")
    else:
        yield GpuReading("", error=int(error.value), said=str(error))


def _all(nvml: Any, settings: ProbeSettings) -> Iterator[ProbeAt | Reading]:
    count = int(nvml.nvmlDeviceGetCount())
    if count == 0:
        yield NotApplicable("the NVIDIA driver has no GPU")
    for index in range(count):
        device = f"gpu{index}"
        if device in settings.skip:
            continue
        yield ProbeAt("nvml", device)
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_NO_PERMISSION and is_ours(settings.visible, index, ""):
                yield GpuReading(device, error=int(error.value), said=str(error))
            continue
        if is_ours(settings.visible, index, uuid):
            yield _gpu(nvml, handle, device, uuid, only_ours=settings.visible is not None)


def is_ours(visible: Sequence[str] | None, index: int, uuid: str) -> bool:
    """True if `CUDA_VISIBLE_DEVICES` names this GPU, by number or by a prefix of its UUID.

    The name of a GPU partition (`MIG-…`) does not identify the GPU, so with such names all GPUs count.
    """
    if visible is None or any(name.startswith("MIG") for name in visible):
        return True
    return any(name == str(index) or (uuid != "" and name != "" and uuid.startswith(name)) for name in visible)


def _gpu(nvml: Any, handle: Any, device: str, uuid: str, *, only_ours: bool) -> GpuReading:
    ask = _Asker(nvml)
    memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    rows = ask(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    bus = ask(lambda: nvml.nvmlDeviceGetPciInfo(handle))
    return GpuReading(
        device,
        name=_text(ask(lambda: nvml.nvmlDeviceGetName(handle)) or ""),
        uuid=uuid,
        bus="" if bus is None else f"{bus.domain:04x}:{bus.bus:02x}:{bus.device:02x}",
        memory_total=None if memory is None else int(memory.total),
        memory_used=None if memory is None else int(memory.used),
        recovery=_recovery(nvml, ask, handle),
        ecc_uncorrected=ask(
            lambda: int(
                nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            )
        ),
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        throttle=ask(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))),
        temperature=ask(lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
        error=ask.lost,
        said=ask.said,
        only_ours=only_ours,
    )


def _recovery(nvml: Any, ask: "_Asker", handle: Any) -> int | None:
    """`NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`; None before driver R565 and binding 12.565, which do not have it."""
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is None:
        return None
    values = ask(lambda: nvml.nvmlDeviceGetFieldValues(handle, [field]))
    if values is None or int(values[0].nvmlReturn) != nvml.NVML_SUCCESS:
        return None
    return int(values[0].value.uiVal)


class _Asker:
    """Makes queries that a GPU may not support, for which it returns None. Keeps an error that means a lost GPU."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self.lost: int | None = None
        self.said = ""

    def __call__(self, question: Callable[[], Value]) -> Value | None:
        try:
            return question()
        except self._nvml.NVMLError as error:
            gone = (self._nvml.NVML_ERROR_GPU_IS_LOST, getattr(self._nvml, "NVML_ERROR_RESET_REQUIRED", None))
            if error.value in gone:
                self.lost, self.said = int(error.value), str(error)
            return None
        except AttributeError:  # an older binding without the function
            return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
