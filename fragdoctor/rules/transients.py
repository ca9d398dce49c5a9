"""A step that needs far more than the steps before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.rules.context import Context

SPIKE_FACTOR: Final = 1.5
"""A peak half as high again as any before it is a step of another kind, not a larger batch."""

MIN_EARLIER_PEAKS: Final = 3
"""With fewer comparable peaks before it there is no usual level to compare with."""

LOW_PERCENTILE: Final = 5
"""The low level of a run; the very lowest states are those of its first moments."""

VALLEY_SHARE: Final = 0.1
"""States within a tenth of the range above the low level count as valleys between steps."""


@dataclass(frozen=True, slots=True)
class Transient:
    """A peak of live memory and the usual level of the peaks before it, in bytes."""

    peak_bytes: int
    usual_bytes: int
    row: int


def find_transient(context: Context, analysis: DeviceAnalysis) -> Transient | None:
    """Return the last ascent of live memory where it stands far above the peaks before it.

    The ascent begins at the last valley: the last state near the low level of the run (its 5th
    percentile and a tenth of the whole range).
    """
    del context
    if analysis.timeline is None:
        return None
    active = analysis.timeline.active_bytes
    low, top = float(np.percentile(active, LOW_PERCENTILE)), float(active.max())
    valleys = np.flatnonzero(active <= low + VALLEY_SHARE * (top - low))
    valley = int(valleys[-1]) if len(valleys) else 0
    earlier = active[:valley]
    if not len(earlier):
        return None
    usual, peak = int(earlier.max()), int(active[valley:].max())
    if peak < SPIKE_FACTOR * usual or _n_peaks(earlier, low, usual) < MIN_EARLIER_PEAKS:
        return None
    return Transient(peak, usual, valley + int(active[valley:].argmax()))


def _n_peaks(active: npt.NDArray[np.int64], low: float, usual: int) -> int:
    """Return how often memory rose above the middle between the low level and the usual peak."""
    above = active > (low + usual) / 2
    return int(np.count_nonzero(above[1:] & ~above[:-1])) + int(above[0])
