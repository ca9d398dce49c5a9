"""All remedies, one line each, and the order in which their proposals are given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from fragdoctor.diagnosis.remedies.capacity import LessModelMemory, SmallerBatch
from fragdoctor.diagnosis.remedies.evidence import (
    FixShape,
    FusedAttention,
    LocateDriverCall,
    RecordSnapshot,
)
from fragdoctor.diagnosis.remedies.growth import (
    FewerParallelTrials,
    FindLeak,
    FreeBetweenTrials,
    FreeLeak,
    NoGrad,
    RestartTrials,
)
from fragdoctor.diagnosis.remedies.layout import (
    BucketShapes,
    LargestFirst,
    MovePinningBlocks,
    PreallocateBuffers,
)
from fragdoctor.diagnosis.remedies.limits import RaiseMemoryLimit, RaiseMpsWatermark
from fragdoctor.diagnosis.remedies.pools import (
    EmptyCache,
    RetryOnce,
    ShareGraphPools,
    WaitForStreams,
)
from fragdoctor.diagnosis.remedies.remedy import JudgedCase, Proposal, Remedy, prospect
from fragdoctor.diagnosis.remedies.settings import (
    DefaultSettings,
    ExpandableSegments,
    GarbageCollection,
    MaxSplitSize,
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
    RaiseSharedMemory,
    SmallerKernelBlocks,
    TensorflowMemoryGrowth,
)
from fragdoctor.diagnosis.remedies.training import (
    ChunkedLoss,
    CombinedSavings,
    FusedOptimizer,
    GradientCheckpointing,
    OffloadOptimizer,
    OptimizerWithoutForeach,
    SetGradientsToNone,
    SmallerOptimizerState,
    StepInBackward,
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
    SetGradientsToNone(),
    FusedOptimizer(),
    ChunkedLoss(),
    GradientCheckpointing(),
    SmallerOptimizerState(),
    OffloadOptimizer(),
    StepInBackward(),
    OptimizerWithoutForeach(),
    SmallerBatch(),
    CombinedSavings(),
    LessModelMemory(),
    # Growth.
    FreeLeak(),
    NoGrad(),
    FindLeak(),
    FreeBetweenTrials(),
    FewerParallelTrials(),
    RestartTrials(),
    # Layout of the cache.
    PreallocateBuffers(),
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
    FusedAttention(),
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

    What a replay shows to fit comes first, and of that what cures the whole run; then what removes
    the cause, then confidence, then the bytes saved.
    """
    kept: list[Proposal] = []
    rejected: list[Recommendation] = []
    for proposal in all_proposals:
        if proposal.is_rejected:
            rejected.append(replace(proposal.recommendation, rank=0))
        else:
            kept.append(proposal)
    kept.sort(key=_order)
    ranked = tuple(replace(p.recommendation, rank=i) for i, p in enumerate(kept, start=1))
    return ranked, tuple(sorted(rejected, key=lambda r: r.code))


def _order(proposal: Proposal) -> tuple[int, int, int, int, int, int, int, int, int, str]:
    r = proposal.recommendation
    p = r.predicted
    is_shown_to_fit = p.method == "replay" and p.fits is True
    return (
        0 if is_shown_to_fit else 1,
        prospect(p.outlook) if is_shown_to_fit else 0,
        int(proposal.remedy.burden) if is_shown_to_fit else 0,
        -(p.margin_bytes or 0) if is_shown_to_fit else 0,
        -(r.saves_bytes or 0) if is_shown_to_fit else 0,
        (p.driver_calls or 0) if is_shown_to_fit else 0,
        -proposal.weight,
        CONFIDENCE_ORDER[r.confidence],
        -(r.saves_bytes or 0),
        r.code,
    )
