"""The fake GPUs' memory: the native library, as called from Python.

``_native/fake_gpu.h`` is its contract. It is loaded with ctypes: one build serves any Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Final

from fragdoctor.errors import ConfigError
from fragdoctor.model.conf_keys import N_ROUNDUP_INTERVALS, parse_version
from fragdoctor.model.settings import AllocatorSettings, era_of

UNLIMITED: Final = 2**64 - 1
ACTIONS: Final = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
    "segment_unmap", "snapshot", "oom",
)  # fmt: skip
STATES: Final = ("inactive", "active_allocated", "active_pending_free")
"""Actions and block states, both in the order of ``_native/words.h``."""
COUNTERS: Final = (
    "reserved", "allocated", "active", "requested", "peak_reserved", "peak_allocated",
    "peak_active", "peak_requested", "retries", "ooms", "n_malloc", "n_free", "n_map", "n_unmap",
    "driver_free", "events",
)  # fmt: skip
OOM_FIGURES: Final = (
    "requested_bytes", "rounded_bytes", "alloc_bytes", "total_bytes", "free_bytes",
    "allocated_bytes", "reserved_bytes", "private_free_bytes", "fraction_is_set", "allowed_bytes",
    "reserve_bytes",
)  # fmt: skip


_TYPES: Final[dict[str, Any]] = {
    "i": c_int32, "u": c_uint32, "l": c_int64, "L": c_uint64, "d": c_double, "s": c_char_p,
    "p": c_void_p,
}  # fmt: skip


def _fields(text: str) -> list[tuple[str, Any]]:
    """Return the fields of a structure from a text like ``L:address,size i:stack``."""
    parts = (part.split(":") for part in text.split())
    return [(name, _TYPES[kind]) for kind, names in parts for name in names.split(",")]


class _Settings(ctypes.Structure):
    _fields_ = (
        *_fields(
            "L:max_split_bytes,max_non_split_rounding_bytes,large_segment_bytes "
            "d:garbage_collection_threshold L:reservation_bytes d:reservation_fraction"
        ),
        ("roundup_power2_divisions", c_uint32 * N_ROUNDUP_INTERVALS),
        ("expandable_segments", c_uint32),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("settings", _Settings),
        *_fields(
            "L:capacity_bytes,device_total_bytes d:memory_fraction u:era,fraction_of_one_counts"
        ),
    )


class Event(ctypes.Structure):
    """One event of a device's trace; ``stack`` is a number, -1 = none."""

    _fields_ = _fields("L:address,size,time_us,stream i:stack u:pool,action")


class GpuSegment(ctypes.Structure):
    """A segment; its blocks follow those of the previous segment."""

    _fields_ = _fields("L:address,size,stream u:pool,is_small,is_expandable,n_blocks")


class GpuBlock(ctypes.Structure):
    """A block; ``stack`` is that of the request that it serves, -1 = none."""

    _fields_ = _fields("L:address,size,requested u:state i:stack")


_FUNCTIONS: Final = {
    "open": ("", "ip"), "close": ("", ""), "device": ("i", ""), "set_device": ("", "i"),
    "stream": ("l", "i"), "set_stream": ("", "il"), "new_stream": ("l", "ii"),
    "stream_handle": ("L", "l"), "new_tensor": ("p", "iLuuippi"), "take": ("L", "iLi"),
    "take_at": ("L", "LLi"), "give": ("", "L"), "resize": ("i", "LLLip"), "name": ("", "pL"),
    "record_stream": ("", "Ll"), "empty_cache": ("", ""), "synchronize": ("", "i"),
    "set_fraction": ("", "id"), "set_settings": ("", "ip"), "pool_create": ("u", "iii"),
    "pool_retain": ("", "iu"), "pool_release": ("", "iui"), "context_begin": ("", "iui"),
    "context_end": ("", "i"), "statistics": ("", "ip"), "reset_peaks": ("", "i"),
    "reset_sums": ("", "i"), "digest": ("L", "iLL"), "counters": ("", "ip"),
    "last_oom": ("", "ip"), "events": ("", "iLLp"), "layout_size": ("", "ipp"),
    "layout": ("", "ipp"), "guard_method": ("p", "s"), "hook_method": ("p", "s"),
    "set_pinned_allocator": ("", "p"),
}  # fmt: skip
"""Function of the library -> its return type and argument types, as letters of ``_TYPES``."""


