"""FD104: a request failed for lack of a last whole page."""

from __future__ import annotations

from fragdoctor.model.finding import Confidence, Severity, in_bytes
from fragdoctor.rules.rule import Context, Findings, Found, needed, rule
from fragdoctor.units import format_size


@rule("FD104", Severity.ERROR)
def page_rounding(context: Context) -> Findings:
    """A request failed for lack of a last whole page.

    What it finds. A request that the driver's free memory covers, but not once it is rounded up to
    the pages of 20 MiB (2 MiB for small blocks) in which expandable segments map memory.

    Why it costs memory. A page is mapped whole or not at all; up to one page per request lies idle.

    Evidence used. The recorded setting, the out-of-memory event and the driver's free memory.

    What to do. Free a few tens of MiB, or set a smaller large_segment_size_mb (PyTorch 2.11).

    What it can get wrong. A free tail of the segment counts towards the request; then the missing
    part is smaller than the request.

    Example. 24 MiB requested, 38 MiB free: two pages are 40 MiB.

    References. CUDA semantics: expandable_segments.
    """
    r = context.need_request()
    needed(r.expandable, "no input says whether expandable segments are on")
    if not r.fails_by_pages:
        return
    yield Found(
        f"{format_size(r.requested_bytes)} need {format_size(r.mapped_bytes)} of whole pages; "
        f"{format_size(r.free_bytes)} was free.",
        confidence=Confidence.LIKELY,
        n_bytes=r.mapped_bytes,
        evidence=in_bytes({"whole pages": r.mapped_bytes, "device free": r.free_bytes}, r.source),
    )
