"""Reads everything about every GPU once, through NVIDIA's management library."""

from __future__ import annotations

from typing import Any

from servers.gpu.nvml import (
    ERRORS,
    SNAPSHOT_FIELDS,
    close_library,
    count_devices,
    device_handle,
    open_library,
    read_versions,
    status_of,
)
from servers.gpu.reader import DeviceSnapshot, GpuSnapshot, Status

SUCCESS = 0
GPU_IS_LOST = 15


class NvmlReader:
    """See `servers.gpu.reader.GpuReader`. Not thread-safe."""

    def __init__(self) -> None:
        self._open = False

    def read(self) -> GpuSnapshot:
        """Everything now. A GPU that is lost makes the whole snapshot `gpu_lost`."""
        try:
            if not self._open:
                open_library()
                self._open = True
            count = count_devices()
        except ERRORS as error:
            return self._failed(error)
        devices: list[DeviceSnapshot] = []
        lost = False
        for index in range(count):
            device, device_lost = _read_device(index)
            devices.append(device)
            lost = lost or device_lost
        status: Status = "gpu_lost" if lost else "ok" if devices else "no_device"
        return GpuSnapshot(
            status=status,
            return_code=GPU_IS_LOST if lost else SUCCESS,
            devices=tuple(devices),
            **read_versions(),
        )

    def close(self) -> None:
        """Release the library."""
        if self._open:
            self._open = False
            close_library()

    def _failed(self, error: Exception) -> GpuSnapshot:
        versions = read_versions() if self._open else {}
        return GpuSnapshot(
            status=status_of(error),
            return_code=getattr(error, "value", None),
            error=str(error),
            devices=(),
            **versions,
        )


def _read_device(index: int) -> tuple[DeviceSnapshot, bool]:
    values: dict[str, Any] = {}
    unavailable: dict[str, str] = {}
    try:
        handle = device_handle(index)
    except ERRORS as error:
        unavailable = dict.fromkeys(SNAPSHOT_FIELDS, str(error))
        return DeviceSnapshot(index, unavailable=unavailable), status_of(error) == "gpu_lost"
    lost = False
    for name, call in SNAPSHOT_FIELDS.items():
        try:
            values[name] = call(handle)
        except ERRORS as error:
            unavailable[name] = str(error)
            lost = lost or status_of(error) == "gpu_lost"
    return DeviceSnapshot(index, **values, unavailable=unavailable), lost
