"""A failed request: its figures, from whichever input has them, and their arithmetic.

Symbols of the decision table: the request r as the driver is asked for it, live bytes L, free
cached bytes outside private pools U, free cached bytes of private pools P, reserved R = L + U + P,
driver-free bytes F. A message prints them rounded to two decimals; a snapshot holds them exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from fragdoctor.model.case import OtherProcess
from fragdoctor.units import GIB, KIB, MIB, TIB, format_size

CONTEXT_ALLOWANCE_BYTES: Final = 3 * GIB // 2
"""Allowance for the CUDA context and libraries of one process: 0.3 to 0.9 GiB is normal, more with
NCCL; above about 1.5 GiB it is worth asking about."""

COPY_SHARE: Final = 0.01
"""How far a copy of all that is live may be from it, since buffers are not copied: 0.1% and 0.5% in
two failures of DistributedDataParallel with models of 7B."""
OF_A_COPY: Final = (
    "The request is as large as all that PyTorch has allocated: a copy of the model for its "
    "gradients, its optimizer or another precision"
)

CONTEXT_SHARE: Final = 0.2
SMALL_CONTEXT_BYTES: Final = 700 * MIB
"""On a small card the context and its libraries take this share or this size, since neither NCCL
nor many libraries run there. In public threads, cards of 2 to 6 GiB that nobody else used print
0.4 to 0.7 GiB outside of PyTorch."""

SIZE_BUG_BYTES: Final = TIB
"""No device holds a tebibyte: a request of this size was computed wrongly."""

UNKNOWN_BYTES: Final = 1 << 60
"""Figures this large mean "not available": NVML and cudaMallocAsync print 2^64 for it."""

FULL_SLACK_SHARE: Final = 0.02
"""Free cached memory below this share of reserved memory is the slack of any run (tails of 20 MiB
segments, remainders of 1 MiB that are not split): the device is simply full."""

PRINTED_SLACK_SHARE: Final = 0.105
"""The same share for a message, which does not show how large the holes are. In public threads,
full cards print up to 10.1% of what is reserved, and fragmented cards print 14% and more."""

FREE_NOISE_BYTES: Final = 32 * MIB
FREE_CARD_SHARE: Final = 0.004
ROCM_RESERVE_SHARE: Final = 0.03
FREE_NOISE_SHARE: Final = 0.01
"""Full cards print free memory up to this much above the failed request: the driver keeps some of
it for its own pages, and the figure is read after the failure. In public threads, full cards print
5 to 14 MiB more than the request; if something else was wrong, they print 1 GiB and more. On ROCm
full cards print up to this share of the device as free."""

ROUNDING_SHARE: Final = 0.005
"""Two decimals are printed, so a figure may be off by half of the last decimal."""


def known(n_bytes: int | None) -> int | None:
    """Return a printed figure, or None if it means "not available" (2^64)."""
    return None if n_bytes is None or n_bytes >= UNKNOWN_BYTES else n_bytes


def rounding_bytes(n_bytes: int | None) -> int:
    """Return how far off a printed size may be, in bytes (``format_size`` of PyTorch)."""
    if n_bytes is None or n_bytes <= KIB:
        return 0
    for unit in (KIB, MIB):
        if n_bytes <= 1024 * unit:
            return int(ROUNDING_SHARE * unit) + 1
    return int(ROUNDING_SHARE * GIB) + 1


class FailedRequest(Struct, frozen=True):
    """A request that the allocator could not serve, and the state of the device at that moment.

    All figures are bytes; None means that no input has the figure.

    Attributes:
        source: ``oom message``, ``trace`` or ``trace and oom message``.
        requested_bytes: r, the segment that the driver was asked for. Messages print this figure,
            so reports call it "the request".
        block_bytes: the block inside that segment, if a trace records it.
        live_bytes: L, allocated blocks and blocks that wait for other streams.
        pending_bytes: the part of L that is already freed but waits for other streams.
        unsplit_bytes: the part of L by which blocks exceed their requests because the remainder
            was too small to split off; another layout may avoid it.
        other_processes: processes other than this one; ``own_pid`` is this process's id in the
            list.
        is_exact: whether the figures come from a snapshot rather than rounded to two decimals.
        may_hide_limit: whether this version's message does not print a memory fraction.
        expandable: expandable segments on, off, or unknown.
        page_bytes: unit in which expandable segments map memory for this request.
        largest_free_block_bytes: largest free block after the flush in the pools that could have
            served the request.
        late_free_bytes: bytes that came free only in the flush before the failure.
        hint: what the message itself advises.
        is_caught: whether the program caught the error and went on.
        doing: what the program was doing according to its traceback, as part of a sentence, or
            "" if the traceback shows no sign of ``rules/traceback_signs.py``.
        pool_is_unprinted: whether the backend has its own pool whose size the message lacks
            (cudaMallocAsync): what is neither live nor free may be in that pool.
        cache_is_unprinted: whether the message was cut before the figure for reserved memory;
            ``reserved_bytes`` is then its lower bound, the live bytes.
    """

    source: str
    requested_bytes: int
    block_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    live_bytes: int | None = None
    unallocated_bytes: int | None = None
    pools_free_bytes: int = 0
    pending_bytes: int = 0
    reserved_bytes: int | None = None
    limit_bytes: int | None = None
    process_bytes: int | None = None
    other_processes: Sequence[OtherProcess] = ()
    own_pid: int | None = None
    is_exact: bool = False
    may_hide_limit: bool = False
    expandable: bool | None = None
    page_bytes: int = 20 * MIB
    largest_free_block_bytes: int | None = None
    late_free_bytes: int = 0
    backend: str = "cuda"
    device: int | None = None
    hint: str = ""
    is_caught: bool = False
    doing: str = ""
    pool_is_unprinted: bool = False
    cache_is_unprinted: bool = False
    unsplit_bytes: int = 0

    @property
    def request_text(self) -> str:
        """The request as part of a sentence: its size, and its segment's size if larger."""
        asked, segment = format_size(self.block_bytes), format_size(self.requested_bytes)
        is_larger = self.block_bytes is not None and asked != segment
        return (
            f"request of {asked} (a segment of {segment})" if is_larger else f"request of {segment}"
        )

    @property
    def tolerance_bytes(self) -> int:
        """How far off a sum of these figures may be: 0 for exact ones."""
        if self.is_exact:
            return 0
        figures = (self.requested_bytes, self.free_bytes, self.live_bytes, self.unallocated_bytes)
        return sum(rounding_bytes(figure) for figure in figures)

    @property
    def available_bytes(self) -> int | None:
        """C, what PyTorch could have: reserved + driver-free, or the limit if that is less."""
        if self.reserved_bytes is None or self.free_bytes is None:
            return self.limit_bytes
        available = self.reserved_bytes + self.free_bytes
        return available if self.limit_bytes is None else min(available, self.limit_bytes)

    @property
    def fraction(self) -> float | None:
        """The memory fraction that the limit implies, or None if a figure is unknown."""
        if self.limit_bytes is None or not self.total_bytes:
            return None
        return self.limit_bytes / self.total_bytes

    @property
    def asks_for_copy(self) -> bool:
        """Whether printed figures show a request as large as all that is live, of a model."""
        live = self.live_bytes or 0
        is_equal = abs(self.requested_bytes - live) < COPY_SHARE * live
        return is_equal and live > GIB and not self.is_exact

    @property
    def is_alone_too_large(self) -> bool:
        """Whether the request by itself exceeds the device, or all that PyTorch could have.

        This is False if live memory alone exceeds the device, spilling into the host's memory as
        on Windows: then the program as a whole is too large, and no single size stands out.
        """
        if self.total_bytes is not None and (self.live_bytes or 0) > self.total_bytes:
            return False
        wholes = [b for b in (self.total_bytes, self.available_bytes) if b is not None]
        return bool(wholes) and self.requested_bytes > min(wholes)

    @property
    def has_real_holes(self) -> bool:
        """Whether free cached memory is more than the slack that any run shows."""
        cache = self.cache_bytes
        if not cache or not self.reserved_bytes:
            return False
        slack = FULL_SLACK_SHARE if self.is_exact else PRINTED_SLACK_SHARE
        return cache >= slack * self.reserved_bytes

    @property
    def is_bare(self) -> bool:
        """Whether nothing but the size of the request is known."""
        return self.total_bytes is None and self.free_bytes is None and self.live_bytes is None

    @property
    def needed_bytes(self) -> int | None:
        """L + r: what even a perfectly packed cache would need."""
        return None if self.live_bytes is None else self.live_bytes + self.requested_bytes

    @property
    def cache_bytes(self) -> int | None:
        """U + P: cached bytes that are free."""
        if self.unallocated_bytes is None:
            return None
        return self.unallocated_bytes + self.pools_free_bytes

    @property
    def margin_bytes(self) -> int | None:
        """C - (L + r): what perfect packing would leave; a negative value is missing memory."""
        if self.available_bytes is None or self.needed_bytes is None:
            return None
        return self.available_bytes - self.needed_bytes

    @property
    def uncovered_bytes(self) -> int:
        """What the driver lacked for a new segment (r - F), or 0 if it had enough."""
        if self.is_covered_by_free:
            return 0
        lacking = self.requested_bytes - (self.free_bytes or 0)
        return lacking if lacking > 0 else self.requested_bytes

    @property
    def missing_bytes(self) -> int:
        """How much less live memory would be enough.

        If live memory and the request exceed what PyTorch could have, this is the excess. If
        perfect packing would fit them, which no allocator achieves, it is what the driver lacked.
        """
        if self.margin_bytes is not None and self.margin_bytes < 0:
            return -self.margin_bytes
        return self.uncovered_bytes

    @property
    def in_use_text(self) -> str:
        """Live memory and the request, as the subject of a sentence."""
        return f"The {format_size(self.live_bytes)} in use and the {self.request_text}"

    @property
    def excess_text(self) -> str:
        """How much live memory and the request exceed what PyTorch could have, as a sentence."""
        return (
            f"{self.in_use_text} are {format_size(-(self.margin_bytes or 0))} more than the "
            f"{format_size(self.available_bytes)} that PyTorch could have"
        )

    @property
    def segment_rest_bytes(self) -> int:
        """The part of r outside the block: a small request asks for a segment of 2 or 20 MiB."""
        if self.block_bytes is None:
            return 0
        return max(0, self.requested_bytes - self.block_bytes)

    @property
    def saved_by_layout_bytes(self) -> int:
        """The part of L + r that nobody requested and that another layout may avoid."""
        return self.segment_rest_bytes + self.unsplit_bytes

    @property
    def is_beyond_settings(self) -> bool:
        """Whether live memory and the request exceed what PyTorch could have.

        Then no setting can help; if only remainders of segments and blocks are too much, one may.
        """
        if self.margin_bytes is None or self.cache_is_unprinted:
            return False
        return self.margin_bytes + self.saved_by_layout_bytes < 0

    @property
    def limit_is_binding(self) -> bool:
        """Whether the memory fraction alone forbids a new segment of this size."""
        if self.limit_bytes is None or self.reserved_bytes is None:
            return False
        slack = 0 if self.is_exact else rounding_bytes(self.limit_bytes)
        return self.reserved_bytes + self.requested_bytes > self.limit_bytes - slack

    @property
    def is_covered_by_free(self) -> bool:
        """Whether the driver had more than enough free memory for the whole request.

        A card is full if its free memory exceeds the request by less than ``FREE_NOISE_BYTES``, by
        less than a hundredth of the request, or by a share of the card: ``ROCM_RESERVE_SHARE`` on
        ROCm, else ``FREE_CARD_SHARE`` of a message, whose figure is read after the failure.
        """
        if self.free_bytes is None:
            return False
        noise = max(FREE_NOISE_BYTES, int(FREE_NOISE_SHARE * self.requested_bytes))
        share = ROCM_RESERVE_SHARE if self.backend == "rocm" else FREE_CARD_SHARE
        if self.backend == "rocm" or not self.is_exact:
            noise = max(noise, int(share * (self.total_bytes or 0)))
        return self.free_bytes >= self.requested_bytes + noise

    @property
    def is_of_limit(self) -> bool:
        """Whether the memory fraction alone was in the way: the device had room.

        Then nobody else's memory was missing.
        """
        return self.limit_is_binding and self.is_covered_by_free

    @property
    def mapped_bytes(self) -> int:
        """The whole pages that expandable segments must map for this request without a tail."""
        return -(-self.requested_bytes // self.page_bytes) * self.page_bytes

    @property
    def fails_by_pages(self) -> bool:
        """Whether page rounding under expandable segments explains a failure despite free memory.

        Memory is mapped in pages of 20 MiB; pages from a failed call are rolled back before the
        message's ``free`` is read.
        """
        return (
            self.expandable is True
            and self.free_bytes is not None
            and self.requested_bytes <= self.free_bytes < self.mapped_bytes
        )

    @property
    def other_bytes(self) -> int | None:
        """Memory of other processes, as listed, or what is left after deducting our own.

        If NVML did not name our share, the remainder may include our own context, so an allowance
        for that is deducted.
        """
        listed = sum(p.n_bytes for p in self.other_processes)
        ours = self.process_bytes if self.process_bytes is not None else self.reserved_bytes
        is_unprinted = self.pool_is_unprinted or self.cache_is_unprinted
        if is_unprinted or self.total_bytes is None or self.free_bytes is None or ours is None:
            return listed or None
        context = max(SMALL_CONTEXT_BYTES, int(CONTEXT_SHARE * self.total_bytes))
        context = min(CONTEXT_ALLOWANCE_BYTES, context)
        remainder = self.total_bytes - self.free_bytes - ours - context
        return max(listed, remainder, 0)

    @property
    def beside_pool_bytes(self) -> int:
        """What the pool of cudaMallocAsync may keep: neither live, nor free, nor a context."""
        known_bytes = (self.live_bytes or 0) + (self.free_bytes or 0) + CONTEXT_ALLOWANCE_BYTES
        return max(0, (self.total_bytes or 0) - known_bytes)

    @property
    def non_pytorch_bytes(self) -> int | None:
        """Memory of this process outside PyTorch's cache, context included; None if not printed."""
        if self.process_bytes is None or self.reserved_bytes is None:
            return None
        return max(0, self.process_bytes - self.reserved_bytes)

    @property
    def outside_bytes(self) -> int | None:
        """Everything on the device that is neither free nor in PyTorch's cache."""
        if self.total_bytes is None or self.free_bytes is None or self.reserved_bytes is None:
            return None
        outside = self.total_bytes - self.free_bytes - self.reserved_bytes
        # The size of the device is a printed figure: a rounding error is not others' memory.
        return outside if outside > rounding_bytes(self.total_bytes) else 0
