"""What part of live memory scales with the batch, as far as the inputs show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from fragdoctor.diagnosis.remedies.remedy import JudgedCase
from fragdoctor.model.snapshot import Action
from fragdoctor.rules.capacity.optimizer_state import fails_in_optimizer

LOW_PERCENTILE: Final = 5
"""Live memory between steps: weights, gradients kept, optimizer state. The lowest states of a run
are those before the model was built."""

BUILD_FREES_SHARE: Final = 0.02
"""Building a model frees next to nothing; a single forward pass frees more than this."""

MIN_SWING_SHARE: Final = 0.05
"""Live memory that moves by less than this has no steps to speak of."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The activations at the failure, and the share of the batch that would fit.

    Both are None where no trace separates persistent memory from what comes and goes.
    """

    activation_bytes: int | None = None
    keep_share: float | None = None


def fails_in_optimizer_step(case: JudgedCase) -> bool:
    """Return whether the request failed inside an optimizer's step, after the backward pass."""
    analysis = case.context.analysis
    return analysis is not None and fails_in_optimizer(case.context, analysis)


def only_builds(case: JudgedCase) -> bool:
    """Return whether nothing was ever freed before the failure: the model itself is being built.

    Small blocks do not count: making a weight frees a scalar or two.
    """
    analysis, snapshot = case.context.analysis, case.context.snapshot
    if analysis is None or snapshot is None or not analysis.capture.has_trace:
        return False
    if analysis.capture.is_late_start or analysis.capture.missing_actions:
        return False
    rows = snapshot.events.device_slice(analysis.device)
    frees = snapshot.events.action[rows] == Action.FREE_REQUESTED
    freed = int(snapshot.events.size_bytes[rows][frees].sum())
    return freed <= BUILD_FREES_SHARE * analysis.active_bytes


def workload_of(case: JudgedCase) -> Workload:
    """Return the split of live memory at the failure."""
    r, analysis = case.failed_request, case.context.analysis
    if r is None or r.live_bytes is None or analysis is None or analysis.timeline is None:
        return Workload()
    persistent = int(np.percentile(analysis.timeline.active_bytes, LOW_PERCENTILE))
    activations = r.live_bytes - persistent
    if activations < MIN_SWING_SHARE * r.live_bytes or _steps(case) < 2:
        return Workload()
    # The failing request belongs to the step as well.
    moving = activations + r.requested_bytes
    return Workload(activations, 1 - r.missing_bytes / moving)


def _steps(case: JudgedCase) -> int:
    """Return how often live memory fell to its low level and rose again."""
    analysis = case.context.analysis
    if analysis is None or analysis.timeline is None:
        return 0
    active = analysis.timeline.active_bytes
    low, high = np.percentile(active, [LOW_PERCENTILE, 95])
    above = active > (low + high) / 2
    return int(np.count_nonzero(above[1:] & ~above[:-1]))
