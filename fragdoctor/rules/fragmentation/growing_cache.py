"""FD109: cached memory that cannot be used grows from failure to failure."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.model.finding import Confidence, Evidence, Finding, Severity
from fragdoctor.rules.growth.accumulating_trials import growth_sentence
from fragdoctor.rules.rule import Context, Rule, Skip
from fragdoctor.story.trends import accumulation, growing_cache, rise_bytes


class GrowingCache(Rule):
    """Unusable cache grows from failure to failure.

    What it finds. The "reserved by PyTorch but unallocated" of the messages of one log, rising.

    Why it costs memory. At a failure the cache has been flushed already: what is left is holes in
    segments that live blocks keep. More of it each time is fragmentation that builds up.

    Evidence used. The figure of each OOM message, the first of each trial; the slope is the median
    of all pairs (Theil-Sen), three points at least.

    What to do. expandable_segments:True, fixed shapes, or a fresh process every few trials.

    What it can get wrong. Trials of growing size leave larger holes without any build-up.

    Example. 1.0, 1.8, 2.5, 3.3 GiB unallocated at four failures, with 15.1 GiB allocated at each.

    References. torch.cuda: Memory management; spec of the message since PyTorch 2.1.
    """

    code = "FD109"
    severity = Severity.WARNING

    def check(self, context: Context) -> Iterator[Finding]:
        """Yield one finding if the figure grows."""
        if context.story is None:
            raise Skip("no log with several failures was given")
        trend = growing_cache(context.story)
        if trend is None or trend.slope_bytes is None:
            return
        level = "" if accumulation(context.story) else " Allocated memory does not grow with it."
        yield self.finding(
            context,
            growth_sentence(trend) + level,
            confidence=trend.confidence or Confidence.POSSIBLE,
            n_bytes=max(0, rise_bytes(trend)),
            evidence=(
                Evidence("slope", round(trend.slope_bytes), "bytes", "log"),
                Evidence("points", len(trend.points), "count", "log"),
            ),
        )
