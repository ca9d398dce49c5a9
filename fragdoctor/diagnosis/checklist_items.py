"""The checklist of PyTorch's documents in their order, then our own items, which stand here.

Every item says which input answered it. One that no input answers is skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fragdoctor.analysis.result import CaptureQuality
from fragdoctor.diagnosis.checklist_memory import (
    ItemMaker,
    check_capacity,
    check_fragmentation_ratio,
    check_gap,
    check_largest_free_block,
    check_retries,
)
from fragdoctor.diagnosis.decision import OUTSIDE_SHARE
from fragdoctor.model.diagnosis import Cause, ChecklistItem, Verdict
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.story import Direction
from fragdoctor.rules.failed_request import CONTEXT_ALLOWANCE_BYTES, FailedRequest
from fragdoctor.rules.growth.accumulating_trials import STEPS, growth_sentence
from fragdoctor.rules.growth.growing_line import maker_text
from fragdoctor.rules.growth.growing_statistics import MIN_RECORDS, climbs, rise
from fragdoctor.rules.rule import Context
from fragdoctor.story.trends import accumulation, memory_over_trials
from fragdoctor.units import format_share, format_size, plural


def check_outside_pytorch(context: Context, verdict: Verdict) -> ChecklistItem:
    """Ask how much of the device neither is free nor belongs to PyTorch's cache."""
    item = ItemMaker("outside_pytorch", "Memory outside PyTorch")
    r = context.failed_request
    if r is None or r.source == "user":
        return item.skip(
            "Only a message or an out-of-memory event records what the driver had free."
        )
    outside = r.outside_bytes
    if outside is None:
        # Where a failed request proves what PyTorch could have, a size given is of another card.
        option = " or --capacity" if context.proven_capacity_bytes is None else ""
        return item.skip(f"No input says how large the device is: give the message{option}.")
    total = r.total_bytes or 0
    value = f"{format_size(outside)} of {format_size(total)} ({format_share(outside, total)})"
    detail = _outside_detail(r)
    if verdict.cause in (Cause.OTHER_PROCESS, Cause.NON_PYTORCH_MEMORY):
        return item.fail(value, detail, r.source)
    if outside > CONTEXT_ALLOWANCE_BYTES or outside >= OUTSIDE_SHARE * total:
        return item.warn(value, detail, r.source)
    return item.passed(value, detail, r.source)


def _outside_detail(r: FailedRequest) -> str:
    parts = []
    if r.non_pytorch_bytes is not None:
        parts.append(f"{format_size(r.non_pytorch_bytes)} in this process (context, libraries)")
    if r.other_processes:
        listed = sum(p.n_bytes for p in r.other_processes)
        n = len(r.other_processes)
        parts.append(f"{format_size(listed)} in {n} other {'process' if n == 1 else 'processes'}")
    text = "; ".join(parts) if parts else "Context, libraries and other processes together"
    if r.own_pid is not None:
        text += f"; process {r.own_pid} is this one, seen from a container"
    return f"{text}."


def check_growth(context: Context, verdict: Verdict) -> ChecklistItem:  # noqa: PLR0911 - a row each
    """Ask whether live memory grows from step to step."""
    del verdict
    item = ItemMaker("growth", "Memory that grows step by step")
    a = context.analysis
    if a is not None and a.capture.has_trace:
        kept = a.kept
        if kept is None:
            return item.passed("none", "No line's memory grows steadily.", "trace")
        return item.fail(
            f"{format_size(kept.slope_bytes)} a step",
            f"What {maker_text(context, kept)} makes holds {format_size(kept.survivor_bytes)} in "
            f"{plural(kept.n_survivors, 'block')} after {plural(kept.n_steps, 'step')}.",
            "trace",
        )
    if context.is_series and len(context.stats) >= MIN_RECORDS:
        key = "allocated_bytes.all.current"
        grown = rise(context.stats, key)
        if climbs(context.stats, key):
            return item.fail(
                format_size(grown), "Allocated memory climbs over the series.", "memory_stats"
            )
        return item.passed("none", "Allocated memory does not climb.", "memory_stats")
    by_log = _growth_by_log(item, context)
    if by_log is not None:
        return by_log
    if a is not None:
        return item.skip("The snapshot has no trace of events.")
    return item.skip(
        "One message or one set of statistics shows a state, not a history: a trace or a series "
        "does."
    )


