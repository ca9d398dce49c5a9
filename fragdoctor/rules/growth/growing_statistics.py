"""FD402: allocated memory climbs over a series of statistics."""

from __future__ import annotations

from typing import Final

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.model.trend import trend_of
from fragdoctor.rules.rule import Context, Findings, Found, Skip, needed, rule
from fragdoctor.units import format_count, format_size

KEY = "allocated_bytes.all.current"


@rule("FD402", Severity.WARNING)
def growing_statistics(context: Context) -> Findings:
    """Allocated memory climbs over a series of statistics.

    What it finds. Current allocated bytes that rise over the series, and to its end.

    Why it costs memory. Taken at the same point of each step, allocated memory should be level.

    Evidence used. allocated_bytes.all.current of each record.

    What to do. Record a snapshot over a few steps: it names the line.

    What it can get wrong. Records taken at different points of a step, or during warm-up.

    Example. 2.1, 2.3, 2.5, 2.7 GiB after steps 100, 200, 300, 400.

    References. torch.cuda.memory_stats.
    """
    needed(context.stats or None, "no memory statistics were given")
    if len(_values(context, KEY)) < MIN_RECORDS:
        raise Skip(f"a series of at least {MIN_RECORDS} records is needed")
    grown = grown_bytes(context)
    if grown is None:
        return
    yield Found(
        rise_text(context, grown),
        confidence=Confidence.LIKELY,
        n_bytes=grown,
        evidence=(Evidence("rise", grown, "bytes", "memory_stats"),),
    )


MIN_RECORDS: Final = 4
"""Fewer records than this cannot distinguish a trend from a warm-up."""


MIN_RISE_SHARE: Final = 0.1
"""A series must end this share above its start; smaller drifts are caches that fill."""


def _values(context: Context, key: str) -> list[int]:
    """Return the values of one figure over a series, without records that lack the figure."""
    series = context.stats if context.is_series else ()
    return [value for record in series if (value := record.get(key)) is not None]


def grown_bytes(context: Context) -> int | None:
    """Return how much allocated memory grows over a series, or None if it does not grow."""
    values = _values(context, KEY)
    if len(values) < MIN_RECORDS or not trend_of(values).goes_on:
        return None
    rise = values[-1] - values[0]
    return rise if rise >= MIN_RISE_SHARE * values[-1] else None


def rise_text(context: Context, grown: int) -> str:
    """Return how much allocated memory grows, in one sentence."""
    n = format_count(len(context.stats))
    return f"Allocated memory rises by {format_size(grown)} over {n} records."


def climb_text(context: Context) -> str:
    """Return a sentence on retries that become more over a series, "" if they do not."""
    values = _values(context, "num_alloc_retries")
    if len(values) < 2 or values[-1] <= values[0]:
        return ""
    return f" The counter climbs from {values[0]} to {values[-1]} over the series."
