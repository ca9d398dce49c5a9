"""The decision table for one failed request: arithmetic first, then thresholds.

Each row is a function that yields hypotheses. The first hypothesis is the verdict, and the others
are causes that the evidence also supports. Every threshold has its name, value and reason here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.rules.failed_request import (
    CONTEXT_ALLOWANCE_BYTES,
    FULL_SLACK_SHARE,
    OF_A_COPY,
    SIZE_BUG_BYTES,
    SMALL_CONTEXT_BYTES,
    FailedRequest,
    rounding_bytes,
)
from fragdoctor.units import GIB, format_share, format_size


class Hypothesis(Struct, frozen=True):
    """One cause that the evidence supports, with its sentence; possible unless stated otherwise.

    ``settled_by`` is the one cheap measurement that would settle it, ``row`` is the row that
    yielded it, and ``also`` holds the other causes that the same evidence supports.
    """

    cause: Cause
    summary: str
    confidence: Confidence = Confidence.POSSIBLE
    settled_by: str = ""
    row: str = ""
    also: tuple[Cause, ...] = ()


def fragmentation(r: FailedRequest, *, is_limited: bool = False) -> Hypothesis:
    """Return the hypothesis that holes were in the way.

    If a limit forbids using what is free on the device, only what it leaves counts; ``is_limited``
    says that an unknown limit leaves nothing but what is reserved.
    """
    largest = r.largest_free_block_bytes
    proven = largest is not None and largest < (r.block_bytes or r.requested_bytes)
    if not proven:
        holes = "cached by PyTorch but unallocated"
    elif largest:
        holes = f"in holes of at most {format_size(largest)} that live blocks strand"
    else:
        holes = "in segments for other streams or sizes that live blocks strand"
    on_device = format_size(r.free_bytes)
    if is_limited:
        free = (
            f"{format_size(r.cache_bytes)} of what is reserved was free, {holes}. {on_device} is "
            "free on the device, but something keeps PyTorch from reserving more, usually a memory "
            "fraction"
        )
    else:
        under, outside, beyond = "", "", r.free_bytes or 0
        if r.is_of_limit and r.limit_bytes is not None:
            beyond = max(0, r.limit_bytes - (r.reserved_bytes or 0))
            under = f" under the limit of {format_size(r.limit_bytes)}"
            outside = f", {format_size(beyond)} not reserved yet"
        elif r.free_bytes is not None:
            outside = f", {on_device} on the device"
        free = f"{format_size((r.cache_bytes or 0) + beyond)} was free{under}: "
        free += f"{format_size(r.unallocated_bytes)} of it {holes}{outside}"
    return Hypothesis(
        Cause.FRAGMENTATION,
        f"The {r.request_text} failed although {free}.",
        Confidence.PROVEN if proven else Confidence.LIKELY,
        ""
        if proven
        else "A snapshot taken at the OOM shows the holes and what keeps them from being released.",
    )


def simply_full(r: FailedRequest) -> Hypothesis:
    """Return the hypothesis that live memory fills the device; holes at most contributed."""
    if r.has_real_holes:
        is_slim = _share(r.margin_bytes, r.available_bytes) < SLIM_MARGIN_SHARE
        rest = "with little to spare" if is_slim else "but not a second one like it"
        summary = (
            f"{r.in_use_text} leave {format_size(r.margin_bytes)} of the "
            f"{format_size(r.available_bytes)} that PyTorch could have. Without any holes "
            f"the request would fit, {rest}: the device is practically full."
        )
    else:
        live, available = r.live_bytes or 0, r.available_bytes or 0
        summary = (
            f"{format_size(live)} of the {format_size(available)} that PyTorch can have is in use "
            f"({format_share(live, available)})"
        )
        if is_last_straw(r):
            summary += f": the device is full, and the {r.request_text} is just the last straw."
        else:
            left = available - live
            how_much = "nearly all" if r.requested_bytes >= 0.8 * left else "most"
            summary += f". The {r.request_text} is {how_much} of the {format_size(left)} left"
            if r.unallocated_bytes:
                holes = format_size(r.unallocated_bytes)
                summary += f", and {holes} of that lies in holes of PyTorch's cache"
            summary += "."
    return Hypothesis(Cause.CAPACITY, summary, Confidence.LIKELY, also=(Cause.FRAGMENTATION,))


def without_figures(request: str, doing: str) -> Hypothesis:
    """Return the hypothesis for a request about which nothing else is known."""
    when = f" {doing}" if doing else ", as it does when the GPU is full"
    return Hypothesis(
        Cause.CAPACITY,
        f"The allocator refused a {request}{when}; the part of the message that says who holds "
        "the GPU's memory is missing.",
        settled_by="Give the whole message; nvidia-smi during the run shows who fills the GPU.",
    )


def undecided(r: FailedRequest) -> Hypothesis:
    """Return the hypothesis for figures that fit no row.

    A traceback through code that is known to need a lot of memory points to capacity.
    """
    used = ""
    if r.reserved_bytes is not None and r.total_bytes is not None:
        used = f": {format_size(r.reserved_bytes)} of {format_size(r.total_bytes)} is reserved"
    return Hypothesis(
        Cause.CAPACITY if r.doing else Cause.UNKNOWN,
        f"A {r.request_text} failed; the figures do not say why{used}.",
        settled_by="A snapshot, or memory_stats() before the failing step, would decide.",
    )


LAST_STRAW_SHARE: Final = 0.05
"""A request below this share of the device is not what filled it."""


def is_last_straw(r: FailedRequest) -> bool:
    """Return whether a request is a small part of what PyTorch could have."""
    return r.requested_bytes < LAST_STRAW_SHARE * (r.available_bytes or 0)


SLIM_MARGIN_SHARE: Final = 0.05
"""If no hole is as large as the request, cache and driver-free memory have to be joined. If perfect
packing would leave less than this share, a real allocator cannot do it: of such failures in
``tests/truth`` that are no leaks, a setting cures 2 of 25 below it, and 11 of 17 above."""

NORMAL_OUTSIDE_SHARE: Final = 0.1
"""The context, libraries and driver account for up to this share of the device beside what PyTorch
reserves. More than that is nobody's need: where it covers what is missing, it is the cause."""

