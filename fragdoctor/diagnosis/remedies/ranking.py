"""All remedies, ranked: what removes the cause first, then confidence, then bytes saved.

The place for replay: ``rank`` orders by ``predicted`` before anything else, so that whoever fills
it in from a simulation changes no remedy (see ``with_replay``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final

from fragdoctor.diagnosis.remedies import (
    better_evidence,
    checkpointing,
    empty_cache,
    expandable_segments,
    foreign,
    free_leak,
    garbage_collection,
    graph_pools,
    libraries,
    max_split_size,
    model_memory,
    optimizer_state,
    pending_streams,
    pinning_blocks,
    processes,
    raise_limit,
    restart_trials,
    roundup_divisions,
    shapes,
    size_bug,
    smaller_batch,
    sweeps,
)
from fragdoctor.diagnosis.remedies.plan import Plan, Proposal
from fragdoctor.model.diagnosis import Predicted, Recommendation
from fragdoctor.model.finding import Confidence

REMEDIES: Final[tuple[Callable[[Plan], Iterator[Proposal]], ...]] = tuple(
    module.remedies
    for module in (
        better_evidence,
        checkpointing,
        empty_cache,
        expandable_segments,
        foreign,
        free_leak,
        garbage_collection,
        graph_pools,
        libraries,
        max_split_size,
        model_memory,
        optimizer_state,
        pending_streams,
        pinning_blocks,
        processes,
        raise_limit,
        restart_trials,
        roundup_divisions,
        shapes,
        size_bug,
        smaller_batch,
        sweeps,
    )
)

CONFIDENCE_ORDER: Final = {Confidence.PROVEN: 0, Confidence.LIKELY: 1, Confidence.POSSIBLE: 2}


def proposals(plan: Plan) -> list[Proposal]:
    """Return everything that the remedies propose or reject, in no order."""
    return [proposal for remedy in REMEDIES for proposal in remedy(plan)]


def rank(
    all_proposals: Iterable[Proposal],
) -> tuple[tuple[Recommendation, ...], tuple[Recommendation, ...]]:
    """Return the recommendations by rank from 1, and the rejected ones with rank 0.

    A prediction from replay that says "does not fit" turns a proposal into a rejection.
    """
    kept: list[Proposal] = []
    rejected: list[Recommendation] = []
    for proposal in all_proposals:
        predicted = proposal.recommendation.predicted
        if proposal.is_rejected or (predicted.method == "replay" and predicted.fits is False):
            rejected.append(replace(proposal.recommendation, rank=0))
        else:
            kept.append(proposal)
    kept.sort(key=_order)
    ranked = tuple(replace(p.recommendation, rank=i) for i, p in enumerate(kept, start=1))
    return ranked, tuple(sorted(rejected, key=lambda r: r.code))


def with_replay(proposal: Proposal, predicted: Predicted) -> Proposal:
    """Return a proposal with the outcome of its replay.

    A setting that was rejected by reasoning alone comes back if the replay shows that it fits.
    """
    is_rejected = proposal.is_rejected and not predicted.fits
    return replace(
        proposal,
        recommendation=replace(proposal.recommendation, predicted=predicted),
        is_rejected=is_rejected,
    )


COMPUTE_LESS: Final = frozenset({"smaller-batch", "gradient-checkpointing"})
"""What makes each step compute less or longer comes after what does not, however much it saves."""


def _order(proposal: Proposal) -> tuple[int, int, int, int, int, int, int, str]:
    r = proposal.recommendation
    p = r.predicted
    is_shown_to_fit = p.method == "replay" and p.fits is True
    return (
        0 if is_shown_to_fit else 1,
        int(is_shown_to_fit and r.code in COMPUTE_LESS),
        -(p.margin_bytes or 0) if is_shown_to_fit else 0,
        (p.driver_calls or 0) if is_shown_to_fit else 0,
        -proposal.weight,
        CONFIDENCE_ORDER[r.confidence],
        -(r.saves_bytes or 0),
        r.code,
    )
