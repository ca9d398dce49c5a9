"""FD203: one step needs far more memory than the steps before it."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fragdoctor.analysis.step_scale import LARGER
from fragdoctor.future.steps import Steps
from fragdoctor.model.arrays import distinct, percentile
from fragdoctor.model.finding import Confidence, Severity, in_bytes
from fragdoctor.rules.rule import Context, Findings, Found, rule
from fragdoctor.trace.trace import Trace
from fragdoctor.units import format_size


@rule("FD203", Severity.WARNING)
def transient_peak(context: Context) -> Findings:
    """One step needs far more memory than the steps before it.

    What it finds. A last ascent of live memory that is half as high again as any peak before it.

    Why it costs memory. The device must be large enough for the highest moment, not for the usual
    one: an evaluation with another batch size, a long sample, logits of a large vocabulary.

    Evidence used. Live memory after each event of the trace.

    What to do. Bound the largest sample, evaluate in smaller batches, compute the loss in chunks.

    What it can get wrong. A program that starts small and grows in stages looks the same.

    Example. Steps peak at 3 GiB, and an evaluation with eight times the batch at 7 GiB.

    References. Understanding CUDA Memory Usage.
    """
    analysis = context.need_trace()
    spike = analysis.trace.once(find_transient)
    if spike is None or analysis.kept is not None:
        return
    yield Found(
        f"{spike.text}.",
        severity=Severity.WARNING if analysis.ooms else Severity.INFO,
        confidence=Confidence.LIKELY,
        n_bytes=spike.peak_bytes - spike.usual_bytes,
        evidence=in_bytes({"peak": spike.peak_bytes, "usual peak": spike.usual_bytes}, "trace"),
    )


MIN_EARLIER_PEAKS: Final = 3
"""With fewer comparable peaks before the spike, there is no usual level to compare with."""


LOW_PERCENTILE: Final = 5
"""Percentile of the states for the low level of a run; the lowest states are its first moments."""


VALLEY_SHARE: Final = 0.1
"""States above the low level by up to this share of the range count as valleys between steps."""


class Transient(Struct, frozen=True):
    """A peak of live memory and the usual level of the peaks before it, in bytes."""

    peak_bytes: int
    usual_bytes: int

    @property
    def text(self) -> str:
        """Both levels, as a sentence."""
        peak, usual = format_size(self.peak_bytes), format_size(self.usual_bytes)
        return f"Live memory rises to {peak}, against {usual} at the peaks before"


def find_transient(trace: Trace) -> Transient | None:
    """Return the last ascent of live memory if it rises far above the peaks before it.

    The ascent begins at the last valley: the last state near the low level of the run (its 5th
    percentile and a tenth of the whole range). If steps are seen, at least one of them must have
    ended before, since the stages of a first step are not peaks to compare with.
    """
    began = Steps.of(trace).rows
    if len(began) and not _may_spike(trace, began[1:]):
        return None
    active = trace.totals.active_bytes
    low, top = percentile(active, LOW_PERCENTILE), float(active.max())
    valleys = np.flatnonzero(active <= low + VALLEY_SHARE * (top - low))
    valley = int(valleys[-1]) if len(valleys) else 0
    earlier = active[:valley]
    if not len(earlier) or (len(began) and not (began[1:] <= valley).any()):
        return None
    usual, peak = int(earlier.max()), int(active[valley:].max())
    if peak < LARGER * usual or _n_peaks(earlier, low, usual) < MIN_EARLIER_PEAKS:
        return None
    return Transient(peak, usual)


def _may_spike(trace: Trace, ends: npt.NDArray[np.int64]) -> bool:
    """Return whether live memory rises far above what it was until any of the steps ended.

    This needs no column of all states, which a long run without a spike then never makes.
    """
    starts = distinct(np.append(0, ends))
    highest = trace.totals.envelope("active_bytes", starts)[1]
    before = np.maximum.accumulate(highest)[:-1]
    after = np.maximum.accumulate(highest[::-1])[::-1][1:]
    return bool((after >= LARGER * before).any())


def _n_peaks(active: npt.NDArray[np.int64], low: float, usual: int) -> int:
    """Return how often memory rose above the midpoint of the low level and the usual peak."""
    above = active > (low + usual) / 2
    return int(np.count_nonzero(above[1:] & ~above[:-1])) + int(above[0])