OUTSIDE: Final = (Cause.OTHER_PROCESS, Cause.NON_PYTORCH_MEMORY)

FAR_MORE: Final = 4
"""What a pool keeps is not missing where it is this many times the request, unless in pieces."""

INTEGRATED_BYTES: Final = 2 * GIB
"""ROCm supports no card with so little memory: it is an integrated GPU's share of the host's."""

BEYOND_ALL_ELSE: Final = 100
BEYOND_DEVICE: Final = 2
"""A tensor twice the size of the device, and 100 times all else that is live (weights, inputs), is
no activation of that model: an index or a size is wrong."""

OVERSIZED_ALONE_BYTES: Final = 24 * GIB
"""A single request as large as a big consumer card fails because of its own size."""


def decide(failed: FailedRequest) -> Hypothesis:
    """Return the most likely cause of a failed request, and which other causes are possible."""
    found, name = [undecided(failed)], "undecided"
    for row in ROWS:
        if told := list(row(failed)):
            found, name = told, name_of(row)
            break
    first, *others = found
    summary = first.summary
    if failed.doing and failed.doing not in summary:
        summary += f" It failed {failed.doing}."
    if first.cause is Cause.CAPACITY and failed.asks_for_copy:
        summary += f" {OF_A_COPY}."
    also = (*first.also, *(h.cause for h in others), *_besides(failed, first.cause))
    return replace(first, summary=summary, row=name, also=distinct(also, first.cause))


def name_of(row: Callable[..., object]) -> str:
    """Return the name of a row of a table, which is the verdict's ``decider``."""
    return row.__name__.strip("_").replace("_", "-")


def distinct(causes: Iterable[Cause], first: Cause) -> tuple[Cause, ...]:
    """Return the known causes other than the first, without duplicates."""
    return tuple(dict.fromkeys(c for c in causes if c not in (first, Cause.UNKNOWN)))


# The rows, in order.


def _size_bug(r: FailedRequest) -> Iterator[Hypothesis]:
    if r.requested_bytes >= SIZE_BUG_BYTES:
        yield Hypothesis(
            Cause.SIZE_BUG,
            f"The {r.request_text} is larger than any device "
            f"({format_size(SIZE_BUG_BYTES)} and more): a size was computed wrongly.",
            Confidence.PROVEN,
        )