def _growth_by_log(item: ItemMaker, context: Context) -> ChecklistItem | None:
    """Return what the trials, failures and prints of a log say; None where they say nothing."""
    grown = accumulation(context.story)
    if grown is not None:
        value = f"{format_size(grown.slope_bytes)} a {STEPS[grown.over]}"
        return item.fail(value, growth_sentence(grown), "log")
    trend = memory_over_trials(context.story) if context.story is not None else None
    if trend is None or trend.direction is not Direction.LEVEL:
        return None
    n = plural(len(trend.points), STEPS[trend.over])
    return item.passed("none", f"{trend.figure.capitalize()} memory is level over {n}.", "log")


def check_size_diversity(context: Context, verdict: Verdict) -> ChecklistItem:
    """Ask how varied the sizes of large requests are, and whether they drift."""
    del verdict
    item = ItemMaker("size_diversity", "Variety of request sizes")
    if context.analysis is None or context.analysis.sizes is None:
        return item.skip("Only a trace records the sizes of requests.")
    sizes = context.analysis.sizes
    value = (
        f"{plural(sizes.n_distinct_large, 'size')} in "
        f"{plural(sizes.n_large_allocs, 'large request')}"
    )
    if sizes.drifting:
        return item.warn(
            value, "The same lines ask for ever new sizes, which fit old blocks badly.", "trace"
        )
    return item.passed(value, "Sizes repeat, so that blocks can be reused.", "trace")


def check_capture_quality(context: Context, verdict: Verdict) -> ChecklistItem:
    """Ask how much of the story the file holds."""
    del verdict
    item = ItemMaker("capture_quality", "Completeness of the recording")
    if context.analysis is None:
        return item.skip("No snapshot was given.")
    quality = context.analysis.capture
    notes = " ".join(quality.notes)
    if quality.tiling_errors or not quality.is_consistent:
        return item.fail("inconsistent", notes or "The trace contradicts the state.", "snapshot")
    value = _shortcoming(quality)
    if value:
        return item.warn(value, notes or "Part of the story is missing.", "snapshot")
    value = plural(context.analysis.n_events, "event")
    return item.passed(value, notes or "The history is complete.", "snapshot")


def _shortcoming(quality: CaptureQuality) -> str:
    for applies, name in (
        (not quality.has_trace, "no history"),
        (quality.is_truncated, "truncated history"),
        (quality.is_late_start, "late start"),
        (quality.has_stacks == 0, "no stacks"),
    ):
        if applies:
            return name
    return ""


def check_settings(context: Context, verdict: Verdict) -> ChecklistItem:
    """Ask under which allocator settings it ran, and whether they do what they seem to."""
    del verdict
    item = ItemMaker("settings", "Allocator settings")
    settings = context.settings
    if settings is None:
        if context.failed_request is not None and context.failed_request.expandable:
            return item.passed(
                "expandable_segments:True", "The message says so.", context.failed_request.source
            )
        return item.skip("No input records the settings: a snapshot of 2.2 or later does.")
    value = settings.conf or "defaults"
    problems = _problems(context, settings)
    if problems:
        return item.warn(value, " ".join(problems), "snapshot")
    return item.passed(value, "Nothing contradictory.", "snapshot")


def _problems(context: Context, settings: AllocatorSettings) -> list[str]:
    problems = []
    if settings.garbage_collection_threshold and not context.has_memory_fraction:
        problems.append("garbage_collection_threshold has no effect without a memory fraction.")
    if settings.max_split_bytes is not None and settings.expandable_segments:
        problems.append("max_split_size_mb and expandable_segments should not be combined.")
    return problems


ITEMS: Final[tuple[Callable[[Context, Verdict], ChecklistItem], ...]] = (
    check_capacity,
    check_gap,
    check_retries,
    check_largest_free_block,
    check_fragmentation_ratio,
    check_outside_pytorch,
    check_growth,
    check_size_diversity,
    check_capture_quality,
    check_settings,
)


def build_checklist(context: Context, verdict: Verdict) -> tuple[ChecklistItem, ...]:
    """Return the items for the device that the verdict is about."""
    return tuple(item(context, verdict) for item in ITEMS)
