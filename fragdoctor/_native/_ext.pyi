from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# ---- bind_replay.cpp ----

def undo(
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
    max_split_bytes: int,
    max_non_split_rounding_bytes: int,
    large_segment_bytes: int,
    divisions: Sequence[int],
) -> dict[str, Any]: ...
