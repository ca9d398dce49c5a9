"""Peak memory against batch size, from recordings at several batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from fragdoctor.frozen import frozen
from fragdoctor.model.finding import Location


class Scaling(StrEnum):
    """How memory follows the batch size.

    ``LINEAR`` includes a fixed part; ``FASTER`` bends up, ``SLOWER`` bends down, ``STEPS`` stays
    equal and then jumps, ``UNTESTED`` grows between the only two batch sizes there are.
    """

    FIXED = "fixed"
    LINEAR = "linear"
    FASTER = "faster"
    SLOWER = "slower"
    STEPS = "steps"
    IRREGULAR = "irregular"
    UNTESTED = "untested"


class BatchSource(StrEnum):
    """Where the batch sizes come from; ``TRACE`` gives multiples of the smallest only."""

    GIVEN = "given"
    NAME = "name"
    TRACE = "trace"


@frozen
class Curve:
    """Bytes as a function of the batch: fixed + per_sample x batch + bend x batch^2.

    Attributes:
        bend_bytes: 0 unless ``scaling`` is ``FASTER``.
        worst_residual_bytes: largest distance of a recorded point from the curve's straight line.
        r_squared: share of the variance that the straight line explains; None with two points.
        last_batch, last_bytes, last_slope_bytes: the largest recorded batch, what it took, and the
            slope from the batch before it.
    """

    fixed_bytes: float
    per_sample_bytes: float
    bend_bytes: float
    worst_residual_bytes: float
    r_squared: float | None
    scaling: Scaling
    last_batch: float
    last_bytes: float
    last_slope_bytes: float

    def at(self, batch: float) -> float:
        """Return the bytes at a batch size."""
        return self.fixed_bytes + self.per_sample_bytes * batch + self.bend_bytes * batch * batch

    def at_least(self, batch: float) -> float:
        """Return the bytes if beyond the recordings it bends no further."""
        if self.bend_bytes == 0.0 or batch <= self.last_batch:
            return self.at(batch)
        return self.last_bytes + self.last_slope_bytes * (batch - self.last_batch)


@frozen
class BatchPoint:
    """One recording.

    Attributes:
        batch: samples, or a multiple of the smallest recording's batch.
        fitted_bytes: peak allocated that the fit gives here; None where nothing was fitted.
        is_lower_bound: the run ran out of memory; its peaks are live memory and the request that
            failed, and it needs at least these.
        rest_bytes: allocated at the end of the trace; None after an OOM.
        peak_line: the user's line that ran when the peak was reached; None without stacks.
        n_steps: loop passes found in the trace, 0 if none were found.
    """

    source: str
    batch: float
    peak_allocated_bytes: int
    peak_active_bytes: int
    peak_reserved_bytes: int
    fitted_bytes: int | None
    is_lower_bound: bool
    rest_bytes: int | None
    peak_line: Location | None
    n_requests: int
    n_steps: int


@frozen
class PeakLine:
    """The highest allocated memory while one line of the program runs, against the batch.

    ``holds_from``, ``holds_to``: batch sizes between which this line holds the peak of the fit;
    None = open end.
    """

    line: Location | None
    curve: Curve
    holds_from: float | None
    holds_to: float | None


@frozen
class LineScaling:
    """What one line of the program holds at the peak, against the batch.

    ``n_bytes``: one per fitted recording, in order of batch.
    """

    line: Location | None
    curve: Curve
    n_bytes: Sequence[int]


@frozen
class ReplayCheck:
    """Requests fitted one by one, and replayed at other batch sizes.

    Attributes:
        method: ``fitted`` (each request's size against the batch) or ``scaled`` (requests that
            live within a step, all by the same factor).
        largest: that fits; None where even the smallest does not.
        largest_without_flush: that fits without the allocator emptying its cache and retrying.
        ceiling: largest whose active memory alone stays within the capacity: what the best
            allocator settings could reach.
        worst_error: largest relative error of the peak allocated at the recorded batch sizes.
        left_out_error: relative error with which the replay of the others foretells the peak of
            the largest recording; None with fewer than three batch sizes.
        unmatched_share: of the requested bytes that have no counterpart in other recordings.
        peak_bytes: peak allocated at ``largest``.
        slopes_beyond: bytes a sample from the largest recording to twice its batch, and from there
            to four times.
    """

    method: str
    largest: float | None
    largest_without_flush: float | None
    ceiling: float | None
    worst_error: float
    left_out_error: float | None
    unmatched_share: float
    peak_bytes: int | None
    slopes_beyond: tuple[float, float]


@frozen
class Prediction:
    """The largest batch on a GPU.

    Attributes:
        capacity_bytes: what PyTorch can have: the GPU less context and headroom.
        largest: the answer; None where even a batch of 1 (or any smaller) does not fit, or where
            memory does not grow with the batch (``is_unbounded``).
        low, high: the interval. By replay: without the allocator ever emptying its cache, and if
            the allocator wasted nothing. By the fit: with the overhead of the allocator at its
            worst, and without any.
        method: ``replay`` or ``fit``.
        confidence: ``high``, ``medium`` or ``low``; ``reasons`` say why.
        is_upper_bound: the fit goes through runs that ended in an OOM: ``largest`` is at most that.
        is_extrapolated: beyond twice the largest recorded batch.
        bytes_at_largest: peak allocated there.
        overhead: reserved over allocated, as the recordings have it (median).
    """

    gpu: str
    total_bytes: int
    context_bytes: int
    headroom_bytes: int
    capacity_bytes: int
    largest: float | None
    low: float | None
    high: float | None
    method: str
    confidence: str
    reasons: Sequence[str]
    is_upper_bound: bool
    is_extrapolated: bool
    is_unbounded: bool
    bytes_at_largest: int | None
    overhead: float


@frozen
class BatchFit:
    """Everything that several recordings say about the batch size.

    Attributes:
        batch_source: where the batch sizes come from.
        points: by batch.
        allocated, active, reserved: of the peaks, straight through all fitted points.
        moments: lines that hold the peak at some batch size, in order of batch; more than one
            means that the peak is the highest of several lines.
        lines: at the peak of the line that holds it at large batches, most bytes first; empty
            where that cannot be compared. ``line_batches`` are the batches of their columns.
        why: sentences that say why it is not linear; empty where it is.
        left_out_error: relative error with which the fit without the largest recording predicts
            it; None with fewer than three batch sizes.
        rest_bytes: median of what is still allocated at the end of the traces.
        warnings: what makes the comparison of the recordings doubtful.
    """

    batch_source: BatchSource
    points: Sequence[BatchPoint]
    allocated: Curve
    active: Curve
    reserved: Curve
    moments: Sequence[PeakLine]
    lines: Sequence[LineScaling]
    line_batches: Sequence[float]
    why: Sequence[str]
    left_out_error: float | None
    rest_bytes: int | None
    replay: ReplayCheck | None
    prediction: Prediction | None
    warnings: Sequence[str]
