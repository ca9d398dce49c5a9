"""What a proposed change of the code means for the recorded requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from fragdoctor.analysis.attribution import frames_of, user_frames
from fragdoctor.analysis.result import Growth
from fragdoctor.diagnosis.remedies.plan import Plan, Proposal
from fragdoctor.diagnosis.remedies.workload import workload_of
from fragdoctor.model.snapshot import BlockState, Snapshot
from fragdoctor.rules.growth.significance import is_significant
from fragdoctor.trace.edits import (
    Edit,
    batch_scaled,
    blocks_freed,
    empty_cache_at,
    largest_step_first,
    leak_removed,
    sizes_padded,
)
from fragdoctor.units import MIB

BUCKETS: Final = (2 * MIB, 8 * MIB, 32 * MIB)
MIN_SHARE: Final = 0.01  # of the batch; less is no batch at all


def edits_for(plan: Plan, proposal: Proposal, failing_row: int | None) -> Sequence[Edit]:
    """Return the edits that stand for a proposal; the best of them speaks for it.

    Empty where no edit of the request list says what the proposal does.
    """
    make = _EDITS.get(proposal.recommendation.code)
    return make(plan, proposal, failing_row) if make is not None else ()


def _without_pins(_: Plan, proposal: Proposal, failing_row: int | None) -> Sequence[Edit]:
    return (blocks_freed(proposal.addresses, failing_row),) if proposal.addresses else ()


def _without_leak(plan: Plan, _: Proposal, __: int | None) -> Sequence[Edit]:
    addresses = leaked_blocks(plan)
    return (leak_removed(addresses),) if addresses else ()


def _smaller_batch(plan: Plan, _: Proposal, __: int | None) -> Sequence[Edit]:
    share = workload_of(plan).keep_share
    return (batch_scaled(int(100 * share) / 100),) if share and share >= MIN_SHARE else ()


def _padded(_: Plan, __: Proposal, ___: int | None) -> Sequence[Edit]:
    return tuple(sizes_padded(bucket) for bucket in BUCKETS)


def _largest_first(_: Plan, __: Proposal, ___: int | None) -> Sequence[Edit]:
    return (largest_step_first(),)


def _empty_cache(_: Plan, __: Proposal, failing_row: int | None) -> Sequence[Edit]:
    return (empty_cache_at([failing_row]),) if failing_row is not None else ()


_EDITS: Final[dict[str, Callable[[Plan, Proposal, int | None], Sequence[Edit]]]] = {
    "move-pinning-blocks": _without_pins,
    "free-leak": _without_leak,
    "no-grad": _without_leak,
    "smaller-batch": _smaller_batch,
    "bucket-shapes": _padded,
    "largest-first": _largest_first,
    "empty-cache": _empty_cache,
}


def leaked_blocks(plan: Plan) -> tuple[int, ...]:
    """Return the addresses of the live blocks that belong to lines which grow step by step."""
    analysis, snapshot = plan.context.analysis, plan.context.snapshot
    if analysis is None or snapshot is None:
        return ()
    growing = [g for g in analysis.growth if is_significant(g, analysis)]
    return live_blocks_of(snapshot, analysis.device, growing)


def live_blocks_of(snapshot: Snapshot, device: int, growing: Sequence[Growth]) -> tuple[int, ...]:
    """Return the addresses of live blocks whose user line is one of the growing ones."""
    if not growing:
        return ()
    blocks = snapshot.blocks
    lines = frames_of(blocks.stack, user_frames(snapshot))
    is_here = snapshot.segments.device[blocks.segment] == device
    is_live = (blocks.state == BlockState.ALLOCATED) & is_here
    grows = np.isin(lines, [g.frame for g in growing])
    return tuple(int(a) for a in blocks.address[is_live & grows])
