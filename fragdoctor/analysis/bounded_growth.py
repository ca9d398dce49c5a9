"""Growth that ends by itself, and so is no leak.

- What each parameter gets once (``trace.made_once``).
- What an evaluation gathers and lets go of when it ends.
- A KV cache that is kept as a list of parts, which ends with its request.
- The graph of a step that has not ended, and pools of CUDA graphs, one for each new shape.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor.analysis.result import KeptKind, KeptMemory, KeptPattern, PhaseAnalysis
from fragdoctor.model.phases import TrainingPhase
from fragdoctor.model.snapshot import I64
from fragdoctor.trace.lives import NEVER
from fragdoctor.trace.steps import MIN_STEPS, StepKind, Steps
from fragdoctor.trace.trace import Trace

MOST: Final = 0.5

MIXED_SHARE: Final = 0.1
"""Of each kind, results of forward and of backward passes, where a graph holds both."""

N_PARTS: Final = 8
"""Parts of a trace over which the joined parts of a cache must grow."""

SIDE_BY_SIDE: Final = 8
"""Requests that a server works on at a time, as a rule."""

MIN_LAYERS: Final = 4
"""Blocks that a request keeps of a model: keys and values of two layers."""

OUTPUTS: Final = (
    KeptPattern.RESULTS,
    KeptPattern.TENSORS,
    KeptPattern.SHAPES,
    KeptPattern.HOOK,
)
"""What an evaluation gathers: no graphs, no copies of a model."""

# ---- let go of with what it belongs to -----------------------------------------------------------


def is_gathered(trace: Trace, rows: I64, pattern: KeptPattern) -> bool:
    """Return whether survivors, rows of lives, are all of the last evaluation of a training run.

    A program lets go of them when the evaluation ends, or the next one begins: what an earlier one
    gathered is gone.
    """
    if pattern not in OUTPUTS or not len(rows):
        return False
    return is_of_last_evaluation(trace, trace.lives.start[rows].astype(np.int64))


def is_of_last_evaluation(trace: Trace, rows: I64) -> bool:
    """Return whether events are all of the last evaluation of a program that trains."""
    steps = Steps.of(trace)
    n_trained = np.cumsum(steps.kind == StepKind.TRAIN)
    evaluations = n_trained[steps.kind == StepKind.EVALUATION]
    made = steps.at(rows)
    if not len(evaluations) or not evaluations[-1] or made.min() < 0:
        return False
    is_evaluation = steps.kind[made] == StepKind.EVALUATION
    return bool((is_evaluation & (n_trained[made] == evaluations[-1])).all())


def is_in_pools(trace: Trace, rows: I64) -> bool:
    """Return whether most of it lies in private pools: a pool for each new shape is the matter."""
    pool = trace.lives.pool[rows]
    size = trace.lives.size_bytes[rows]
    is_private = np.any(np.asarray(trace.snapshot.pools, np.int64).reshape(-1, 2) != 0, axis=1)
    return bool(size[is_private[pool]].sum() > MOST * size.sum())


def is_cache_of_generation(trace: Trace, rows: I64, phases: PhaseAnalysis | None) -> bool:
    """Return whether a program that only runs forward puts parts aside and joins them each time.

    So grows a KV cache that is kept as a list: each step joins all parts, one more than before, so
    that the largest request of some stack rises from each part of the trace to the next.
    """
    if not len(rows) or _trains(phases):
        return False
    lives = trace.lives
    made = np.flatnonzero(lives.start >= 0)
    part_bytes = int(np.median(lives.size_bytes[rows]))
    made = made[(lives.size_bytes[made] >= MIN_STEPS * part_bytes) & (lives.free[made] != NEVER)]
    made = made[np.argsort(lives.stack[made], kind="stable")]
    firsts = np.flatnonzero(np.diff(lives.stack[made])) + 1
    for size in np.split(lives.size_bytes[made], firsts):
        if len(size) < 2 * N_PARTS:
            continue
        bounds = np.arange(N_PARTS) * len(size) // N_PARTS
        if np.all(np.diff(np.maximum.reduceat(size, bounds)) > 0):
            return True
    return False


def is_filling(kept: KeptMemory, phases: PhaseAnalysis | None) -> bool:
    """Return whether requests that are served side by side may only have begun.

    Each keeps its keys and values, several blocks of a model that never trains, until it has its
    answer: a few of them are a batch that fills.
    """
    blocks = sum(k.n_per_step for k in kept.kinds if k.kind is KeptKind.ACTIVATION)
    is_served = kept.pattern in OUTPUTS and blocks >= MIN_LAYERS and not _trains(phases)
    return is_served and kept.n_steps < SIDE_BY_SIDE


def _trains(phases: PhaseAnalysis | None) -> bool:
    return has_passes(
        phases, TrainingPhase.BACKWARD, TrainingPhase.OPTIMIZER, TrainingPhase.FORWARD_BACKWARD
    )


def is_unrolled(kept: KeptMemory, phases: PhaseAnalysis | None) -> bool:
    """Return whether it is the graph of a step that has not ended: gradients of gradients.

    Inner steps of meta-learning keep their results until the outer backward pass; no optimizer has
    run yet.
    """
    total = max(1, sum(k.n_bytes for k in kept.kinds))
    gradients = sum(k.n_bytes for k in kept.kinds if k.kind is KeptKind.GRADIENT)
    results = sum(k.n_bytes for k in kept.kinds if k.kind in (KeptKind.ACTIVATION, KeptKind.LOSS))
    is_mixed = min(gradients, results) >= MIXED_SHARE * total
    return is_mixed and not has_passes(phases, TrainingPhase.OPTIMIZER)


def has_passes(phases: PhaseAnalysis | None, *labels: int) -> bool:
    """Return whether a program shows passes of any of some kinds."""
    """Return whether a program shows passes of any of some kinds."""
    return phases is not None and bool(np.isin(phases.labels, labels).any())
