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
from fragdoctor.diagnosis.remedies.pools import (
    EmptyCache,
    RaiseMemoryLimit,
    RaiseMpsWatermark,
    RetryOnce,
    ShareGraphPools,
    WaitForStreams,
)
from fragdoctor.diagnosis.remedies.remedy import (
    CURES,
    JudgedCase,
    Proposal,
    Prospect,
    Remedy,
    prospect,
    steps_won,
)
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
from fragdoctor.model.diagnosis import Cause, Recommendation
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

OUTSIDE: Final = (Cause.OTHER_PROCESS, Cause.MEMORY_LIMIT)
"""Causes whose removal cures for certain: memory that others hold, a limit of the user's own."""

KNOWN_CURE: Final = 1
"""Place of what removes them: after what is known to hold, before what nobody knows."""

CONFIDENCE_ORDER: Final = {Confidence.PROVEN: 0, Confidence.LIKELY: 1, Confidence.POSSIBLE: 2}


def proposals(case: JudgedCase) -> list[Proposal]:
    """Return everything that the remedies propose or reject, in no order."""
    return [proposal for remedy in REMEDIES for proposal in remedy.propose(case)]


def rank(
    all_proposals: Iterable[Proposal], cause: Cause
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
    kept.sort(key=lambda p: _order(p, cause))
    ranked = tuple(replace(p.recommendation, rank=i) for i, p in enumerate(kept, start=1))
    return ranked, tuple(sorted(rejected, key=lambda r: r.code))


def _order(proposal: Proposal, cause: Cause) -> tuple[int | str, ...]:
    r = proposal.recommendation
    p = r.predicted
    is_setting = bool(r.setting)
    is_shown_to_fit = p.method == "replay" and p.fits is True
    # A setting does not end a leak, whatever it gains.
    is_cure = is_shown_to_fit and not (cause is Cause.LEAK and is_setting)
    tier = _tier(prospect(p.outlook), is_setting=is_setting, cause=cause)
    if cause in OUTSIDE and not is_setting and proposal.weight >= CURES and p.fits is not False:
        is_cure, tier = True, min(tier, KNOWN_CURE)
    how_far: tuple[int, ...] = (0,) * 6
    if is_cure:
        how_far = (
            tier,
            int(proposal.remedy.burden),
            -steps_won(p.outlook),
            -p.room_bytes,
            -(r.saves_bytes or 0),
            p.driver_calls or 0,
        )
    return (
        0 if is_cure else 1,
        *how_far,
        -proposal.weight,
        -steps_won(p.outlook),
        CONFIDENCE_ORDER[r.confidence],
        -(r.saves_bytes or 0),
        r.code,
    )


def _tier(found: Prospect, *, is_setting: bool, cause: Cause) -> int:
    """Return the place of what fits, by how the run goes on.

    Holes between blocks are the allocator's own matter: a setting that serves the request is tried
    sooner than the program is changed, even where it is open how the run goes on.
    """
    if found > Prospect.OPEN:
        return 10 + int(found)
    is_code = cause is Cause.FRAGMENTATION and not is_setting
    return int(found) + (int(Prospect.UNLIKELY) if is_code else 0)
