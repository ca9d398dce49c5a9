"""FD2xx: more memory needed than there is, and peaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.future.steps import Steps
from fragdoctor.model.arrays import distinct, percentile
from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.model.phases import Category, TrainingPhase
from fragdoctor.rules.failed_request import SIZE_BUG_BYTES
from fragdoctor.rules.request_sources import last_request
from fragdoctor.rules.rule import Context, Found, Skip, needed, rule
from fragdoctor.trace.trace import Trace
from fragdoctor.units import format_size, plural


@rule("FD201", Severity.ERROR)
def device_full(context: Context) -> Iterator[Found]:
    """Live memory and the request exceed what PyTorch could have.

    What it finds. A refused request that would not fit even if the cache were packed perfectly.

    Why it costs memory. It is not a matter of the allocator: the tensors themselves are too large.

    Evidence used. Live bytes, the request, reserved and driver-free memory at the failure.

    What to do. Less live memory: smaller batch, checkpointing, lower precision, sharding,
    offloading, freeing what is not needed. No allocator setting helps.

    What it can get wrong. Figures of a message are rounded; within that rounding the finding says
    likely. What made live memory so large is the question of other rules.

    Example. 2.91 GiB live and a request of 48 MiB on 2.93 GiB.

    References. FAQ: My model reports "cuda runtime error(2): out of memory".
    """
    r = context.need_request()
    missing = -needed(r.margin_bytes, "the message does not print live and free memory")
    if missing <= 0:
        return
    yield Found(
        f"{format_size(r.live_bytes)} live and {format_size(r.requested_bytes)} asked exceed "
        f"{format_size(r.available_bytes)} by {format_size(missing)}.",
        severity=Severity.WARNING if r.is_caught else Severity.ERROR,
        confidence=Confidence.PROVEN if missing > r.tolerance_bytes else Confidence.LIKELY,
        n_bytes=missing,
        evidence=(
            Evidence("live", r.live_bytes or 0, "bytes", r.source),
            Evidence("available", r.available_bytes or 0, "bytes", r.source),
        ),
    )


@rule("FD202", Severity.ERROR)
def request_beyond_device(context: Context) -> Iterator[Found]:
    """A single request is larger than all that PyTorch could have.

    What it finds. A refused request above the size of the device, or above what PyTorch could have
    on it, and requests so large that their size must be a mistake.

    Why it costs memory. No state of the cache could serve it.

    Evidence used. The request, the size of the device, reserved and driver-free memory.

    What to do. Look at that one tensor: its shape, its dtype, an attention matrix over the whole
    sequence, an image that was not resized, a negative size.

    What it can get wrong. Without the size of the device it compares with what this process could
    have; another process may hold the rest.

    Example. An attention matrix of 112.89 GiB on a device of 79 GiB.

    References. FAQ: My model reports "cuda runtime error(2): out of memory".
    """
    r = context.need_request()
    bound = r.total_bytes if r.total_bytes is not None else r.available_bytes
    is_bug = r.requested_bytes >= SIZE_BUG_BYTES
    if bound is None and not is_bug:
        raise Skip("no input says how large the device is")
    if not is_bug and bound is not None and r.requested_bytes <= bound:
        return
    against = "any device" if bound is None else format_size(bound)
    yield Found(
        f"One request of {format_size(r.requested_bytes)} exceeds {against}.",
        severity=Severity.WARNING if r.is_caught else Severity.ERROR,
        confidence=Confidence.PROVEN,
        n_bytes=r.requested_bytes,
        evidence=(Evidence("requested", r.requested_bytes, "bytes", r.source),),
        key="size-bug" if is_bug else "",
    )


@rule("FD203", Severity.WARNING)
def transient_peak(context: Context) -> Iterator[Found]:
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
        f"Live memory rises to {format_size(spike.peak_bytes)}, against "
        f"{format_size(spike.usual_bytes)} at the peaks before.",
        severity=Severity.WARNING if analysis.ooms else Severity.INFO,
        confidence=Confidence.LIKELY,
        n_bytes=spike.peak_bytes - spike.usual_bytes,
        evidence=(
            Evidence("peak", spike.peak_bytes, "bytes", "trace"),
            Evidence("usual peak", spike.usual_bytes, "bytes", "trace"),
        ),
    )


SPIKE_FACTOR: Final = 1.5
"""A peak this many times as high as any before is a different kind of step, not a larger batch."""


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
    if peak < SPIKE_FACTOR * usual or _n_peaks(earlier, low, usual) < MIN_EARLIER_PEAKS:
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
    return bool((after >= SPIKE_FACTOR * before).any())


def _n_peaks(active: npt.NDArray[np.int64], low: float, usual: int) -> int:
    """Return how often memory rose above the midpoint of the low level and the usual peak."""
    above = active > (low + usual) / 2
    return int(np.count_nonzero(above[1:] & ~above[:-1])) + int(above[0])


@rule("FD204", Severity.WARNING)
def optimizer_state(context: Context) -> Iterator[Found]:
    """A request failed inside the optimizer's step.

    What it finds. A failing request whose stack runs through an optimizer, and the state that the
    optimizer holds.

    Why it costs memory. Adam keeps two tensors per parameter, made in the first step: a model that
    trained through its first backward pass fails right after it.

    Evidence used. Stacks of the failing request and of live blocks.

    What to do. An optimizer with less state (8-bit Adam, Adafactor, SGD), foreach=False for a lower
    peak, sharded or offloaded state.

    What it can get wrong. An optimizer of your own in a file without "optim" in its path is not
    recognized. Without stacks the rule cannot judge.

    Example. exp_avg_sq of the last layer finds no room after 1.5 GiB of state.

    References. torch.optim.Adam: foreach; FAQ: out of memory.
    """
    analysis = context.need_trace()
    if not analysis.ooms:
        return
    if not context.stack(analysis.ooms[-1].stack):
        raise Skip("the failing request has no stack")
    if not fails_in_optimizer(analysis):
        return
    held = state_in_step(analysis)
    yield Found(
        "The request failed inside the optimizer's step"
        f"{f', which already holds {format_size(held)} of state' if held else ''}.",
        confidence=Confidence.LIKELY,
        n_bytes=held,
        evidence=(Evidence("optimizer state", held, "bytes", "snapshot"),),
        locations=context.user_stack(analysis.ooms[-1].stack),
    )


def fails_in_optimizer(analysis: DeviceAnalysis) -> bool:
    """Return whether the failing request itself was made inside an optimizer's step."""
    return any(analysis.trace.stacks.roles.in_step[oom.stack] for oom in analysis.ooms[-1:])