class Gpus:
    """Every fake GPU of the process.

    Raises:
        ConfigError: the library cannot be loaded.
    """

    def __init__(self, library: Path) -> None:
        try:
            self._lib = ctypes.CDLL(str(library))
        except OSError as err:
            raise ConfigError(
                f"The model of the GPU's memory cannot be loaded: {err}.",
                hint="Reinstall fragdoctor on this machine.",
            ) from err
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._lib, f"fg_{name}")
            function.restype, function.argtypes = _TYPES.get(result), [_TYPES[a] for a in arguments]
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        # Only for type checkers: every function of the library is an attribute of the instance.
        raise AttributeError(name)

    def start(
        self,
        n_devices: int,
        capacity_bytes: int | None,
        total_bytes: int,
        settings: AllocatorSettings,
        torch_version: str,
    ) -> None:
        """Begin with empty devices; existing tensors no longer own any memory.

        The arguments are those of a :class:`.session.Session`.
        """
        config = _Config(
            settings=_settings(settings),
            capacity_bytes=UNLIMITED if capacity_bytes is None else capacity_bytes,
            device_total_bytes=total_bytes,
            memory_fraction=-1.0 if settings.memory_fraction is None else settings.memory_fraction,
            era=int(era_of(torch_version)),
            fraction_of_one_counts=parse_version(torch_version) < (2, 10, 0),
        )
        self.open(n_devices, byref(config))

    def change_settings(self, device: int, settings: AllocatorSettings) -> None:
        """Change the settings of a running device."""
        self.set_settings(device, byref(_settings(settings)))

    def figures(self, device: int) -> dict[str, int]:
        """Return the counters of a device, by the names in ``COUNTERS``."""
        values = (c_uint64 * len(COUNTERS))()
        self.counters(device, values)
        return dict(zip(COUNTERS, values, strict=True))

    def oom_figures(self, device: int) -> dict[str, int | None]:
        """Return the figures of the last failed request; ``allowed_bytes`` None = no limit."""
        values = (c_uint64 * len(OOM_FIGURES))()
        self.last_oom(device, values)
        found: dict[str, int | None] = dict(zip(OOM_FIGURES, values, strict=True))
        if not found.pop("fraction_is_set"):
            found["allowed_bytes"] = None
        return found

    def trace(self, device: int, first: int = 0) -> ctypes.Array[Event]:
        """Return the events of a device from the given number on."""
        n = max(0, self.figures(device)["events"] - first)
        events = (Event * n)()
        self.events(device, first, n, events)
        return events

    def segments(self, device: int) -> Iterator[tuple[GpuSegment, list[GpuBlock]]]:
        """Return the segments of a device in the order of addresses, with their blocks."""
        n_segments, n_blocks = c_uint64(), c_uint64()
        self.layout_size(device, byref(n_segments), byref(n_blocks))
        segments = (GpuSegment * n_segments.value)()
        blocks = (GpuBlock * n_blocks.value)()
        self.layout(device, segments, blocks)
        at = 0
        for segment in segments:
            yield segment, blocks[at : at + segment.n_blocks]
            at += segment.n_blocks


def _settings(settings: AllocatorSettings) -> _Settings:
    limit = settings.max_split_bytes
    return _Settings(
        max_split_bytes=UNLIMITED if limit is None else limit,
        max_non_split_rounding_bytes=settings.max_non_split_rounding_bytes,
        large_segment_bytes=settings.large_segment_bytes,
        garbage_collection_threshold=settings.garbage_collection_threshold,
        expandable_segments=settings.expandable_segments,
        roundup_power2_divisions=(c_uint32 * N_ROUNDUP_INTERVALS)(
            *settings.roundup_power2_divisions
        ),
    )
