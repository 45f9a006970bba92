"""A stand-in for `pynvml` with the answers of a node of GPUs, some of them sick."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

LOST, RESET_REQUIRED, NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, MISMATCH = 15, 16, 3, 4, 9, 18


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class Gpu:
    """Answers of one GPU; a number of `refuse` makes that function fail with it."""

    uuid: str = "GPU-5d0a"
    recovery: int = 0
    ecc: int = 0
    rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    throttle: int = 0x1
    handle: int | None = None
    """NVML's error for its handle."""
    refuse: dict[str, int] = field(default_factory=dict)


class Nvml:
    """The functions of the binding that the probe calls, for these GPUs."""

    NVMLError = NVMLError
    NVML_SUCCESS = 0
    NVML_ERROR_NOT_SUPPORTED = NOT_SUPPORTED
    NVML_ERROR_NO_PERMISSION = NO_PERMISSION
    NVML_ERROR_DRIVER_NOT_LOADED = DRIVER_NOT_LOADED
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_GPU_IS_LOST = LOST
    NVML_ERROR_RESET_REQUIRED = RESET_REQUIRED
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_TEMPERATURE_GPU = 0
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230

    def __init__(self, *gpus: Gpu, init: int | None = None) -> None:
        self.gpus, self.init, self.open = gpus, init, False

    def nvmlInit(self) -> None:
        if self.init is not None:
            raise NVMLError(self.init)
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        gpu = self.gpus[index]
        if gpu.handle is not None:
            raise NVMLError(gpu.handle)
        return gpu

    def _answer(self, gpu: Gpu, name: str, answer: Callable[[], Any]) -> Any:
        if name in gpu.refuse:
            raise NVMLError(gpu.refuse[name])
        return answer()

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> bytes:
        return gpu.uuid.encode()  # older bindings answer in bytes

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetPciInfo(self, gpu: Gpu) -> Any:
        return SimpleNamespace(domain=0, bus=0x3B + self.gpus.index(gpu), device=0)

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:
        return self._answer(gpu, "memory", lambda: SimpleNamespace(total=80 << 30, used=1 << 30))

    def nvmlDeviceGetRemappedRows(self, gpu: Gpu) -> tuple[int, int, int, int]:
        rows: tuple[int, int, int, int] = self._answer(gpu, "rows", lambda: gpu.rows)
        return rows

    def nvmlDeviceGetTotalEccErrors(self, gpu: Gpu, kind: int, counter: int) -> int:
        return int(self._answer(gpu, "ecc", lambda: gpu.ecc))

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: Gpu) -> int:
        return int(self._answer(gpu, "throttle", lambda: gpu.throttle))

    def nvmlDeviceGetTemperature(self, gpu: Gpu, sensor: int) -> int:
        return 34

    def nvmlDeviceGetFieldValues(self, gpu: Gpu, fields: list[int]) -> list[Any]:
        code = gpu.refuse.get("recovery", 0)
        return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=gpu.recovery))]