def state_in_step(analysis: DeviceAnalysis) -> int:
    """Return the bytes of state that a step holds at its peak, or 0 if no steps are seen."""
    phases = () if analysis.phases is None else analysis.phases.report.phases
    held = (s for p in phases if p.phase == TrainingPhase.OPTIMIZER for s in p.held)
    return next((s.n_bytes for s in held if s.category == Category.OPTIMIZER_STATE), 0)


@rule("FD205", Severity.WARNING)
def rescued_requests(context: Context) -> Iterator[Found]:
    """Requests succeeded only after the cache was flushed.

    What it finds. Allocation retries beyond the failures: the driver refused new memory, the
    allocator gave back its cache and asked again.

    Why it costs memory. It costs time (a device synchronization, cudaFree and cudaMalloc calls) and
    shows that the run is near its limit.

    Evidence used. num_alloc_retries and num_ooms of the statistics, or releases of segments right
    before new ones in the trace.

    What to do. Lower the peak a little, or make the cache fit better: steady shapes,
    expandable_segments:True.

    What it can get wrong. Retries inferred from a trace are an estimate: an empty_cache() right
    before an allocation on a full device looks the same.

    Example. 17 retries in 12,000 events of a cache that grows by concatenation.

    References. torch.cuda.memory_stats: num_alloc_retries.
    """
    n, source = needed(context.retries, "a message counts no retries; statistics or a trace do")
    rescued = n - (context.n_ooms or 0)
    if rescued <= 0:
        return
    about = "About " if source == "trace" else ""
    yield Found(
        f"{about}{plural(rescued, 'request was', 'requests were')} served only after the whole "
        "cache was flushed.",
        confidence=Confidence.LIKELY if source == "trace" else Confidence.PROVEN,
        evidence=(Evidence("retries", n, "count", source),),
    )


@rule("FD206", Severity.INFO)
def caught_failures(context: Context) -> Iterator[Found]:
    """The program caught out-of-memory errors and went on.

    What it finds. Out-of-memory events after which the same trace goes on allocating.

    Why it costs memory. It need not: searching for the largest batch works so. But each failure
    flushes the cache, and a handler that keeps the exception keeps the frames' tensors alive.

    Evidence used. The order of events in the trace.

    What to do. Leave the except block before trying again, so that the traceback is released; then
    call gc.collect() if tensors are still held.

    What it can get wrong. Another thread that goes on while the failing one ends looks the same.

    Example. Three batch sizes are tried, 4000, 2000 and 1000 MiB; the fourth fits.

    References. FAQ: My out of memory exception handler can't allocate memory.
    """
    analysis = context.need_trace()
    last = last_request(analysis.trace)
    caught = [event for event in analysis.ooms if event.row < last]
    if not caught:
        return
    n = len(caught)
    largest = max(e.rounded_bytes for e in caught)
    yield Found(
        f"{plural(n, 'failed request was', 'failed requests were')} survived, the largest "
        f"of {format_size(largest)}.",
        confidence=Confidence.PROVEN,
        n_bytes=largest,
        evidence=(Evidence("caught failures", n, "count", "trace"),),
        locations=context.user_stack(caught[-1].stack),
    )
