"""What the counters of ``torch.cuda.memory_stats()`` say."""

from __future__ import annotations

from msgspec.structs import replace

from fragdoctor.diagnosis.decision import Hypothesis
from fragdoctor.model.case import MemoryStats
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import WORTH_SAYING, Confidence, Evidence, in_bytes
from fragdoctor.rules.growth.growing_statistics import count_rises, grown_bytes
from fragdoctor.rules.rule import Context
from fragdoctor.units import format_count, format_size, plural


def read_stats(context: Context) -> Hypothesis:
    """Return the hypothesis on the statistics of one device."""
    return replace(_read(context, context.stats[-1]), row="statistics")


def _read(context: Context, last: MemoryStats) -> Hypothesis:
    n_ooms, n_retries = last.n_ooms or 0, last.n_alloc_retries or 0
    grown = grown_bytes(context.stats) if context.is_series else None
    if grown is not None:
        text = (
            f"Allocated memory rises from record to record, by {format_size(grown)} over "
            f"{format_count(len(context.stats))} of them."
        )
        return Hypothesis(
            Cause.LEAK,
            text,
            Confidence.LIKELY,
            "A snapshot names the line.",
            also=(Cause.CAPACITY if n_ooms else Cause.HEALTHY,),
        )
    if n_ooms:
        return _after_ooms(last, n_ooms, n_retries)
    if n_retries:
        return _near_the_limit(context, last, n_retries)
    if last.n_ooms is None and last.n_alloc_retries is None:
        return Hypothesis(
            Cause.UNKNOWN,
            "The statistics hold neither the number of failures nor of retries.",
            settled_by="Give the whole output of torch.cuda.memory_stats().",
        )
    peak = last.get("allocated_bytes.all.peak")
    return Hypothesis(
        Cause.HEALTHY,
        f"No request failed and none needed a retry; allocated memory peaked at "
        f"{format_size(peak)}, {format_size(last.reserved_bytes)} is reserved.",
        Confidence.LIKELY,
    )


def _after_ooms(last: MemoryStats, n_ooms: int, n_retries: int) -> Hypothesis:
    split, reserved = last.inactive_split_bytes or 0, last.reserved_bytes or 0
    retries = plural(n_retries, "retry", "retries")
    counts = f"{plural(n_ooms, 'request')} failed after {retries}"
    cause, other = Cause.CAPACITY, Cause.FRAGMENTATION
    text = (
        f"{counts}, with {format_size(last.allocated_bytes)} of {format_size(reserved)} reserved "
        "allocated."
    )
    if reserved and split >= WORTH_SAYING * reserved:
        cause, other = other, cause
        text = (
            f"{counts}, and {format_size(split)} of {format_size(reserved)} reserved is free but "
            "stranded by live blocks."
        )
    decider = "The OOM message or a snapshot has the size of the failed request."
    return Hypothesis(cause, text, settled_by=decider, also=(other,))


def _near_the_limit(context: Context, last: MemoryStats, n_retries: int) -> Hypothesis:
    climbing = context.is_series and count_rises(context.stats, "num_alloc_retries")
    text = (
        f"No request failed, but {plural(n_retries, 'retry', 'retries')} had to flush the cache"
        f"{' and the counter climbs' if climbing else ''}: the run is near its limit, with "
        f"{format_size(last.inactive_split_bytes)} of free cache stranded."
    )
    return Hypothesis(
        Cause.HEALTHY,
        text,
        settled_by="A snapshot shows what is stranded.",
        also=(Cause.FRAGMENTATION, Cause.CAPACITY),
    )


def evidence_of_stats(context: Context) -> tuple[Evidence, ...]:
    """Return the counters as evidence."""
    last = context.stats[-1]
    figures = {
        "reserved": last.reserved_bytes,
        "allocated": last.allocated_bytes,
        "inactive split": last.inactive_split_bytes,
    }
    counts = {"retries": last.n_alloc_retries, "failures": last.n_ooms}
    counted = (Evidence(k, n, "count", last.origin) for k, n in counts.items() if n is not None)
    return (*in_bytes(figures, last.origin), *counted)
