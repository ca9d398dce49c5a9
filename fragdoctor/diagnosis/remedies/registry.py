"""All remedies, one line each, and the order in which their proposals are given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from fragdoctor.diagnosis.remedies.capacity import (
    GradientCheckpointing,
    LessModelMemory,
    OptimizerWithoutForeach,
    SmallerBatch,
    SmallerOptimizerState,
)
from fragdoctor.diagnosis.remedies.evidence import FixShape, LocateDriverCall, RecordSnapshot
from fragdoctor.diagnosis.remedies.growth import (
    FewerParallelTrials,
    FindLeak,
    FreeBetweenTrials,
    FreeLeak,
    NoGrad,
    RestartTrials,
)
from fragdoctor.diagnosis.remedies.layout import BucketShapes, LargestFirst, MovePinningBlocks
from fragdoctor.diagnosis.remedies.pools import (
    EmptyCache,
    RetryOnce,
    ShareGraphPools,
    WaitForStreams,
)
from fragdoctor.diagnosis.remedies.remedy import JudgedCase, Proposal, Remedy
from fragdoctor.diagnosis.remedies.settings import (
    DefaultSettings,
    ExpandableSegments,
    GarbageCollection,
    MaxSplitSize,
    RaiseMemoryLimit,
    RoundupDivisions,
)
from fragdoctor.diagnosis.remedies.surroundings import (
    CapOtherLibraries,
    FewerLayersOnGpu,
    FewerProcesses,
    FitKvCache,
    FreeOtherProcess,
    JaxPreallocation,
    LessHostMemory,
    LibraryHeadroom,
    RaiseMpsWatermark,
    RaiseSharedMemory,
    SmallerKernelBlocks,
    TensorflowMemoryGrowth,
)
from fragdoctor.model.diagnosis import Recommendation
from fragdoctor.model.finding import Confidence

REMEDIES: Final[tuple[Remedy, ...]] = (
    # Settings; the defaults last, since they are tried only where others are in force.
    ExpandableSegments(),
    MaxSplitSize(),
    RoundupDivisions(),
    GarbageCollection(),
    DefaultSettings(),
    RaiseMemoryLimit(),
    # Less memory.
    SmallerBatch(),
    GradientCheckpointing(),
    OptimizerWithoutForeach(),
    SmallerOptimizerState(),
    LessModelMemory(),
    # Growth.
    FreeLeak(),
    NoGrad(),
    FindLeak(),
    FreeBetweenTrials(),
    FewerParallelTrials(),
    RestartTrials(),
    # Layout of the cache.
    MovePinningBlocks(),
    BucketShapes(),
    LargestFirst(),
    # Streams, pools, the cache as a whole.
    WaitForStreams(),
    RetryOnce(),
    ShareGraphPools(),
    EmptyCache(),
    # Surroundings.
    FreeOtherProcess(),
    FewerProcesses(),
    CapOtherLibraries(),
    LibraryHeadroom(),
    LessHostMemory(),
    RaiseSharedMemory(),
    FitKvCache(),
    JaxPreallocation(),
    TensorflowMemoryGrowth(),
    FewerLayersOnGpu(),
    RaiseMpsWatermark(),
    SmallerKernelBlocks(),
    # Better evidence.
    FixShape(),
    LocateDriverCall(),
    RecordSnapshot(),
)

CONFIDENCE_ORDER: Final = {Confidence.PROVEN: 0, Confidence.LIKELY: 1, Confidence.POSSIBLE: 2}


def proposals(case: JudgedCase) -> list[Proposal]:
    """Return everything that the remedies propose or reject, in no order."""
    return [proposal for remedy in REMEDIES for proposal in remedy.propose(case)]


def rank(
    all_proposals: Iterable[Proposal],
) -> tuple[tuple[Recommendation, ...], tuple[Recommendation, ...]]:
    """Return the recommendations by rank from 1, and the rejected ones with rank 0.

    What a replay shows to fit comes first, then what removes the cause, then confidence, then the
    bytes saved. A replay that says "does not fit" turns a proposal into a rejection.
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


def _order(proposal: Proposal) -> tuple[int, int, int, int, int, int, int, str]:
    r = proposal.recommendation
    p = r.predicted
    is_shown_to_fit = p.method == "replay" and p.fits is True
    return (
        0 if is_shown_to_fit else 1,
        int(is_shown_to_fit and proposal.remedy.computes_less),
        -(p.margin_bytes or 0) if is_shown_to_fit else 0,
        (p.driver_calls or 0) if is_shown_to_fit else 0,
        -proposal.weight,
        CONFIDENCE_ORDER[r.confidence],
        -(r.saves_bytes or 0),
        r.code,
    )
