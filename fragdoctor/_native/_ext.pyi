from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# ---- bind_allocator.cpp ----

class AllocatorConfig:
    era: int
    capacity_bytes: int
    device_total_bytes: int
    memory_fraction: float
    fraction_of_one_counts: bool
    event_delay: int
    max_split_bytes: int
    max_non_split_rounding_bytes: int
    large_segment_bytes: int
    garbage_collection_threshold: float
    expandable_segments: bool
    roundup_power2_divisions: Sequence[int]
    def __init__(self) -> None: ...

# ---- bind_replay.cpp ----

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
    def undone(self) -> dict[str, Any]: ...

class NativeOps:
    def __init__(
        self,
        trace: NativeTrace,
        limit_bytes: int = 0,
        is_collecting: bool = False,
        empty_cache_rows: Sequence[int] = ...,
        device_total_bytes: int = 0,
    ) -> None: ...
    def edited(
        self,
        kind: npt.NDArray[np.uint8],
        size: npt.NDArray[np.uint64],
        id: npt.NDArray[np.uint32],
        row: npt.NDArray[np.uint32],
        stream: npt.NDArray[np.uint32],
        pool: npt.NDArray[np.uint32],
    ) -> NativeOps: ...
    def columns(self) -> dict[str, Any]: ...
    def facts(self) -> dict[str, Any]: ...
    def replay(self, config: AllocatorConfig, stop_at_oom: bool = False) -> dict[str, Any]: ...
    def replay_recorded(self, config: AllocatorConfig) -> tuple[dict[str, Any], dict[str, Any]]: ...
