"""Remedies for streams, private pools, the whole cache, and limits that the process has set."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from fragdoctor.diagnosis.bench import Attempt, Bench, Effect
from fragdoctor.diagnosis.remedies.less_at_once import SMALL_SHARE
from fragdoctor.diagnosis.remedies.remedy import (
    CLOSED,
    Burden,
    JudgedCase,
    Proposal,
    Remedy,
    Weight,
    proposes,
)
from fragdoctor.future.edits import empty_cache_at
from fragdoctor.future.whatif import WhatIf
from fragdoctor.model.diagnosis import Cause, Predicted
from fragdoctor.model.finding import Confidence
from fragdoctor.units import format_size


def _emptied(case: JudgedCase) -> list[Attempt]:
    """Return the run with the call right before the failed request."""
    failed = None if case.bench is None else case.bench.recorded.oom_event
    return [] if failed is None else [Attempt.of_edit(empty_cache_at([failed]))]


def is_single(case: JudgedCase) -> bool:
    """Return whether the size of one allocation was refused, rather than the total memory."""
    told = case.message is not None and case.message.sub_kind in (
        "single-allocation-limit",
        "buffer-too-large",
    )
    return told or case.verdict.decider == "single-allocation"


def _with_fraction(case: JudgedCase, proposal: Proposal, needed_bytes: int | None) -> Proposal:
    """Return the proposal with the smallest fraction that admits these bytes, if known."""
    r, number, value = case.failed_request, "", "..."
    is_seen = case.cause is not Cause.UNKNOWN
    if r is not None and r.total_bytes is not None and needed_bytes is not None:
        present = r.fraction or 0.0
        fraction = math.ceil(1000 * needed_bytes / r.total_bytes) / 1000
        # Never advise less than is set: the sum of the figures misses what was decisive.
        if present < fraction <= 1:
            value = f"{fraction:g}"
            number = f"{f' from {present:.3g}' if present else ''} to at least {value}"
    return proposal.saying(
        title=f"{RaiseMemoryLimit.title if is_seen else 'If a memory fraction is set, raise it'}"
        f"{number}",
        change=f"torch.cuda.set_per_process_memory_fraction({value}), or remove the call; from "
        "2.10 on also per_process_memory_fraction in PYTORCH_CUDA_ALLOC_CONF",
    )


class RaiseMemoryLimit(Remedy):
    """The process's own memory fraction: raise it, with how much."""

    code = "raise-memory-limit"
    title = "Raise the memory fraction"
    burden = Burden.CHANGE  # somebody chose the limit: what keeps to it comes first

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose a higher limit if the limit forbade the request and the device has room."""
        if not case.supports(Cause.MEMORY_LIMIT):
            return
        if case.backend == "mps" or case.kind == "kv-cache" or case.is_of_other_program:
            return
        if is_single(case):
            return
        is_main = case.cause is Cause.MEMORY_LIMIT
        r = case.failed_request
        is_room_known = r is not None and (r.free_bytes is None or r.is_covered_by_free)
        if not is_room_known and not is_main:
            return
        weight, why, fits = Weight.CURES, "", r is not None and r.is_of_limit
        if not is_main:
            # A limit that was never printed but would explain the failure has to be found first.
            weight = Weight.ASKS if case.cause is Cause.UNKNOWN else Weight.HELPS
            why = "The device had room for it; a limit of this process would explain the failure."
        needed, attempts = None, []
        if r is not None and r.reserved_bytes is not None:
            needed = r.reserved_bytes + r.requested_bytes + r.tolerance_bytes
            if r.free_bytes is not None and r.reserved_bytes:
                whole = r.reserved_bytes + r.free_bytes
                attempts = [Attempt(WhatIf(capacity_bytes=whole, edit="without the limit"))]
        proposal = self.proposal(
            weight=weight,
            why=why,
            cost="Less room for others on this device.",
            caveats=("Someone may have set the limit to share the device.",),
            predicted=Predicted(fits=True, method="arithmetic") if fits else None,
            attempts=attempts,
        )
        yield _with_fraction(case, proposal, needed)

    def judged(
        self, case: JudgedCase, bench: Bench, proposal: Proposal, outcomes: Sequence[Effect]
    ) -> Proposal | None:
        """Return the proposal with the fraction that all known requests need."""
        judged = super().judged(case, bench, proposal, outcomes)
        result = outcomes[0].result
        if judged is None or not result.fits:
            return judged
        coming = None if result.outlook is None else result.outlook.peak_reserved_bytes
        reserved = max(result.peak_reserved_bytes, coming or 0)
        needed = _with_fraction(case, judged, reserved)
        return needed.with_caveat(
            f"The prediction is without any limit, where the run reserves {format_size(reserved)}."
        )


@proposes("Allocate in smaller pieces")
def split_allocation(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose splitting if the size of one allocation was refused, however much is free."""
    if not is_single(case):
        return
    is_metal = case.backend == "mps"
    yield remedy.proposal(
        title="" if is_metal else "Allow allocations of 4 GiB or more, or split them",
        weight=Weight.CURES,
        change="use a smaller batch, image or sequence, or run the operation in chunks: Metal "
        "limits the size of one buffer"
        if is_metal
        # unified-runtime, source/adapters/level_zero/common.cpp reads the variable
        else "set UR_L0_ENABLE_RELAXED_ALLOCATION_LIMITS=1 in the environment, or split the work: "
        "use a smaller batch, image or sequence, or run the operation in chunks; newer drivers "
        "and versions of PyTorch allow such allocations by default on some GPUs",
        cost="None, or a little speed.",
    )


