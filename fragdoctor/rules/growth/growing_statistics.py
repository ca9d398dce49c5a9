"""FD402: allocated memory climbs over a series of statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fragdoctor.model.finding import Confidence, Evidence, Finding, Severity
from fragdoctor.rules.base import Need, Rule, Skip
from fragdoctor.rules.context import Context
from fragdoctor.rules.growth.series import MIN_RECORDS, climbs, rise, values_of
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

    code: ClassVar[str] = "FD402"
    name: ClassVar[str] = "growing-statistics"
    summary: ClassVar[str] = "Allocated memory climbs over a series of statistics"
    severity: ClassVar[Severity] = Severity.WARNING
    needs: ClassVar[frozenset[Need]] = frozenset({Need.STATS})

    def check(self, context: Context) -> Iterator[Finding]:
        """Yield one finding where the series climbs."""
        if not context.is_series or len(values_of(context.stats, KEY)) < MIN_RECORDS:
            raise Skip(f"a series of at least {MIN_RECORDS} records is needed")
        if not climbs(context.stats, KEY):
            return
        grown = rise(context.stats, KEY)
        yield self.finding(
            context,
            f"Allocated memory rises by {format_size(grown)} over "
            f"{format_count(len(context.stats))} records.",
            confidence=Confidence.LIKELY,
            n_bytes=grown,
            evidence=(Evidence("rise", grown, "bytes", "memory_stats"),),
        )
