"""Remedies about what the program asks of the cache: long-lived blocks, shapes and their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Final

from fragdoctor.analysis.result import SizeDiversity
from fragdoctor.diagnosis.remedies.remedy import (
    HELPS,
    MAY_HELP,
    Attempt,
    JudgedCase,
    Proposal,
    Remedy,
)
from fragdoctor.model.diagnosis import Cause, Predicted
from fragdoctor.model.finding import Confidence, Evidence
from fragdoctor.model.simulation import ReplayResult
from fragdoctor.rules.context import line_text
from fragdoctor.trace.edits import blocks_freed, largest_step_first, sizes_padded
from fragdoctor.units import MIB, format_size, plural

BUCKETS: Final = (2 * MIB, 8 * MIB, 32 * MIB)
"""Sizes tried for padded tensors: coarser ones cost more than they save."""

MIN_SHARE: Final = 0.1
"""A group that pins less than a tenth of the pinned memory is not worth a change of the code."""

MAX_GROUPS: Final = 3
"""Nobody changes more places than these at once."""


class MovePinningBlocks(Remedy):
    """Moving or freeing the few live blocks that pin free memory."""

    code: ClassVar[str] = "move-pinning-blocks"
    title: ClassVar[str] = "Keep long-lived blocks out of the way"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose to keep long-lived blocks out of the way, group by group."""
        analysis, r = case.context.analysis, case.failed_request
        if analysis is None or r is None or case.cause is not Cause.FRAGMENTATION:
            return
        pinned = analysis.free_space.pinned_free_bytes
        large = [p for p in analysis.pins if p.pinned_bytes >= MIN_SHARE * pinned > 0]
        for pin in large[:MAX_GROUPS]:
            line = case.context.user_line(pin.stack)
            solves = pin.pinned_bytes + pin.block_bytes >= r.uncovered_bytes
            proposal = self.proposal(
                title=f"Keep the blocks of {line_text(line)} out of the way",
                weight=HELPS + 5 if solves else MAY_HELP,
                confidence=Confidence.LIKELY if solves else Confidence.POSSIBLE,
                change="free them before the large request, allocate them before everything that "
                "is short-lived, or clone() what must stay after the step has freed its memory",
                why=f"{plural(pin.n_blocks, 'live block')} of {format_size(pin.block_bytes)} "
                f"{'keeps' if pin.n_blocks == 1 else 'keep'} {format_size(pin.pinned_bytes)} of "
                f"free memory in {plural(pin.n_segments, 'segment')} from being returned.",
                locations=case.context.python_stack(pin.stack),
                predicted=Predicted(fits=True, method="arithmetic") if solves else None,
                cost="A change of the code; clone() needs both copies for a moment.",
                verify="These blocks no longer head the list of pins.",
                evidence=(Evidence("pinned", pin.pinned_bytes, "bytes", "snapshot"),),
                saves_bytes=pin.pinned_bytes,
            )
            yield replace(proposal, addresses=tuple(pin.addresses))

    def attempts(
        self, case: JudgedCase, proposal: Proposal, recorded: ReplayResult
    ) -> Sequence[Attempt]:
        """Try the run with these blocks freed before the request that failed."""
        del case
        if not proposal.addresses:
            return ()
        return (Attempt.of_edit(blocks_freed(proposal.addresses, recorded.oom_event)),)


class BucketShapes(Remedy):
    """Shapes that vary: pad them to buckets."""

    code: ClassVar[str] = "bucket-shapes"
    title: ClassVar[str] = "Pad or bucket variable shapes"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose steady shapes for fragmentation, unless a trace shows that they are steady."""
        if not _shapes_may_vary(case):
            return
        sizes = _sizes(case)
        yield self.proposal(
            weight=HELPS if sizes is not None else MAY_HELP + 3,
            confidence=Confidence.LIKELY if sizes is not None else Confidence.POSSIBLE,
            change="pad sequence lengths to multiples of 64 or 128, or batch samples of similar "
            "length",
            why=f"{sizes.n_large_allocs:,} large requests have {sizes.n_distinct_large:,} "
            "different sizes: a freed block rarely fits the next one."
            if sizes is not None
            else "Shapes that vary from step to step are the usual source of fragmentation; the "
            "message does not show whether they do.",
            cost="Padding computes on nothing; buckets change the order of samples.",
            verify="A snapshot shows fewer distinct sizes of large requests.",
        )

    def attempts(
        self, case: JudgedCase, proposal: Proposal, recorded: ReplayResult
    ) -> Sequence[Attempt]:
        """Try large requests padded to buckets."""
        del case, proposal, recorded
        return tuple(Attempt.of_edit(sizes_padded(bucket)) for bucket in BUCKETS)


class LargestFirst(Remedy):
    """Shapes that vary: begin with the largest."""

    code: ClassVar[str] = "largest-first"
    title: ClassVar[str] = "Run the largest batch first"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it for fragmentation, unless a trace shows that shapes are steady."""
        if not _shapes_may_vary(case):
            return
        yield self.proposal(
            weight=MAY_HELP + 4 if _sizes(case) is not None else MAY_HELP - 5,
            confidence=Confidence.POSSIBLE,
            change="sort the first epoch by length, longest first, or run one dummy step of the "
            "largest shape at start",
            why="The cache then holds blocks that fit everything that follows, and a shortage "
            "shows at once rather than after hours.",
            cost="One step at start.",
            verify="Reserved memory stays level after the first step.",
        )

    def attempts(
        self, case: JudgedCase, proposal: Proposal, recorded: ReplayResult
    ) -> Sequence[Attempt]:
        """Try the run with its largest step first."""
        del case, proposal, recorded
        return (Attempt.of_edit(largest_step_first()),)


def _sizes(case: JudgedCase) -> SizeDiversity | None:
    return None if case.context.analysis is None else case.context.analysis.sizes


def _shapes_may_vary(case: JudgedCase) -> bool:
    if not case.is_allocator_case or case.cause is not Cause.FRAGMENTATION:
        return False
    sizes = _sizes(case)
    return sizes is None or sizes.drifting
