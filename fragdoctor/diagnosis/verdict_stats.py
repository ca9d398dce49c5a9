"""What the counters of ``torch.cuda.memory_stats()`` say."""

from __future__ import annotations

from msgspec.structs import replace

from fragdoctor.diagnosis.decision import Hypothesis
from fragdoctor.model.case import MemoryStats
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import WORTH_SAYING, Confidence, Evidence, in_bytes
from fragdoctor.rules.growth.growing_statistics import climb_text, grown_bytes, rise_text
from fragdoctor.rules.rule import Context
from fragdoctor.units import format_size, plural


def read_stats(context: Context) -> Hypothesis:
    """Return the hypothesis on the statistics of one device."""
    return replace(_read(context, context.stats[-1]), row="statistics")


def _read(context: Context, last: MemoryStats) -> Hypothesis:
    n_ooms, n_retries = last.n_ooms or 0, last.n_alloc_retries or 0
    grown = grown_bytes(context)
    if grown is not None:
        return Hypothesis(
            Cause.LEAK,
            rise_text(context, grown),
            Confidence.LIKELY,
            "A snapshot names the line.",
            also=(Cause.CAPACITY if n_ooms else Cause.HEALTHY,),
        )
    if n_ooms:
        return _after_ooms(last, n_ooms, n_retries)
    if n_retries:
        return near_the_limit(context, last.inactive_split_bytes)
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


def near_the_limit(context: Context, stranded_bytes: int | None) -> Hypothesis:
    """Return the hypothesis on a run in which only flushes of the cache made room."""
    n, source = context.retries or (0, "")
    about = "about " if source == "trace" and n > 1 else ""
    return Hypothesis(
        Cause.HEALTHY,
        f"No request failed, but {about}{plural(n, 'allocation')} had to flush the cache and try "
        f"again: the run is near its limit, with {format_size(stranded_bytes)} of free cache "
        f"stranded.{climb_text(context)}",
        settled_by="A snapshot shows what is stranded.",
        row="retries",
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
