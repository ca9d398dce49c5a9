"""FD102: a request failed although the cache had more than its size free."""

from __future__ import annotations

from fragdoctor.model.finding import Confidence, Severity, in_bytes
from fragdoctor.rules.rule import Context, Findings, Found, needed, rule
from fragdoctor.units import format_size


@rule("FD102", Severity.ERROR)
def holes_below_request(context: Context) -> Findings:
    """A request failed although the cache had more than its size free.

    What it finds. A refused request for which the free cached memory together would do, while the
    largest free block of its pool and stream is smaller.

    Why it costs memory. Blocks never span segments and never move: many small holes do not add up.

    Evidence used. The out-of-memory event and the layout of the blocks at that moment; from a
    message alone only that the unallocated memory is at least the request.

    What to do. See who strands the holes (FD101), try expandable_segments:True, keep shapes steady.

    What it can get wrong. A message does not show the holes: the memory may be on another stream
    or in the other size class, or a block may have come free too late.

    Example. 500 MiB requested, 673 MiB free in holes of at most 175 MiB.

    References. CUDA semantics: Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF.
    """
    r = context.need_request()
    free = needed(
        r.unallocated_bytes, "the message does not print what was reserved but unallocated"
    )
    if free < r.requested_bytes or not r.has_real_holes:
        return
    largest, wanted = r.largest_free_block_bytes, r.block_bytes or r.requested_bytes
    if largest is not None and largest >= wanted:
        return
    holes = "" if largest is None else f", in holes of at most {format_size(largest)}"
    yield Found(
        f"The {r.request_text} failed with {format_size(free)} free in the cache{holes}.",
        confidence=Confidence.LIKELY if largest is None else Confidence.PROVEN,
        n_bytes=free,
        evidence=in_bytes({"free in the cache": free, "requested": wanted}, r.source),
    )