def _beyond_device(r: FailedRequest) -> Iterator[Hypothesis]:
    """The request, or live memory and request together, exceed the whole device."""
    if r.total_bytes is None:
        return
    is_beyond_all = (r.live_bytes and not r.doing) and r.requested_bytes >= max(
        BEYOND_DEVICE * r.total_bytes, BEYOND_ALL_ELSE * r.live_bytes
    )
    if is_beyond_all:
        yield Hypothesis(
            Cause.SIZE_BUG,
            f"A single {r.request_text}, where the device has {format_size(r.total_bytes)} and all "
            f"else that is live {format_size(r.live_bytes)}: a size or an index is most likely "
            "wrong.",
            Confidence.LIKELY,
            also=(Cause.CAPACITY,),
        )
    elif r.requested_bytes > r.total_bytes >= (r.live_bytes or 0):
        yield Hypothesis(
            Cause.CAPACITY,
            f"The single {r.request_text} is larger than the whole "
            f"device of {format_size(r.total_bytes)}"
            f"{'' if r.doing else ': attention scores, or a wrong shape'}.",
            Confidence.PROVEN,
            also=() if r.doing else (Cause.SIZE_BUG,),
        )
        return
    least = (r.needed_bytes or 0) - r.pending_bytes - r.saved_by_layout_bytes
    # The size of the device is a printed figure even if the rest comes from a snapshot.
    if least > r.total_bytes + r.tolerance_bytes + rounding_bytes(r.total_bytes):
        if r.is_of_limit:
            return
        live = r.live_bytes or 0
        if live > r.total_bytes:
            yield Hypothesis(
                Cause.CAPACITY,
                f"{format_size(live)} is in use on a device of {format_size(r.total_bytes)}: the "
                "driver has moved the rest to the host's memory, as it does on Windows, and the "
                f"{r.request_text} could not be placed there either.",
                Confidence.PROVEN,
            )
            return
        yield Hypothesis(
            Cause.CAPACITY,
            f"{r.in_use_text} exceed the whole device of {format_size(r.total_bytes)}: "
            "no allocator setting can make that fit.",
            Confidence.PROVEN,
        )


def _limit(r: FailedRequest) -> Iterator[Hypothesis]:
    """The process's own memory fraction forbids the segment."""
    if not r.limit_is_binding or r.limit_bytes is None:
        return
    if r.total_bytes is not None and r.limit_bytes >= r.total_bytes:
        return
    free = f", although {format_size(r.free_bytes)} is free on the device"
    although = free if r.is_covered_by_free else ""
    limit = Hypothesis(
        Cause.MEMORY_LIMIT,
        f"The process may reserve {format_size(r.limit_bytes)}, and {format_size(r.reserved_bytes)}"
        f" reserved plus the {r.request_text} exceed that{although}.",
        Confidence.PROVEN,
    )
    if r.margin_bytes is not None and r.margin_bytes > r.tolerance_bytes:
        yield from _holes(r)
    yield limit


def is_integrated(r: FailedRequest) -> bool:
    """Return whether the device is an integrated GPU, whose size is a setting."""
    return r.backend == "rocm" and 0 < (r.total_bytes or 0) <= INTEGRATED_BYTES


def _integrated(r: FailedRequest) -> Iterator[Hypothesis]:
    """An integrated GPU has what the BIOS sets aside for it, and the driver needs some of that."""
    if is_integrated(r):
        yield Hypothesis(
            Cause.CAPACITY,
            f"The whole device has {format_size(r.total_bytes)}: it is an integrated GPU, and that "
            "is what the BIOS sets aside for it. The driver keeps part of it.",
            Confidence.LIKELY,
        )


LARGEST_OF_XPU_BYTES: Final = 4 * GIB
"""Level Zero's maxMemAllocSize on Arc: larger allocations need its relaxed limits (Intel's
compute-runtime, programmers-guide/ALLOCATIONS_GREATER_THAN_4GB.md)."""


def _single_allocation(r: FailedRequest) -> Iterator[Hypothesis]:
    """The device has room, but not for one allocation of that size."""
    if r.backend != "xpu" or r.requested_bytes < LARGEST_OF_XPU_BYTES or r.total_bytes is None:
        return
    if (r.live_bytes or 0) + r.requested_bytes > r.total_bytes:
        return
    if r.free_bytes is not None and r.free_bytes < r.requested_bytes:
        return
    yield Hypothesis(
        Cause.MEMORY_LIMIT,
        f"The {r.request_text} is a single allocation of 4 GiB or more, which Intel's driver "
        f"refuses on many GPUs, however much of the {format_size(r.total_bytes)} is free.",
        Confidence.LIKELY,
    )


