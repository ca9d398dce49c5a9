"""FD102: much is free, but no hole is large enough."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.model.finding import Confidence, Evidence, Finding, Severity
from fragdoctor.rules.rule import Context, Rule, Skip
from fragdoctor.units import format_size


class HolesBelowRequest(Rule):
    """A request failed although the cache had more than its size free.

    What it finds. A refused request for which the free cached memory together would do, while the
    largest free block of its pool and stream is smaller.

    Why it costs memory. Blocks never span segments and never move: many small holes do not add up.

    Evidence used. The out-of-memory event and the layout of the blocks at that moment; from a
    message alone only that the unallocated memory is at least the request.

    What to do. See who strands the holes (FD101), try expandable_segments:True, keep shapes steady.

    What it can get wrong. A message does not show the holes: the memory may be on another stream
    or in the other size class, or a block may have come free too late.

    Example. 500 MiB asked, 673 MiB free in holes of at most 175 MiB.

    References. CUDA semantics: Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF.
    """

    code = "FD102"
    severity = Severity.ERROR

    def check(self, context: Context) -> Iterator[Finding]:
        """Yield one finding if the free cache exceeds the request."""
        r = context.need_request()
        if r.unallocated_bytes is None:
            raise Skip("the message does not print what was reserved but unallocated")
        if r.unallocated_bytes < r.requested_bytes or not r.has_real_holes:
            return
        largest, wanted = r.largest_free_block_bytes, r.block_bytes or r.requested_bytes
        if largest is not None and largest >= wanted:
            return
        holes = "" if largest is None else f" in holes of at most {format_size(largest)}"
        yield self.finding(
            context,
            f"{format_size(wanted)} were refused with {format_size(r.unallocated_bytes)} free in "
            f"the cache{holes}.",
            confidence=Confidence.LIKELY if largest is None else Confidence.PROVEN,
            n_bytes=r.unallocated_bytes,
            evidence=(
                Evidence("free in the cache", r.unallocated_bytes, "bytes", r.source),
                Evidence("requested", wanted, "bytes", r.source),
            ),
        )
