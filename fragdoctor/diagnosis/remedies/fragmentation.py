"""Remedies for how the program uses the cache: long-lived blocks, shapes and their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from fragdoctor.analysis.growing_buffers import buffers_of
from fragdoctor.analysis.result import Strander
from fragdoctor.diagnosis.bench import Attempt, Bench, Effect
from fragdoctor.diagnosis.remedies.remedy import (
    Burden,
    JudgedCase,
    Proposal,
    Remedy,
    Weight,
    proposes,
)
from fragdoctor.future.edits import blocks_freed, combined, sizes_padded
from fragdoctor.future.training_edits import buffers_preallocated
from fragdoctor.model.diagnosis import Cause, Predicted
from fragdoctor.model.finding import WORTH_SAYING, Confidence, Location, line_text
from fragdoctor.rules.fragmentation.drifting_sizes import variety_text
from fragdoctor.trace.stacks import TORCH, classify_file
from fragdoctor.units import MIB, format_size, plural

OTHER_CAUSES: Final = (
    Cause.UNKNOWN,
    Cause.LEAK,
    Cause.SIZE_BUG,
    Cause.OTHER_PROCESS,
    Cause.NON_PYTORCH_MEMORY,
)
"""Causes that have nothing to do with the layout of the cache."""

BUCKETS: Final = (2 * MIB, 8 * MIB, 32 * MIB)
"""Sizes to pad tensors to; coarser sizes cost more than they save."""

MAX_GROUPS: Final = 3
"""Nobody changes more places than this at once."""


class PreallocateBuffers(Remedy):
    """Buffers that grow by copies, such as a KV cache: allocate them once."""

    code = "preallocate-buffers"
    title = "Allocate growing buffers once, at their full length"
    is_modelled = True

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it if such buffers are a noticeable part of the memory."""
        if case.bench is None or not case.is_allocator_case or case.cause in OTHER_CAUSES:
            return
        buffers = buffers_of(case.bench.reproduction.trace)
        if not buffers:
            return
        n = sum(b.n_buffers for b in buffers)
        total = sum(b.total_bytes for b in buffers)
        step = sum(b.n_buffers * b.step_bytes for b in buffers)
        stacks = [case.context.python_stack(b.stack) for b in buffers]
        line = stacks[0][0] if stacks[0] else None
        yield self.proposal(
            title=f"Allocate the buffers of {line_text(line)} once, at their full length",
            weight=Weight.CURES if case.cause is Cause.FRAGMENTATION else Weight.HELPS,
            confidence=Confidence.LIKELY,
            change="call torch.empty(..., max_length, ...) before the loop, and copy each step's "
            "part into a slice of it, in place of torch.cat; in Transformers, set "
            "cache_implementation='static' (StaticCache)",
            why=f"{plural(n, 'buffer')} grow by copies, {format_size(total)} in all: each time a "
            "larger one is made before the old one is freed, and the holes that the old ones leave "
            "are too small for the next.",
            cost="The full length is held from the start.",
            caveats=(f"Replayed at the recorded length; each step adds {format_size(step)}.",),
            locations=stacks[0],
            attempts=[
                Attempt.of_edit(
                    combined([buffers_preallocated(b.row, b.n_buffers) for b in buffers])
                )
            ],
        )

    def judged(
        self, case: JudgedCase, bench: Bench, proposal: Proposal, outcomes: Sequence[Effect]
    ) -> Proposal | None:
        """Return the proposal with the replay's result, unless the replay holds buffers twice."""
        judged = super().judged(case, bench, proposal, outcomes)
        analysis = case.context.analysis
        is_late = analysis is not None and analysis.capture.is_late_start
        if judged is not None and judged.is_rejected and is_late:
            return proposal.with_caveat(
                "The recording begins when the buffers already exist: record from the start to "
                "have the change replayed."
            )
        return judged


@proposes("Keep long-lived blocks out of the way", burden=Burden.CHANGE)
def move_stranding_blocks(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose keeping long-lived blocks out of the way, group by group."""
    analysis, r = case.context.analysis, case.failed_request
    if analysis is None or r is None or case.cause is not Cause.FRAGMENTATION:
        return
    stranded = analysis.free_space.stranded_free_bytes
    # Growing buffers will be somewhere else in the next step.
    growing = () if case.bench is None else buffers_of(analysis.trace)
    moving = {case.context.user_line(b.stack) for b in growing}
    large: dict[Location, Strander] = {}
    for p in analysis.stranders:
        line = case.context.user_line(p.stack)
        is_large = p.stranded_bytes >= WORTH_SAYING * stranded > 0
        if is_large and line not in moving and line and classify_file(line.filename) != TORCH:
            large.setdefault(line, p)  # the largest of a line, however PyTorch made its blocks
    for line, strander in list(large.items())[:MAX_GROUPS]:
        solves = strander.stranded_bytes + strander.block_bytes >= r.uncovered_bytes
        # The blocks are freed before the failed request.
        addresses, bench = strander.addresses, case.bench
        edit = None if bench is None else blocks_freed(addresses, bench.recorded.oom_event)
        yield remedy.proposal(
            title=f"Keep the blocks of {line_text(line)} out of the way",
            weight=Weight.HELPS if solves else Weight.MAY_HELP,
            confidence=Confidence.LIKELY if solves else Confidence.POSSIBLE,
            change="allocate them before everything that is short-lived, or clone() what must "
            "stay once the step has freed its memory; del them before the large request if "
            "they are no longer needed",
            why=f"{plural(strander.n_blocks, 'live block')} of "
            f"{format_size(strander.block_bytes)} "
            f"{'keeps' if strander.n_blocks == 1 else 'keep'} "
            f"{format_size(strander.stranded_bytes)} of free memory in "
            f"{plural(strander.n_segments, 'segment')} from being returned.",
            locations=case.context.python_stack(strander.stack),
            predicted=Predicted(fits=True, method="arithmetic") if solves else None,
            cost="A change to the code; clone() needs both copies for a moment.",
            saves_bytes=strander.stranded_bytes,
            attempts=() if edit is None else [Attempt.of_edit(edit)],
        )


@proposes("Pad or bucket variable shapes", is_modelled=True)
def bucket_shapes(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose buckets for fragmentation, unless a trace shows that shapes are steady."""
    if not case.is_allocator_case or case.cause is not Cause.FRAGMENTATION:
        return
    if case.bench is not None and buffers_of(case.bench.reproduction.trace):
        return  # sizes that only grow are not varied inputs
    sizes = None if case.context.analysis is None else case.context.analysis.sizes
    if sizes is not None and not sizes.drifting:
        return
    weight, sure = Weight.MAY_HELP, Confidence.POSSIBLE
    why = "Shapes that vary from step to step are the usual source of fragmentation."
    if sizes is not None:
        weight, sure = Weight.HELPS, Confidence.LIKELY
        why = f"{variety_text(sizes)}: a freed block rarely fits the next one."
    yield remedy.proposal(
        weight=weight,
        confidence=sure,
        change="pad sequence lengths to multiples of 64 or 128, or batch samples of similar "
        "length; or run one step of the largest shape first, so that the cache has blocks that "
        "fit everything that follows",
        why=why,
        cost="Padding wastes compute; buckets change the order of samples.",
        attempts=[Attempt.of_edit(sizes_padded(bucket)) for bucket in BUCKETS],
    )