def _free_enough(r: FailedRequest) -> Iterator[Hypothesis]:
    """The driver had the memory: neither capacity nor fragmentation explains the failure."""
    if not r.is_covered_by_free or r.fails_by_pages:
        return
    figures = (
        f"The {r.request_text} failed although {format_size(r.free_bytes)} was free on the device"
    )
    yield from _others_first(r)
    if r.is_exact:
        if (
            r.live_bytes is not None
            and r.reserved_bytes is not None
            and r.live_bytes + r.requested_bytes <= r.reserved_bytes
            and (r.margin_bytes or 0) >= 0
        ):
            yield from _holes(r, is_limited=True)
        yield Hypothesis(
            Cause.MEMORY_LIMIT,
            f"{figures}: a memory fraction (set_per_process_memory_fraction) is the usual reason; "
            f"the limit is then between {format_size(r.reserved_bytes)} and "
            f"{format_size((r.reserved_bytes or 0) + r.requested_bytes)}.",
            Confidence.LIKELY,
            "The OOM message prints the limit as 'allowed'; print "
            "torch.cuda.get_per_process_memory_fraction() (2.10 and later).",
        )
        return
    fraction = ask = ""
    if r.may_hide_limit:
        fraction = "a memory fraction that this version's message does not print, "
        ask = "Check whether a memory fraction is set; "
    reasons = (
        f"{fraction}another process that has since freed its memory, a limit of the driver or of "
        "virtual memory (ulimit -v), or on Windows a page file that is too small"
    )
    yield Hypothesis(
        Cause.UNKNOWN,
        f"{figures}: a full device does not explain it; possible causes are {reasons}.",
        settled_by=f"{ask}nvidia-smi during the run lists the processes on the device, and the "
        "allocator's trace shows whether the driver was asked at all.",
        also=(Cause.MEMORY_LIMIT,) if r.may_hide_limit else (),
    )


def _others_first(r: FailedRequest) -> Iterator[Hypothesis]:
    """Memory of other processes, or of other libraries in this process, as the main culprit."""
    if r.total_bytes is None:
        return
    # A program has a context of its own: what is smaller than that is a desktop, or libraries.
    normal = max(SMALL_CONTEXT_BYTES, NORMAL_OUTSIDE_SHARE * r.total_bytes)
    for hypothesis, n_bytes in _outside_candidates(r):
        if n_bytes >= max(normal, r.uncovered_bytes, r.cache_bytes or 0):
            yield hypothesis


def _outside_candidates(r: FailedRequest) -> Iterator[tuple[Hypothesis, int]]:
    other, own = r.other_bytes or 0, r.non_pytorch_bytes
    own_excess = max(0, (own or 0) - CONTEXT_ALLOWANCE_BYTES)
    listed = bool(r.other_processes)
    nameless = "Something else, most likely another process, holds"
    holders = "Other processes hold" if listed else nameless
    other_reading = Hypothesis(
        Cause.OTHER_PROCESS,
        f"{holders} {format_size(other)} of the {format_size(r.total_bytes)} device; PyTorch in "
        f"this process has reserved {format_size(r.reserved_bytes)}.",
        Confidence.PROVEN if listed else Confidence.LIKELY,
        "" if listed else "nvidia-smi (or fuser -v /dev/nvidia*) names the processes.",
    )
    own_reading = Hypothesis(
        Cause.NON_PYTORCH_MEMORY,
        f"{format_size(own)} of this process's memory is outside PyTorch's cache (context, "
        f"libraries, other frameworks), against {format_size(r.reserved_bytes)} reserved by it.",
        Confidence.LIKELY,
    )
    if own_excess > other:
        yield own_reading, own_excess
    if other:
        yield other_reading, other
        if r.process_bytes is None:
            yield Hypothesis(Cause.NON_PYTORCH_MEMORY, ""), other
    if 0 < own_excess <= other:
        yield own_reading, own_excess


