"""FD1xx: free memory that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fragdoctor.model.finding import Confidence, Evidence, Severity, line_text
from fragdoctor.rules.rule import Context, Found, Skip, needed, rule
from fragdoctor.units import format_count, format_share, format_size, plural

STRANDED_SHARE: Final = 0.1
"""Stranded share of reserved memory worth a finding: well above the tails of any run."""


MAX_GROUPS: Final = 3
"""The most groups to name; each of the others strands less than these."""


@rule("FD101", Severity.INFO)
def stranded_free_memory(context: Context) -> Iterator[Found]:
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
    if stranded < STRANDED_SHARE * analysis.reserved_bytes or not stranded:
        return
    has_failed = context.failed_request is not None and not context.failed_request.is_caught
    for strander in analysis.stranders[:MAX_GROUPS]:
        if strander.stranded_bytes < STRANDED_SHARE * stranded:
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
            evidence=(
                Evidence("stranded by these", strander.stranded_bytes, "bytes", "snapshot"),
                Evidence("stranded in all", stranded, "bytes", "snapshot"),
            ),
            locations=context.python_stack(strander.stack),
        )


@rule("FD102", Severity.ERROR)
def holes_below_request(context: Context) -> Iterator[Found]:
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
        evidence=(
            Evidence("free in the cache", free, "bytes", r.source),
            Evidence("requested", wanted, "bytes", r.source),
        ),
    )


@rule("FD103", Severity.INFO)
def drifting_sizes(context: Context) -> Iterator[Found]:
    """The same lines keep asking for new sizes of large blocks.

    What it finds. Lines that ask for large blocks whose size was not seen from them before, again
    and again until the end of the trace: variable sequence lengths, image sizes or batch sizes.

    Why it costs memory. A freed block serves a request only if it is at least as large; the rest is
    split off. With sizes that never repeat, the cache fills with remainders.

    Evidence used. Requested sizes and stacks of the allocation events.

    What to do. Pad to buckets, sort by length, run the largest shape first, round sizes with
    roundup_power2_divisions, or use expandable_segments:True.

    What it can get wrong. Variable sizes are harmless as long as there is room: without retries or
    failures this is only a remark. Warm-up with a few shapes looks the same in a short trace.

    Example. 86 different sizes in 2,047 large requests of a model trained without padding.

    References. CUDA semantics: Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF.
    """
    analysis = context.need_trace()
    sizes = needed(analysis.sizes, "the trace has no allocation events")
    if not sizes.drifting:
        return
    retries = context.retries
    is_tight = bool(analysis.ooms) or (retries is not None and retries[0] > 0)
    yield Found(
        f"{format_count(sizes.n_large_allocs)} large requests have "
        f"{format_count(sizes.n_distinct_large)} different sizes, and new ones keep coming.",
        severity=Severity.WARNING if is_tight else Severity.INFO,
        confidence=Confidence.LIKELY,
        evidence=(
            Evidence("distinct large sizes", sizes.n_distinct_large, "count", "trace"),
            Evidence("large requests", sizes.n_large_allocs, "count", "trace"),
        ),
    )


@rule("FD104", Severity.ERROR)
def page_rounding(context: Context) -> Iterator[Found]:
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
    r = context.need_request()
    needed(r.expandable, "no input says whether expandable segments are on")
    if not r.fails_by_pages:
        return
    yield Found(
        f"{format_size(r.requested_bytes)} need {format_size(r.mapped_bytes)} of whole pages; "
        f"{format_size(r.free_bytes)} were free.",
        confidence=Confidence.LIKELY,
        n_bytes=r.mapped_bytes,
        evidence=(
            Evidence("whole pages", r.mapped_bytes, "bytes", r.source),
            Evidence("device free", r.free_bytes or 0, "bytes", r.source),
        ),
    )


POOL_SHARE: Final = 0.1
"""Share of reserved memory that is enough to decide a failure."""


@rule("FD105", Severity.INFO)
def private_pool_cache(context: Context) -> Iterator[Found]:
    """Free memory lies in private pools.

    What it finds. Free cached memory in the pools of CUDA graphs and of torch.cuda.MemPool.

    Why it costs memory. Blocks never leave their pool. While the graph or pool lives, its free
    memory serves no other request and is not returned.

    Evidence used. The pool ids of the segments in a snapshot, or the figure for private pools in a
    message of PyTorch 2.4 or later.

    What to do. Capture graphs into one shared pool, capture fewer shapes, delete pools that are
    done, or create them with use_on_oom=True (2.8 and later).

    What it can get wrong. Memory that a graph uses when it replays shows as free in a snapshot:
    it is not waste, only unavailable.

    Example. 180 MiB free inside a MemPool while the default pool lacks 200 MiB.

    References. CUDA semantics: CUDA Graphs, Graph memory management; Using custom memory
    allocators.
    """
    if context.analysis is not None:
        free = context.analysis.free_space.private_pools_free_bytes
        reserved, source = context.analysis.reserved_bytes, "snapshot"
    elif context.message is not None and context.message.reserved_bytes:
        free = context.message.private_pools_bytes or 0
        reserved, source = context.message.reserved_bytes, "oom message"
    else:
        raise Skip("neither a snapshot nor an allocator's message was given")
    if free < POOL_SHARE * reserved or not free:
        return
    r = context.failed_request
    was_wanted = r is not None and free + (r.free_bytes or 0) >= r.requested_bytes
    yield Found(
        f"{format_size(free)} ({format_share(free, reserved)} of reserved memory) are free "
        "inside private pools of graphs or MemPools, usable by them alone.",
        severity=Severity.WARNING if was_wanted else Severity.INFO,
        confidence=Confidence.PROVEN,
        n_bytes=free,
        evidence=(Evidence("free in private pools", free, "bytes", source),),
    )


PENDING_SHARE: Final = 0.02
"""Smallest share of reserved memory worth a finding; less is the copy of one batch."""


@rule("FD106", Severity.INFO)
def pending_frees(context: Context) -> Iterator[Found]:
    """Freed blocks wait for work on other streams.

    What it finds. Memory that is active but no longer allocated, and blocks whose wait ended only
    in the flush before a failure.

    Why it costs memory. A tensor that another stream uses (record_stream, side-stream copies, FSDP
    prefetch) is reusable only when that stream's work is done. After its last flush the allocator
    does not search its cache again.

    Evidence used. Block states of the snapshot, active and allocated bytes of the statistics, free
    events right before the failure.

    What to do. Synchronize the streams before the large allocation, use fewer record_stream calls,
    limit_all_gathers for FSDP, or repeat the failed call once.

    What it can get wrong. A snapshot taken in the middle of overlapping work always shows some.

    Example. 898 MiB wait for a side stream while 800 MiB are asked.

    References. torch.Tensor.record_stream; CUDA semantics: CUDA streams.
    """
    pending, reserved, source = _pending(context)
    r = context.failed_request
    late = r.late_free_bytes if r is not None else 0
    if late and r is not None and late >= r.requested_bytes:
        yield Found(
            f"{format_size(late)} came free only in the flush before the failure of "
            f"{format_size(r.requested_bytes)}, after which the cache is not searched again.",
            severity=Severity.WARNING,
            confidence=Confidence.LIKELY,
            n_bytes=late,
            evidence=(Evidence("late frees", late, "bytes", "trace"),),
            key="late",
        )
    if not pending or pending < PENDING_SHARE * reserved:
        return
    yield Found(
        f"{format_size(pending)} are freed but wait for other streams.",
        severity=Severity.WARNING if r is not None and not r.is_caught else Severity.INFO,
        confidence=Confidence.PROVEN,
        n_bytes=pending,
        evidence=(Evidence("pending", pending, "bytes", source),),
    )


def _pending(context: Context) -> tuple[int, int, str]:
    if context.analysis is not None:
        space = context.analysis.free_space
        return space.pending_free_bytes, context.analysis.reserved_bytes, "snapshot"
    for s in context.stats[-1:]:
        if s.active_bytes is not None and s.allocated_bytes is not None:
            return max(0, s.active_bytes - s.allocated_bytes), s.reserved_bytes or 0, s.origin
    raise Skip("neither a snapshot nor statistics with active bytes were given")


ROUNDING_SHARE: Final = 0.05
"""Smallest share of active memory worth a finding; rounding to 512 bytes wastes far less."""


@rule("FD108", Severity.INFO)
def rounding_waste(context: Context) -> Iterator[Found]:
    """Blocks are much larger than what was asked for.

    What it finds. The difference between active blocks and the bytes requested for them.

    Why it costs memory. roundup_power2_divisions rounds up by as much as one division, large blocks
    keep a remainder of up to 1 MiB (with max_split_size_mb up to 20 MiB), and every tiny tensor
    takes 512 bytes.

    Evidence used. Requested and active bytes of the snapshot or of the statistics (2.0 and later).

    What to do. Use more divisions, or none; join many tiny tensors into one.

    What it can get wrong. Nothing in the numbers; whether the waste matters depends on the room
    there is.

    Example. 12 % of active memory is rounding under roundup_power2_divisions:4.

    References. CUDA semantics: Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF.
    """
    waste, active, source = _waste(context)
    if not waste or waste < ROUNDING_SHARE * active:
        return
    yield Found(
        f"{format_size(waste)} ({format_share(waste, active)} of active memory) are rounding: "
        "blocks are larger than what was asked for.",
        confidence=Confidence.PROVEN,
        n_bytes=waste,
        evidence=(Evidence("rounding", waste, "bytes", source),),
    )


def _waste(context: Context) -> tuple[int, int, str]:
    analysis = context.analysis
    if analysis is not None and analysis.requested_bytes:
        active = analysis.active_bytes
        return max(0, active - analysis.requested_bytes), active, "snapshot"
    for s in context.stats[-1:]:
        if s.requested_bytes is not None and s.active_bytes is not None:
            return max(0, s.active_bytes - s.requested_bytes), s.active_bytes, s.origin
    raise Skip("no input records requested sizes (PyTorch 2.0 and later do)")
