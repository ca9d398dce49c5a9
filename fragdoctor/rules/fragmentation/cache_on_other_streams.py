"""FD107: free memory that belongs to another stream."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.model.finding import Confidence, Evidence, Finding, Severity
from fragdoctor.rules.request_sources import SMALL_BYTES, matching_oom
from fragdoctor.rules.rule import Context, Rule, Skip
from fragdoctor.units import format_size


class CacheOnOtherStreams(Rule):
    """A large enough free block belongs to another stream.

    What it finds. A refused request that a free block of another stream could have held.

    Why it costs memory. A block is bound to the stream it was allocated on; blocks never change
    streams, and stranded segments of other streams are not returned either.

    Evidence used. Stream, pool and size class of the free blocks in the snapshot.

    What to do. Allocate on one stream, and give work on side streams tensors made on the main one.

    What it can get wrong. The layout is that of the end of the snapshot; for an earlier failure
    that was caught it may have changed.

    Example. 50 MiB free on a copy stream while 40 MiB are refused on the default one.

    References. CUDA semantics: CUDA streams; Memory management.
    """

    code = "FD107"
    severity = Severity.WARNING

    def check(self, context: Context) -> Iterator[Finding]:
        """Yield one finding for the largest such block."""
        analysis = context.need_trace()
        context.need_request()
        event = matching_oom(analysis, context.message)
        if event is None:
            raise Skip("the trace holds no out-of-memory event")
        is_small = event.rounded_bytes <= SMALL_BYTES
        others = [
            pool
            for pool in analysis.free_space.by_pool
            if pool.pool_id == (0, 0)
            and pool.is_small == is_small
            and pool.stream != event.stream
            and pool.largest_free_block_bytes >= event.rounded_bytes
        ]
        if not others or not event.is_last_row:
            return
        largest = max(others, key=lambda pool: pool.largest_free_block_bytes)
        size = largest.largest_free_block_bytes
        yield self.finding(
            context,
            f"A free block of {format_size(size)} on another stream could have held the "
            f"{format_size(event.rounded_bytes)} that were refused.",
            confidence=Confidence.PROVEN,
            n_bytes=size,
            evidence=(Evidence("free on another stream", size, "bytes", "snapshot"),),
            locations=context.user_stack(event.stack),
        )
