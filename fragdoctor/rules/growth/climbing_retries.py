"""FD403: the counter of retries climbs over a series of statistics."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.model.finding import Confidence, Evidence, Finding, Severity
from fragdoctor.rules.growth.growing_statistics import count_rises, values_of
from fragdoctor.rules.rule import Context, Rule, Skip
from fragdoctor.units import format_count

KEY = "num_alloc_retries"


class ClimbingRetries(Rule):
    """The counter of allocation retries climbs.

    What it finds. num_alloc_retries that rises between the records of a series.

    Why it costs memory. The run works at its limit: every rise is a flush of the whole cache, and
    the next somewhat larger request fails.

    Evidence used. num_alloc_retries of each record.

    What to do. Lower the peak or let the cache fit better before it fails.

    What it can get wrong. One rise at the start, while the cache settles, is harmless.

    Example. 0, 3, 9, 17 retries after each epoch.

    References. torch.cuda.memory_stats: num_alloc_retries.
    """

    code = "FD403"
    severity = Severity.WARNING

    def check(self, context: Context) -> Iterator[Finding]:
        """Yield one finding where the counter rose."""
        values = values_of(context.need_stats(), KEY)
        if not context.is_series or len(values) < 2:
            raise Skip("one record does not show whether a counter climbs")
        if not count_rises(context.stats, KEY):
            return
        yield self.finding(
            context,
            f"Allocation retries climb from {format_count(values[0])} to "
            f"{format_count(values[-1])} over {format_count(len(values))} records.",
            confidence=Confidence.PROVEN,
            evidence=(Evidence("retries", values[-1], "count", "memory_stats"),),
        )