def _over_available(r: FailedRequest) -> Iterator[Hypothesis]:
    """Live memory and request exceed what PyTorch could have: capacity."""
    if r.margin_bytes is None or r.margin_bytes >= 0:
        return
    if r.pool_is_unprinted:
        if r.beside_pool_bytes >= FAR_MORE * r.requested_bytes:
            yield Hypothesis(
                Cause.FRAGMENTATION,
                f"{format_size(r.live_bytes)} is in use and {format_size(r.free_bytes)} free: "
                f"{format_size(r.beside_pool_bytes)} of the {format_size(r.total_bytes)} device "
                "is neither, even after a CUDA context. The pool of cudaMallocAsync keeps it, "
                f"and it did not serve a {r.request_text}; or another process has it.",
                Confidence.LIKELY,
                "nvidia-smi names other processes; PYTORCH_CUDA_ALLOC_CONF=backend:native prints "
                "all figures.",
                also=(Cause.CAPACITY, Cause.OTHER_PROCESS),
            )
            return
        yield Hypothesis(
            Cause.CAPACITY,
            f"{format_size(r.live_bytes)} of the {format_size(r.total_bytes)} device is in use, "
            f"and {format_size(r.free_bytes)} is free for a {r.request_text}. The rest is the "
            "context and the pool of cudaMallocAsync, whose size its message does not print, so "
            "there need not be another process.",
            Confidence.LIKELY,
            "PYTORCH_CUDA_ALLOC_CONF=backend:native prints all figures.",
        )
        return
    if r.cache_is_unprinted:
        yield Hypothesis(
            Cause.CAPACITY,
            f"{format_size(r.live_bytes)} is in use and {format_size(r.free_bytes)} free on the "
            f"device, too little for a {r.request_text}; what PyTorch keeps in its cache is "
            "missing from the message.",
            Confidence.LIKELY,
            "The whole message says what is reserved: if much of it is free, it is fragmentation.",
            also=(Cause.FRAGMENTATION,),
        )
        return
    if r.pending_bytes and r.margin_bytes + r.pending_bytes >= 0:
        yield Hypothesis(
            Cause.PENDING_FREES,
            f"{format_size(r.pending_bytes)} is freed but still waits for other streams; without "
            f"it the {r.request_text} would have fit.",
            Confidence.LIKELY,
        )
    missing = -r.margin_bytes - r.saved_by_layout_bytes
    confidence = Confidence.PROVEN if missing > r.tolerance_bytes else Confidence.LIKELY
    ending = (
        ": no allocator setting can make that fit."
        if confidence is Confidence.PROVEN and r.is_beyond_settings
        else "."
    )
    yield Hypothesis(
        Cause.CAPACITY,
        f"{r.excess_text}{ending}",
        confidence,
    )


def _found_too_late(r: FailedRequest) -> Iterator[Hypothesis]:
    """A cached block that came free during the flush was large enough when the error was raised."""
    block = r.block_bytes or r.requested_bytes
    largest = r.largest_free_block_bytes
    if not r.is_exact or largest is None or largest < block or r.late_free_bytes == 0:
        return
    yield Hypothesis(
        Cause.PENDING_FREES,
        f"A cached block of {format_size(largest)} could hold the request of {format_size(block)}, "
        f"but it came free only in the last flush ({format_size(r.late_free_bytes)} waited for "
        "other streams), after which the cache is not searched again.",
        Confidence.LIKELY,
        "Catch the error and repeat the allocation once: if it works, this was it.",
    )


def _joined_fits(r: FailedRequest) -> Iterator[Hypothesis]:
    """Perfectly packed, live memory and request would have fit: which holes were in the way?"""
    if r.margin_bytes is None or r.margin_bytes < 0 or r.cache_bytes is None:
        return
    yield _in_pools(r) or (fragmentation(r) if _is_fragmented(r) else simply_full(r))


def _holes(r: FailedRequest, *, is_limited: bool = False) -> Iterator[Hypothesis]:
    """Yield which holes were in the way under a limit, if there are any."""
    pools = _in_pools(r)
    if pools is not None or r.has_real_holes:
        yield pools or fragmentation(r, is_limited=is_limited)


def _in_pools(r: FailedRequest) -> Hypothesis | None:
    """Return the hypothesis that holes in private pools were in the way, if they are the larger."""
    is_large = _share(r.pools_free_bytes, r.reserved_bytes) >= FULL_SLACK_SHARE
    if not is_large or r.pools_free_bytes <= (r.unallocated_bytes or 0):
        return None
    return Hypothesis(
        Cause.PRIVATE_POOLS,
        f"The {r.request_text} failed while "
        f"{format_size(r.pools_free_bytes)} was free inside private pools (CUDA graphs, "
        "MemPool), where ordinary requests cannot use them.",
        Confidence.PROVEN if r.is_exact else Confidence.LIKELY,
    )


