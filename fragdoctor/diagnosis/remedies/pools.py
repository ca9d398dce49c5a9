"""Remedies about streams, private pools and the cache as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fragdoctor.diagnosis.bench import Attempt, Bench
from fragdoctor.diagnosis.remedies.remedy import (
    CURES,
    HELPS,
    MAY_HELP,
    JudgedCase,
    Proposal,
    Remedy,
)
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.trace.edits import empty_cache_at
from fragdoctor.units import format_size


class WaitForStreams(Remedy):
    """Frees that wait for other streams: wait before the large allocation."""

    code: ClassVar[str] = "wait-for-streams"
    title: ClassVar[str] = "Wait for side streams before the large allocation"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose to end the waits earlier."""
        r = case.failed_request
        if r is None or case.cause is not Cause.PENDING_FREES:
            return
        waiting = max(r.pending_bytes, r.late_free_bytes)
        yield self.proposal(
            weight=CURES,
            confidence=Confidence.LIKELY,
            change="torch.cuda.synchronize() or stream.synchronize() before it; fewer "
            "record_stream calls; limit_all_gathers=True for FSDP",
            why=f"{format_size(waiting)} were freed but waited for other streams.",
            cost="Synchronising costs some overlap of copies and compute.",
            verify="active - allocated stays small.",
            saves_bytes=waiting,
        )


class RetryOnce(Remedy):
    """Frees that wait for other streams: the second attempt finds them done."""

    code: ClassVar[str] = "retry-once"
    title: ClassVar[str] = "Catch the error and repeat the allocation once"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose to try again."""
        if case.failed_request is None or case.cause is not Cause.PENDING_FREES:
            return
        yield self.proposal(
            weight=HELPS,
            confidence=Confidence.POSSIBLE,
            change="except torch.cuda.OutOfMemoryError: repeat the same call once",
            why="After the flush of the failed attempt the waits are over and the blocks are free.",
            cost="One failed attempt.",
            caveats=("Helps only if the waits were the reason.",),
            verify="The second attempt succeeds.",
        )


class ShareGraphPools(Remedy):
    """Private pools of CUDA graphs and MemPool."""

    code: ClassVar[str] = "share-graph-pools"
    title: ClassVar[str] = "Share one pool among graphs, or drop graphs that are not needed"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose to share or drop private pools whose free memory was needed elsewhere."""
        r = case.failed_request
        if r is None or not case.supports(Cause.PRIVATE_POOLS):
            return
        is_main = case.cause is Cause.PRIVATE_POOLS
        yield self.proposal(
            weight=CURES if is_main else MAY_HELP,
            confidence=Confidence.LIKELY if is_main else Confidence.POSSIBLE,
            change="pass pool=first_graph.pool() to every torch.cuda.graph(...), capture fewer "
            "shapes, delete graphs and MemPools that are done; "
            "torch.cuda.MemPool(use_on_oom=True) from 2.8 on",
            why=f"{format_size(r.pools_free_bytes)} are free inside private pools, where ordinary "
            "requests cannot use them.",
            cost="Graphs that share a pool must run in the order of their capture.",
            caveats=("Memory of a live graph's pool stays until graph and pool are gone.",),
            verify="'allocated in private pools' in the message, or the private segments of a "
            "snapshot, shrink.",
            saves_bytes=r.pools_free_bytes,
        )


class EmptyCache(Remedy):
    """``empty_cache()``: for others, hardly ever for the process that calls it."""

    code: ClassVar[str] = "empty-cache"
    title: ClassVar[str] = "Call torch.cuda.empty_cache() before the failing line"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it where memory is needed outside PyTorch's cache; reject it elsewhere."""
        if case.is_library_failure:
            yield self.proposal(
                title="Call torch.cuda.empty_cache() before the library starts",
                weight=HELPS,
                confidence=Confidence.POSSIBLE,
                change="torch.cuda.empty_cache() before the first call of the library or the "
                "creation of the communicator",
                why="The library allocates outside PyTorch's cache, and nothing flushes the cache "
                "for it.",
                cost="The cache must be filled again; keep it out of the training loop.",
                verify="torch.cuda.mem_get_info() shows the free memory before the call.",
            )
            return
        if not case.is_allocator_case or not case.is_recorded_failure:
            return
        if case.cause in (Cause.SIZE_BUG, Cause.UNKNOWN, Cause.PENDING_FREES):
            return
        yield self.rejection(
            "The allocator did that itself before it raised the error; "
            "live tensors and pinned holes stay as they are.",
            Confidence.PROVEN,
        )

    def attempts(self, case: JudgedCase, bench: Bench, proposal: Proposal | None) -> list[Attempt]:
        """Try it right before the request that failed."""
        del case, proposal
        failed = bench.recorded.oom_event
        return [] if failed is None else [Attempt.of_edit(empty_cache_at([failed]))]