@proposes("Wait for side streams before the large allocation")
def wait_for_streams(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose waiting before the request for what other streams still use."""
    r = case.failed_request
    if r is None or case.cause is not Cause.PENDING_FREES:
        return
    waiting = max(r.pending_bytes, r.late_free_bytes)
    yield remedy.proposal(
        weight=Weight.CURES,
        change="call torch.cuda.synchronize() or stream.synchronize() before it, or catch the "
        "error and repeat the call once; use fewer record_stream calls; set "
        "limit_all_gathers=True for FSDP",
        why=f"{format_size(waiting)} was freed but waited for other streams.",
        cost="Synchronizing costs some overlap of copies and compute.",
        saves_bytes=waiting,
    )


@proposes("Share one pool among graphs, or drop graphs that are not needed")
def share_graph_pools(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose it for private pools whose free memory was needed elsewhere."""
    r = case.failed_request
    if r is None or not case.supports(Cause.PRIVATE_POOLS):
        return
    is_main = case.cause is Cause.PRIVATE_POOLS
    yield remedy.proposal(
        weight=Weight.CURES if is_main else Weight.MAY_HELP,
        change="pass pool=first_graph.pool() to every torch.cuda.graph(...) and capture the "
        "largest shape first, so that the others fit into its blocks; capture fewer shapes, and "
        "delete graphs and MemPools that are done; from 2.8 on, use "
        "torch.cuda.MemPool(use_on_oom=True)",
        why=f"{format_size(r.pools_free_bytes)} is free inside private pools, where ordinary "
        "requests cannot use them.",
        cost="Graphs that share a pool must run in the order of their capture.",
        caveats=("Memory of a live graph's pool stays until graph and pool are gone.",),
        saves_bytes=r.pools_free_bytes,
    )


@proposes("Call torch.cuda.empty_cache() before the failing line")
def empty_cache(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose the call if memory is needed outside PyTorch's cache; otherwise reject it."""
    if case.is_library_failure and not case.is_of_other_program and case.cause not in CLOSED:
        yield remedy.proposal(
            title="Call torch.cuda.empty_cache() before the library starts",
            weight=Weight.MAY_HELP,
            change="call torch.cuda.empty_cache() before the first call of the library or before "
            "the communicator is created",
            why="The library allocates outside PyTorch's cache, and nothing flushes the cache "
            "for it.",
            cost="The cache must be filled again; keep it out of the training loop.",
            attempts=_emptied(case),
        )
        return
    r = case.failed_request
    if not case.is_allocator_case or r is None:
        return
    if case.cause in (Cause.SIZE_BUG, Cause.UNKNOWN, Cause.PENDING_FREES):
        return
    rejected = remedy.rejection(
        "The allocator already tried that before raising the error; "
        "live tensors and stranded holes stay as they are.",
        Confidence.PROVEN,
    )
    yield replace(rejected, attempts=_emptied(case))


@proposes("Use less at once, and release Metal's caches")
def less_on_metal(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose it if the watermark is the limit: Metal's memory is that of the machine."""
    if case.backend != "mps" or not case.supports(Cause.MEMORY_LIMIT):
        return
    less = "use a smaller batch, input or model, in 16 bits; call torch.mps.empty_cache() after "
    less += "large steps; keep shapes fixed, so that the caches of graphs stay small"
    m = case.message
    is_short = m is not None and (m.requested_bytes or 0) < SMALL_SHARE * (m.limit_bytes or 0)
    yield remedy.proposal(
        title="Close other programs, and start this one without the limit" if is_short else "",
        weight=Weight.HELPS,
        confidence=Confidence.LIKELY,
        # The limit that was printed shows that it is not set there, whatever the text says.
        change="set PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 in the environment before the program "
        f"starts: macOS then swaps, with no further limit; if that is too slow, {less}"
        if is_short
        else f"{less}; close other programs; as a last resort set "
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0, which lifts the limit",
        cost="Less at a time.",
        caveats=("Without the limit the whole machine may run out of memory, swap or stop.",),
    )
