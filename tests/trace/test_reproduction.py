"""What a reproduction learns of the device from the trace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from fragdoctor.model.snapshot import Action
from fragdoctor.trace.reproduction import total_by_reservations
from fragdoctor.units import MIB

LARGE, SMALL = 20 * MIB, 2 * MIB
TOTAL_BYTES = 150_109_880_320
"""Of an H200. Its driver left 161,088 MiB between two reservations of 161,060 MiB."""


def trace_of(bases: list[int], sizes: list[int]) -> Any:
    none = np.zeros(0, np.uint64)
    return SimpleNamespace(
        events=SimpleNamespace(
            action=np.full(len(bases), Action.SEGMENT_MAP),
            address=np.array(bases, np.uint64),
            stream=np.zeros(len(bases), np.uint64),
            size_bytes=np.array(sizes, np.int64),
        ),
        initial=SimpleNamespace(
            segment_is_expandable=none.astype(bool), segment_is_small=none.astype(bool),
            segment_address=none,
        ),
        settings=SimpleNamespace(large_segment_bytes=LARGE),
        totals=SimpleNamespace(peak_reserved_bytes=1 << 30),
    )  # fmt: skip


def test_reservations_as_a_driver_spaces_them_fit_between_their_starts() -> None:
    first, second = 0x302000000, 0x2A56000000
    total = total_by_reservations(trace_of([first, second], [2 * LARGE, SMALL]))

    assert total is not None
    reserved = -(-(total + total // 8) // LARGE) * LARGE
    assert first + reserved <= second
    assert abs(total / TOTAL_BYTES - 1) < 0.001


def test_one_reservation_says_nothing_of_the_device() -> None:
    assert total_by_reservations(trace_of([0x302000000], [LARGE])) is None
