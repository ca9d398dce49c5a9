# Types of the native core, with a section for each part of it.

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

# ---- bindings.cpp ----

def warn_of_leaks(value: bool) -> None: ...
def return_free_memory() -> None: ...

# ---- bind_pickle_reader.cpp ----

class _Stream(Protocol):
    def readinto(self, buffer: memoryview, /) -> int | None: ...

# args are (kind, message, hint, offset)
class ReadError(Exception): ...

def read_pickle(
    stream: _Stream, *, max_depth: int, max_string_bytes: int, max_unknown_keys: int
) -> dict[str, Any]: ...
def read_json(
    stream: _Stream, *, max_depth: int, max_string_bytes: int, max_unknown_keys: int
) -> dict[str, Any]: ...

# ---- bind_allocator.cpp ----

class AllocatorConfig:
    era: int
    capacity_bytes: int
    device_total_bytes: int
    device_total_is_least: bool
    memory_fraction: float
    fraction_of_one_counts: bool
    event_delay: int
    max_split_bytes: int
    max_non_split_rounding_bytes: int
    large_segment_bytes: int
    garbage_collection_threshold: float
    expandable_segments: bool
    roundup_power2_divisions: Sequence[int]
    reservation_bytes: int
    reservation_fraction: float
    def __init__(self) -> None: ...

class AllocatorCore:
    def __init__(self, config: AllocatorConfig) -> None: ...
    def malloc(self, size: int, stream: int = 0, pool: int = 0) -> int | None: ...
    def free(self, address: int) -> bool: ...
    def record_stream(self, address: int, stream: int) -> bool: ...
    def empty_cache(self) -> None: ...
    def synchronize(self) -> None: ...
    def set_fraction(self, fraction: float) -> None: ...
    def set_settings(self, config: AllocatorConfig) -> None: ...
    def pool_create(self, use_on_oom: bool = False, no_split: bool = False) -> int: ...
    def pool_release(self, pool: int, flush: bool = False) -> None: ...
    def context_begin(self, pool: int, is_capture: bool = False) -> None: ...
    def context_end(self) -> None: ...
    def counters(self) -> dict[str, int]: ...
    def last_oom(self) -> dict[str, int | None]: ...
    def layout(
        self,
    ) -> list[tuple[int, int, bool, int, int, bool, list[tuple[int, int, int, int]]]]: ...
    def check(self) -> str | None: ...
    @property
    def reserved_bytes(self) -> int: ...
    @property
    def allocated_bytes(self) -> int: ...
    @property
    def active_bytes(self) -> int: ...
    @property
    def requested_bytes(self) -> int: ...
    @property
    def alloc_retries(self) -> int: ...
    @property
    def ooms(self) -> int: ...
    @property
    def driver_calls(self) -> int: ...

# ---- bind_trace.cpp ----

ACTION_NAMES: tuple[str, ...]
STATE_NAMES: tuple[str, ...]
TYPE_NAMES: tuple[str, ...]
BEFORE: int
NEVER: int

class NativeTrace:
    def __init__(
        self,
        action: npt.NDArray[np.uint8],
        address: npt.NDArray[np.uint64],
        size: npt.NDArray[np.uint64],
        stream: npt.NDArray[np.int32],
        pool: npt.NDArray[np.int32],
        segment_address: npt.NDArray[np.uint64],
        segment_size: npt.NDArray[np.uint64],
        segment_stream: npt.NDArray[np.int32],
        segment_pool: npt.NDArray[np.int32],
        segment_kind: npt.NDArray[np.uint8],
        segment_expandable: npt.NDArray[np.uint8],
        block_address: npt.NDArray[np.uint64],
        block_size: npt.NDArray[np.uint64],
        block_requested: npt.NDArray[np.uint64],
        block_state: npt.NDArray[np.uint8],
        config: AllocatorConfig,
    ) -> None: ...
    def facts(self) -> dict[str, Any]: ...
    def initial(self) -> dict[str, Any]: ...
    def lives(self) -> dict[str, Any]: ...
    def segments(self) -> dict[str, Any]: ...
    def total(self, name: str) -> npt.NDArray[np.int64]: ...
    def totals_at(self, states: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]: ...
    def reserved_changes(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]: ...
    def envelope(
        self, name: str, starts: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
    def layout_at(self, state: int) -> dict[str, Any]: ...

# ---- bind_replay.cpp ----

OP_BYTES: int
OP_FIELDS: list[tuple[str, str, int]]
FUTURE_OP_BYTES: int
FUTURE_OP_FIELDS: list[tuple[str, str, int]]
KEPT: int
REPLACED: int

class NativeFuture:
    def __init__(
        self,
        table: npt.NDArray[np.uint8],
        first: Sequence[int],
        origin: Sequence[int],
        counts: Sequence[int],
        cycle: Sequence[int],
        held: npt.NDArray[np.int32],
        n_slots: int,
        n_pools: int,
    ) -> None: ...

class NativeRun:
    @property
    def recorded(self) -> dict[str, Any]: ...
    def look_on(
        self,
        future: NativeFuture,
        max_steps: int = 100,
        max_ops: int = 1_000_000,
        stops_at_repetition: bool = True,
    ) -> dict[str, Any]: ...

class NativeOps:
    def __init__(
        self,
        trace: NativeTrace,
        limit_bytes: int = 0,
        is_collecting: bool = False,
        empty_cache_rows: Sequence[int] = ...,
        late_rows: Sequence[int] = ...,
        device_total_bytes: int = 0,
    ) -> None: ...
    def edited(self, table: npt.NDArray[np.uint8]) -> NativeOps: ...
    def learned(self, config: AllocatorConfig) -> NativeOps: ...
    def table(self) -> npt.NDArray[np.uint8]: ...
    def facts(self) -> dict[str, Any]: ...
    def replay(
        self,
        config: AllocatorConfig,
        stop_at_oom: bool = False,
        remake_initial: bool = False,
    ) -> dict[str, Any]: ...
    def play(
        self, config: AllocatorConfig, n_past: int, remake_initial: bool = False
    ) -> NativeRun: ...
    def record(self, config: AllocatorConfig) -> dict[str, list[Any]]: ...
    def replay_recorded(
        self, config: AllocatorConfig, max_ops: int = ...
    ) -> tuple[dict[str, Any], dict[str, Any]]: ...
