"""Whether a figure climbs over a series of statistics."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from fragdoctor.model.case import MemoryStats

MIN_RECORDS: Final = 4
"""Fewer records than this cannot tell a trend from a warm-up."""

CLIMBING_SHARE: Final = 0.8
"""A climb goes up in at least four of five intervals."""

MIN_RISE_SHARE: Final = 0.1
"""And ends at least a tenth above its start; smaller drifts are caches that fill."""


def values_of(stats: Sequence[MemoryStats], key: str) -> list[int]:
    """Return the values of one figure over a series, records without it left out."""
    return [value for record in stats if (value := record.get(key)) is not None]


def rise(stats: Sequence[MemoryStats], key: str) -> int:
    """Return last minus first value of a figure; 0 where it is missing."""
    values = values_of(stats, key)
    return values[-1] - values[0] if values else 0


def climbs(stats: Sequence[MemoryStats], key: str) -> bool:
    """Tell whether a figure of memory climbs steadily: in nearly every interval, and by much."""
    values = values_of(stats, key)
    if len(values) < MIN_RECORDS:
        return False
    ups = sum(later > earlier for earlier, later in pairwise(values))
    is_steady = ups >= CLIMBING_SHARE * (len(values) - 1)
    return is_steady and values[-1] - values[0] >= MIN_RISE_SHARE * max(1, values[-1])


def count_rises(stats: Sequence[MemoryStats], key: str) -> bool:
    """Tell whether a counter rose within the series at all."""
    values = values_of(stats, key)
    return len(values) > 1 and values[-1] > values[0]
