"""FD404: memory accumulates from trial to trial."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.model.story import TrialTrend
from fragdoctor.rules.rule import Context, Found, needed, rule
from fragdoctor.story.trends import accumulation, rise_bytes
from fragdoctor.units import format_size, plural

STEPS = {"trial": "trial", "oom": "failure", "print": "print"}


@rule("FD404", Severity.WARNING)
def accumulating_trials(context: Context) -> Iterator[Found]:
    """Memory accumulates from trial to trial.

    What it finds. Allocated memory that rises over the trials of a sweep, over its failures, or
    over what one run prints: the lowest figure of each trial, or what was allocated when memory ran
    out.

    Why it costs memory. What one trial leaves behind is missing in all later ones, until one fails
    that would have fit alone.

    Evidence used. Printed figures of memory and the figures of OOM messages, in order of the log;
    the slope is the median of all pairs (Theil-Sen), three points at least.

    What to do. Let go of the trial's model, optimizer and batches, and of what keeps them: lists of
    results, callbacks, exceptions with their tracebacks. Or a fresh process every few trials.

    What it can get wrong. Trials that grow on purpose, such as ever larger models. Three points are
    possible, five that all rise are likely.

    Example. 2.0, 3.6, 5.2, 6.8 GiB at the start of trials 0 to 3.

    References. torch.cuda.memory_allocated; H. Theil 1950, P. K. Sen 1968.
    """
    why = "no log with several trials or failures was given"
    trend = accumulation(needed(context.story, why))
    if trend is None or trend.slope_bytes is None:
        return
    yield Found(
        growth_sentence(trend),
        confidence=trend.confidence or Confidence.POSSIBLE,
        n_bytes=max(0, rise_bytes(trend)),
        evidence=(
            Evidence("slope", round(trend.slope_bytes), "bytes", "log"),
            Evidence("points", len(trend.points), "count", "log"),
        ),
        key=f"{trend.figure} {trend.over}",
    )


def growth_sentence(trend: TrialTrend) -> str:
    """Return how a figure grows, in one sentence with its numbers."""
    what = {"unallocated": "Reserved but unallocated memory"}.get(
        trend.figure, f"{trend.figure.capitalize()} memory"
    )
    where = " at the failures" if trend.over == "oom" or not trend.label else ""
    bounds = ""
    if trend.low_bytes is not None and trend.high_bytes is not None:
        low, high = format_size(trend.low_bytes), format_size(trend.high_bytes)
        bounds = f" (90 %: {low} to {high})" if low != high else ""
    return (
        f"{what}{where} grows from {format_size(trend.points[0])} to "
        f"{format_size(trend.points[-1])} over {plural(len(trend.points), STEPS[trend.over])}, "
        f"{format_size(trend.slope_bytes)} a {STEPS[trend.over]}{bounds}."
    )
