"""What the driver counts per process, asked from NVML directly: no package is needed for it."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

_LIBRARY = "libnvidia-ml.so.1"
_INSUFFICIENT_SIZE = 7
_NOT_AVAILABLE = 1 << 60
_MAX_PROCESSES = 4096


class Process(NamedTuple):
    """One process on a GPU; ``n_bytes`` is None where the driver does not tell (WSL, MIG)."""

    pid: int
    n_bytes: int | None


class _Info(ctypes.Structure):
    # nvmlProcessInfo_v1_t: the layout of nvmlDeviceGetComputeRunningProcesses without suffix.
    _fields_ = (("pid", ctypes.c_uint), ("n_bytes", ctypes.c_ulonglong))


class _Info2(ctypes.Structure):
    # nvmlProcessInfo_v2_t: of the calls with suffix _v2 and _v3.
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("n_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


_CALLS = (
    ("nvmlDeviceGetComputeRunningProcesses_v3", _Info2),
    ("nvmlDeviceGetComputeRunningProcesses_v2", _Info2),
    ("nvmlDeviceGetComputeRunningProcesses", _Info),
)


class Nvml:
    """An open NVML.

    Raises:
        OSError: there is no NVML here, or it does not answer.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(_LIBRARY)
        if self._library.nvmlInit_v2():
            raise OSError("NVML cannot be initialised")

    def driver_version(self) -> str | None:
        """Return the version of the driver, such as ``550.54.15``."""
        call = getattr(self._library, "nvmlSystemGetDriverVersion", None)
        text = ctypes.create_string_buffer(96)
        if call is None or call(text, ctypes.c_uint(96)):
            return None
        return text.value.decode("ascii", "replace") or None

    def processes(self, uuid: str | None, bus_id: str | None) -> list[Process] | None:
        """Return the compute processes of a device, None where NVML does not know it.

        Args:
            uuid: ``GPU-...`` as the driver names it.
            bus_id: ``domain:bus:device.function`` in hexadecimal digits.
        """
        handle = self._handle(uuid, bus_id)
        if handle is None:
            return None
        for name, kind in _CALLS:
            call = getattr(self._library, name, None)
            if call is not None:
                found = _read(call, handle, kind)
                if found is not None:
                    return found
        return None

    def _handle(self, uuid: str | None, bus_id: str | None) -> ctypes.c_void_p | None:
        for name, key in (
            ("nvmlDeviceGetHandleByUUID", uuid),
            ("nvmlDeviceGetHandleByPciBusId_v2", bus_id),
        ):
            call = getattr(self._library, name, None)
            handle = ctypes.c_void_p()
            if call is not None and key and not call(key.encode(), ctypes.byref(handle)):
                return handle
        return None


def _read(call: Any, handle: ctypes.c_void_p, kind: Any) -> list[Process] | None:
    room = 64
    while room <= _MAX_PROCESSES:
        n = ctypes.c_uint(room)
        table = (kind * room)()
        status = call(handle, ctypes.byref(n), table)
        if status == 0:
            rows = table[: min(n.value, room)]
            return [
                Process(int(r.pid), int(r.n_bytes) if r.n_bytes < _NOT_AVAILABLE else None)
                for r in rows
            ]
        if status != _INSUFFICIENT_SIZE:
            return None
        room = max(2 * room, n.value + 8)
    return None
