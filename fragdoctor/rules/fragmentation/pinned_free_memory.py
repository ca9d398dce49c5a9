"""FD101: free memory that live blocks keep from being returned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final

from fragdoctor.model.finding import Confidence, Evidence, Finding, Severity
from fragdoctor.rules.rule import Context, Need, Rule, line_text
from fragdoctor.units import format_share, format_size, plural

WORTH_SHARE: Final = 0.1
"""Pinned memory of a tenth of what is reserved: well above the tails of any run."""

MAX_GROUPS: Final = 3
"""Groups named; each further one pins less than these."""


class PinnedFreeMemory(Rule):
    """Free cached memory is pinned by live blocks in the same segments.

    What it finds. Segments (or pages of expandable segments) that hold free memory and at least one
    live block, and the source lines of the blocks that would set most of it free.

    Why it costs memory. The allocator gives a segment back to the driver only when nothing in it
    is live. One small tensor keeps a whole segment.

    Evidence used. The blocks of the snapshot, segment by segment, and the stacks of the live ones.

    What to do. Free or clone the few blocks that pin most, allocate long-lived tensors before
    short-lived ones, or let segments grow page by page with expandable_segments:True.

    What it can get wrong. A snapshot shows one moment. Blocks that are freed a little later pin
    nothing for long, and pinned memory that the next step uses again costs nothing.

    Example. A list keeps one output of every step: 12 blocks of 16 MiB pin 109 MiB.

    References. CUDA semantics: Memory management; Understanding CUDA Memory Usage.
    """

    code: ClassVar[str] = "FD101"
    name: ClassVar[str] = "pinned-free-memory"
    summary: ClassVar[str] = "Free cached memory is pinned by live blocks"
    severity: ClassVar[Severity] = Severity.INFO
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SNAPSHOT})

    def check(self, context: Context) -> Iterator[Finding]:
        """Yield the groups that pin most, where pinned memory is worth a word."""
        analysis = context.analysis
        assert analysis is not None  # noqa: S101 - needs
        pinned = analysis.free_space.pinned_free_bytes
        if pinned < WORTH_SHARE * analysis.reserved_bytes or not pinned:
            return
        has_failed = context.failed_request is not None and not context.failed_request.is_caught
        for pin in analysis.pins[:MAX_GROUPS]:
            if pin.pinned_bytes < WORTH_SHARE * pinned:
                continue
            yield self.finding(
                context,
                f"{plural(pin.n_blocks, 'live block')} from "
                f"{line_text(context.user_line(pin.stack))} "
                f"({format_size(pin.block_bytes)}) {'pins' if pin.n_blocks == 1 else 'pin'} "
                f"{format_size(pin.pinned_bytes)} of free memory, "
                f"{format_share(pin.pinned_bytes, pinned)} of all that is pinned.",
                severity=Severity.WARNING if has_failed else Severity.INFO,
                confidence=Confidence.PROVEN,
                n_bytes=pin.pinned_bytes,
                evidence=(
                    Evidence("pinned by these", pin.pinned_bytes, "bytes", "snapshot"),
                    Evidence("pinned in all", pinned, "bytes", "snapshot"),
                ),
                locations=context.python_stack(pin.stack),
            )
