"""FD104: expandable segments need whole pages."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.model.finding import Confidence, Evidence, Finding, Severity
from fragdoctor.rules.rule import Context, Rule, Skip
from fragdoctor.units import format_size


class PageRounding(Rule):
    """A request failed for lack of a last whole page.

    What it finds. A request that the driver's free memory covers, but not once it is rounded up to
    the pages of 20 MiB (2 MiB for small blocks) in which expandable segments map memory.

    Why it costs memory. A page is mapped whole or not at all; up to one page per request lies idle.

    Evidence used. The recorded setting, the out-of-memory event and the driver's free memory.

    What to do. Free a few tens of MiB, or set a smaller large_segment_size_mb (PyTorch 2.11).

    What it can get wrong. A free tail of the segment counts towards the request; then the missing
    part is smaller than the request.

    Example. 24 MiB asked, 38 MiB free: two pages are 40 MiB.

    References. CUDA semantics: expandable_segments.
    """

    code = "FD104"
    severity = Severity.ERROR

    def check(self, context: Context) -> Iterator[Finding]:
        """Yield one finding if page rounding explains the failure."""
        r = context.need_request()
        if r.expandable is None:
            raise Skip("no input says whether expandable segments are on")
        if not r.fails_by_pages:
            return
        yield self.finding(
            context,
            f"{format_size(r.requested_bytes)} need {format_size(r.mapped_bytes)} of whole pages; "
            f"{format_size(r.free_bytes)} were free.",
            confidence=Confidence.LIKELY,
            n_bytes=r.mapped_bytes,
            evidence=(
                Evidence("whole pages", r.mapped_bytes, "bytes", r.source),
                Evidence("device free", r.free_bytes or 0, "bytes", r.source),
            ),
        )
