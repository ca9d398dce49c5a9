"""FD905: blocks do not tile their segments."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.rules.rule import Context, Found, rule
from fragdoctor.units import format_count


@rule("FD905", Severity.WARNING)
def foreign_allocator(context: Context) -> Iterator[Found]:
    """Blocks do not tile their segments.

    What it finds. Segments whose blocks leave gaps, overlap, or add up to another size.

    Why it costs memory. It does not; the rules of PyTorch's native allocator may not hold.

    Evidence used. Addresses and sizes of the blocks.

    What to do. Read the figures with care; replays of this file are estimates.

    What it can get wrong. A damaged file looks the same.

    Example. A snapshot of an accelerator plug-in that lists live blocks only.

    References. torch.cuda.memory: Snapshotting memory.
    """
    analysis = context.need_analysis()
    n = analysis.capture.tiling_errors
    if not n:
        return
    yield Found(
        f"In {format_count(n)} of {format_count(analysis.n_segments)} segments the blocks do "
        "not tile the segment.",
        confidence=Confidence.PROVEN,
        evidence=(Evidence("segments", n, "count", "snapshot"),),
    )