def _is_fragmented(r: FailedRequest) -> bool:
    """Whether there are holes, and enough room for them to matter.

    A message prints only sums: if a second request like this would not fit, the device was full.
    """
    if not r.has_real_holes or (r.unallocated_bytes or 0) >= r.requested_bytes:
        return r.has_real_holes
    least = SLIM_MARGIN_SHARE * (r.available_bytes or 0) if r.is_exact else r.requested_bytes
    return (r.margin_bytes or 0) >= least


def _no_free_figure(r: FailedRequest) -> Iterator[Hypothesis]:
    """A message without a free figure, or one that was cut short: say what still follows."""
    if r.free_bytes is not None:
        if r.live_bytes is None and r.free_bytes < r.requested_bytes:
            yield Hypothesis(
                Cause.CAPACITY,
                f"Only {format_size(r.free_bytes)} was free for a request of "
                f"{format_size(r.requested_bytes)}; the message says nothing about who holds the "
                "rest.",
                settled_by="The full message, nvidia-smi, or a snapshot shows who holds the "
                "memory.",
                also=(Cause.OTHER_PROCESS,),
            )
        return
    if r.total_bytes is None or r.reserved_bytes is None or r.unallocated_bytes is None:
        return
    rest = r.total_bytes - r.reserved_bytes - r.requested_bytes
    if r.unallocated_bytes >= r.requested_bytes and r.has_real_holes:
        yield fragmentation(r)
    elif rest <= NORMAL_OUTSIDE_SHARE * r.total_bytes:
        yield Hypothesis(
            Cause.CAPACITY,
            f"{format_size(r.reserved_bytes)} reserved plus the request of "
            f"{format_size(r.requested_bytes)} leave {format_size(max(0, rest))} of the device of "
            f"{format_size(r.total_bytes)}, which the context and the driver take.",
            Confidence.LIKELY,
        )


def _size_alone(r: FailedRequest) -> Iterator[Hypothesis]:
    """Only the request is known: if it is larger than most devices, its own size is the cause."""
    if not r.is_bare:
        return
    if r.requested_bytes < OVERSIZED_ALONE_BYTES:
        yield without_figures(r.request_text, r.doing)
        return
    yield Hypothesis(
        Cause.CAPACITY,
        f"A single {r.request_text} is more than most GPUs have; "
        "the message prints no other number.",
        settled_by="Print the shape and dtype of the tensor at the failing line.",
        also=(Cause.SIZE_BUG,),
    )


ROWS: Final[tuple[Callable[[FailedRequest], Iterator[Hypothesis]], ...]] = (
    _size_bug,
    _integrated,
    _beyond_device,
    _limit,
    _single_allocation,
    _free_enough,
    _others_first,
    _found_too_late,
    _over_available,
    _joined_fits,
    _no_free_figure,
    _size_alone,
)


# Helpers of several rows.


def _besides(r: FailedRequest, first: Cause) -> Iterator[Cause]:
    """Yield further causes that would each have covered what was missing."""
    if first in (Cause.SIZE_BUG, Cause.UNKNOWN) or is_integrated(r):
        return
    missing = r.uncovered_bytes or r.requested_bytes
    if r.is_alone_too_large:  # no matter who else is on the device
        yield Cause.SIZE_BUG
        return
    for hypothesis, n_bytes in () if r.is_of_limit else _outside_candidates(r):
        if r.total_bytes is not None and n_bytes >= missing:
            yield hypothesis.cause
    if r.margin_bytes is None or r.cache_bytes is None:
        return
    is_mostly_own = first in OUTSIDE and (r.live_bytes or 0) >= (r.outside_bytes or 0)
    if is_mostly_own or (r.margin_bytes < 0 and first in (Cause.MEMORY_LIMIT, Cause.PENDING_FREES)):
        yield Cause.CAPACITY
    if (r.unallocated_bytes or 0) >= missing and r.margin_bytes >= 0:
        yield Cause.FRAGMENTATION
    if r.pools_free_bytes >= missing and r.margin_bytes >= 0:
        yield Cause.PRIVATE_POOLS


def _share(part: int | None, whole: int | None) -> float:
    return (part or 0) / whole if whole else 0.0
