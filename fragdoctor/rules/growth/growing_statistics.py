"""FD402: allocated memory climbs over a series of statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from fragdoctor.model.case import MemoryStats
from fragdoctor.model.finding import Confidence, Evidence, Finding, Severity
from fragdoctor.rules.rule import Context, Rule, Skip
from fragdoctor.units import format_count, format_size

KEY = "allocated_bytes.all.current"


class GrowingStatistics(Rule):
    """Allocated memory climbs over a series of statistics.

    What it finds. Current allocated bytes that rise in nearly every interval of the series.

    Why it costs memory. Taken at the same point of each step, allocated memory should be level.

    Evidence used. allocated_bytes.all.current of each record.

    What to do. Record a snapshot over a few steps: it names the line.

    What it can get wrong. Records taken at different points of a step, or during warm-up.

    Example. 2.1, 2.3, 2.5, 2.7 GiB after steps 100, 200, 300, 400.

    References. torch.cuda.memory_stats.
    """

    code = "FD402"
    severity = Severity.WARNING

    def check(self, context: Context) -> Iterator[Finding]:
        """Yield one finding where the series climbs."""
        stats = context.need_stats()
        if not context.is_series or len(values_of(stats, KEY)) < MIN_RECORDS:
            raise Skip(f"a series of at least {MIN_RECORDS} records is needed")
        if not climbs(stats, KEY):
            return
        grown = rise(stats, KEY)
        yield self.finding(
            context,
            f"Allocated memory rises by {format_size(grown)} over "
            f"{format_count(len(stats))} records.",
            confidence=Confidence.LIKELY,
            n_bytes=grown,
            evidence=(Evidence("rise", grown, "bytes", "memory_stats"),),
        )


MIN_RECORDS: Final = 4
"""Fewer records than this cannot distinguish a trend from a warm-up."""

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
    """Return whether a figure of memory climbs steadily: in nearly every interval, and by much."""
    values = values_of(stats, key)
    if len(values) < MIN_RECORDS:
        return False
    ups = sum(later > earlier for earlier, later in pairwise(values))
    is_steady = ups >= CLIMBING_SHARE * (len(values) - 1)
    return is_steady and values[-1] - values[0] >= MIN_RISE_SHARE * max(1, values[-1])


def count_rises(stats: Sequence[MemoryStats], key: str) -> bool:
    """Return whether a counter rose within the series at all."""
    values = values_of(stats, key)
    return len(values) > 1 and values[-1] > values[0]
