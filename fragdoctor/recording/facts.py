"""Facts about one moment: versions, devices and their memory, other processes, settings."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MASK = "***"

_WORD = r"key|token(?!iz)|secret|passw|passphrase|pwd|auth(?!or(?!iz))|credential"
_SECRET = re.compile(_WORD, re.IGNORECASE)
_ALWAYS = re.compile(r"secret|passw|passphrase|pwd", re.IGNORECASE)
_OPTION = re.compile(r"--?[A-Za-z][\w.-]{0,100}")
_ASSIGNED = re.compile(r"([+~-]{0,2}[A-Za-z_][\w.-]{0,100})(=|:\s?)(?!//)(.+)", re.DOTALL)
_INSIDE = re.compile(rf"([\w.-]{{0,60}}(?:{_WORD})[\w.-]{{0,60}}[\"']?\s{{0,3}}[:=]\s{{0,3}}[\"']?)"
                     r"([^\s\"',;&}]{1,4000})", re.IGNORECASE)  # fmt: skip
_IN_URL = re.compile(r"(\w{1,20}://[^/@\s:]{0,200}:)[^/@\s]{1,400}(?=@)")
_COUNT = re.compile(r"\d{1,7}(?:\.\d{0,6})?")
"""A number such as that of ``--max-tokens 512``; a password may be a number too."""


def masked(words: Sequence[str]) -> list[str]:
    """Return the words of a command with the values of secrets replaced by ``***``.

    A secret is the value of an option or assignment whose name contains key, token, secret,
    password, passwd, pwd, passphrase, auth or credential, in any case (``--api-key X``,
    ``--api_key=X``, ``HF_TOKEN=X``, also within a word), and the password in an address
    (``https://user:password@host``). Numbers of keys and tokens are not (``--max-tokens 512``).
    """
    found: list[str] = []
    option = ""
    for word in words:
        if option and not _OPTION.fullmatch(word):
            found.append(_hidden(option, word))
            option = ""
            continue
        option = word if _OPTION.fullmatch(word) and _SECRET.search(word) else ""
        whole = _ASSIGNED.fullmatch(word)
        if whole is not None and _SECRET.search(whole.group(1)):
            name, sign, value = whole.groups()
            found.append(name + sign + _hidden(name, value))
        else:
            inner = _INSIDE.sub(lambda m: m.group(1) + _hidden(m.group(1), m.group(2)), word)
            found.append(_IN_URL.sub(r"\1" + MASK, inner))
    return found


def _hidden(name: str, value: str) -> str:
    return value if _COUNT.fullmatch(value) and not _ALWAYS.search(name) else MASK


_LIBRARY = "libnvidia-ml.so.1"
_INSUFFICIENT_SIZE = 7
_NOT_AVAILABLE = 1 << 60
_MAX_PROCESSES = 4096


class _Info(ctypes.Structure):
    # nvmlProcessInfo_v2_t: the layout of the calls with suffixes _v2 and _v3.
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("n_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


_CALLS = (
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetComputeRunningProcesses_v2",
)


class Nvml:
    """An open NVML.

    Raises:
        OSError: if there is no NVML here, or it does not answer.
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

    def processes(self, uuid: str | None, bus_id: str | None) -> list[dict[str, Any]] | None:
        """Return the compute processes of a device, or None if NVML does not know the device.

        The bytes of a process are None if the driver does not report them (WSL, MIG).

        Args:
            uuid: ``GPU-...`` as the driver names it.
            bus_id: ``domain:bus:device.function`` in hexadecimal digits.
        """
        handle = self._handle(uuid, bus_id)
        if handle is None:
            return None
        calls = (getattr(self._library, name, None) for name in _CALLS)
        found = (_read(call, handle) for call in calls if call is not None)
        return next((processes for processes in found if processes is not None), None)

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


def _read(call: Any, handle: ctypes.c_void_p) -> list[dict[str, Any]] | None:
    room = 64
    while room <= _MAX_PROCESSES:
        n = ctypes.c_uint(room)
        table = (_Info * room)()
        status = call(handle, ctypes.byref(n), table)
        if status == 0:
            rows = table[: min(n.value, room)]
            return [
                {"pid": r.pid, "bytes": r.n_bytes if r.n_bytes < _NOT_AVAILABLE else None}
                for r in rows
            ]
        if status != _INSUFFICIENT_SIZE:
            return None
        room = max(2 * room, n.value + 8)
    return None


_SETTINGS = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MODULE_LOADING",
    "CUBLAS_WORKSPACE_CONFIG",
)


