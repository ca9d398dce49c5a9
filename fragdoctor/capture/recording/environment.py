"""Facts around a moment: versions, devices and their memory, other processes, settings."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Callable
from typing import Any

from . import nvml
from .secrets import masked

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
    """Return what is fixed for the process: versions, host, command, settings."""
    version = getattr(torch, "version", None)
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "parent_pid": os.getppid(),
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
    """Return the devices on which PyTorch ever reserved memory, without waking up the others."""
    return [d for d in range(torch.cuda.device_count()) if _reserved(torch, d, "peak")]


def device_facts(torch: Any, devices: list[int]) -> tuple[list[dict[str, Any]], str | None]:
    """Return the facts of each device, and the version of the driver; None is unknown."""
    library = _try(nvml.Nvml)
    facts = [_one_device(torch, d, library) for d in devices]
    driver = _try(library.driver_version) if library is not None else None
    return facts, driver or _driver_of_kernel()


def _one_device(torch: Any, device: int, library: nvml.Nvml | None) -> dict[str, Any]:
    cuda = torch.cuda
    properties = _try(lambda: cuda.get_device_properties(device))
    free, total = _try(lambda: cuda.mem_get_info(device)) or (None, None)
    reserved = _reserved(torch, device, "current")
    own, others = _processes(properties, library)
    fraction = _try(lambda: float(torch._C._cuda_getMemoryFraction(device)))
    return {
        "index": device,
        "name": getattr(properties, "name", None),
        "total_bytes": total or getattr(properties, "total_memory", None),
        "free_bytes": free,
        "reserved_bytes": reserved,
        "process_bytes": own,
        "non_pytorch_bytes": _less(own, reserved),
        "outside_pytorch_bytes": _less(_less(total, free), reserved),
        "other_processes": others,
        "memory_fraction": fraction,
    }


def _less(whole: int | None, part: int | None) -> int | None:
    return None if whole is None or part is None else whole - part


def _processes(
    properties: Any, library: nvml.Nvml | None
) -> tuple[int | None, list[dict[str, Any]] | None]:
    """Return this process's own bytes and the other processes.

    In a container the driver's process ids are the host's: then nobody is this process, own is
    None, and who reads the bundle has to tell by the size.
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
    own = next((p.n_bytes for p in found if p.pid == me), None)
    return own, [{"pid": p.pid, "bytes": p.n_bytes} for p in found if p.pid != me]


def _reserved(torch: Any, device: int, which: str) -> int | None:
    stats = _try(lambda: torch.cuda.memory_stats(device))
    return None if stats is None else int(stats.get(f"reserved_bytes.all.{which}", 0))


def _driver_of_kernel() -> str | None:
    """Return the driver's version as the kernel module tells it."""
    try:
        with open("/proc/driver/nvidia/version", encoding="ascii", errors="replace") as f:
            words = f.readline().split()
    except OSError:
        return None
    return next((w for w in words if w[:1].isdigit() and "." in w), None)


def _try(call: Callable[[], Any]) -> Any:
    """Return the result of ``call``, None where it fails: a fact may be missing, never harm."""
    try:
        return call()
    except Exception:  # whatever a driver or a version of torch comes up with
        return None
