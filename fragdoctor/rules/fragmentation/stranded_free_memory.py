"""FD101: free cached memory is stranded by live blocks."""

from __future__ import annotations

from typing import Final

from fragdoctor.model.finding import WORTH_SAYING, Confidence, Severity, in_bytes, line_text
from fragdoctor.rules.rule import Context, Findings, Found, rule
from fragdoctor.units import format_share, format_size, plural

MAX_GROUPS: Final = 3
"""The most groups to name; each of the others strands less than these."""


@rule("FD101", Severity.INFO)
def stranded_free_memory(context: Context) -> Findings:
    """Free cached memory is stranded by live blocks.

    What it finds. Segments (or pages of expandable segments) that hold free memory and at least one
    live block, and the source lines of the blocks that would set most of it free.

    Why it costs memory. The allocator gives a segment back to the driver only when nothing in it
    is live. One small tensor keeps a whole segment.

    Evidence used. The blocks of the snapshot, segment by segment, and the stacks of the live ones.

    What to do. Free or clone the few blocks that strand most, allocate long-lived tensors before
    short-lived ones, or let segments grow page by page with expandable_segments:True.

    What it can get wrong. A snapshot shows one moment. Blocks that are freed a little later strand
    nothing for long, and stranded memory that the next step uses again costs nothing.

    Example. A list keeps one output of every step: 12 blocks of 16 MiB strand 109 MiB.

    References. CUDA semantics: Memory management; Understanding CUDA Memory Usage.
    """
    analysis = context.need_analysis()
    stranded = analysis.free_space.stranded_free_bytes
    if stranded < WORTH_SAYING * analysis.reserved_bytes or not stranded:
        return
    has_failed = context.failed_request is not None and not context.failed_request.is_caught
    for strander in analysis.stranders[:MAX_GROUPS]:
        if strander.stranded_bytes < WORTH_SAYING * stranded:
            continue
        yield Found(
            f"{plural(strander.n_blocks, 'live block')} from "
            f"{line_text(context.user_line(strander.stack))} "
            f"({format_size(strander.block_bytes)}) "
            f"{'strands' if strander.n_blocks == 1 else 'strand'} "
            f"{format_size(strander.stranded_bytes)} of free memory, "
            f"{format_share(strander.stranded_bytes, stranded)} of all that is stranded.",
            severity=Severity.WARNING if has_failed else Severity.INFO,
            confidence=Confidence.PROVEN,
            n_bytes=strander.stranded_bytes,
            evidence=in_bytes(
                {"stranded by these": strander.stranded_bytes, "stranded in all": stranded},
                "snapshot",
            ),
            locations=context.python_stack(strander.stack),
        )