def program_facts(torch: Any) -> dict[str, Any]:
    """Return the facts that are fixed for the process: versions, host, command, settings."""
    version = getattr(torch, "version", None)
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "folder": str(_try(Path.cwd) or ""),
        "argv": masked(getattr(sys, "orig_argv", None) or sys.argv),
        "versions": {
            "python": platform.python_version(),
            "torch": str(getattr(torch, "__version__", "")) or None,
            "cuda": getattr(version, "cuda", None),
            "hip": getattr(version, "hip", None),
        },
        "environment": {k: os.environ[k] for k in _SETTINGS if k in os.environ},
    }


def used_devices(torch: Any) -> list[int]:
    """Return the devices on which PyTorch ever reserved memory, without waking the others."""
    return [d for d in range(torch.cuda.device_count()) if _reserved(torch, d, "peak")]


def device_facts(torch: Any, devices: list[int]) -> tuple[list[dict[str, Any]], str | None]:
    """Return the facts of each device, and the driver's version; None means unknown."""
    library = _try(Nvml)
    facts = [_one_device(torch, d, library) for d in devices]
    return facts, _try(library.driver_version) if library is not None else None


def _one_device(torch: Any, device: int, library: Nvml | None) -> dict[str, Any]:
    cuda = torch.cuda
    properties = _try(lambda: cuda.get_device_properties(device))
    free, total = _try(lambda: cuda.mem_get_info(device)) or (None, None)
    own, others = _processes(properties, library)
    fraction = _try(lambda: float(torch._C._cuda_getMemoryFraction(device)))
    return {
        "index": device,
        "name": getattr(properties, "name", None),
        "total_bytes": total or getattr(properties, "total_memory", None),
        "free_bytes": free,
        "reserved_bytes": _reserved(torch, device, "current"),
        "process_bytes": own,
        "other_processes": others,
        "memory_fraction": fraction,
    }


def _processes(
    properties: Any, library: Nvml | None
) -> tuple[int | None, list[dict[str, Any]] | None]:
    """Return this process's own bytes and the other processes.

    In a container, the driver's process IDs are the host's: then no entry is this process, own is
    None, and readers of the bundle have to go by the size.
    """
    if library is None or properties is None:
        return None, None
    uuid, bus = getattr(properties, "uuid", None), getattr(properties, "pci_bus_id", None)
    bus_id = None
    if bus is not None:
        domain = getattr(properties, "pci_domain_id", 0)
        bus_id = f"{domain:08x}:{bus:02x}:{getattr(properties, 'pci_device_id', 0):02x}.0"
    found = _try(lambda: library.processes(f"GPU-{uuid}" if uuid else None, bus_id))
    if found is None:
        return None, None
    me = os.getpid()
    own = next((p["bytes"] for p in found if p["pid"] == me), None)
    return own, [p for p in found if p["pid"] != me]


def _reserved(torch: Any, device: int, which: str) -> int | None:
    stats = _try(lambda: torch.cuda.memory_stats(device))
    return None if stats is None else int(stats.get(f"reserved_bytes.all.{which}", 0))


def _try(call: Callable[[], Any]) -> Any:
    """Return the result of ``call``, or None if it fails: a fact may be missing, but never harm."""
    try:
        return call()
    except Exception:  # whatever a driver or a version of torch comes up with
        return None
