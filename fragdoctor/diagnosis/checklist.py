"""The checklist from PyTorch's documentation, in its order, then our own items.

Every item says which input answered it. An item that no input answers is skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from msgspec import Struct

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.diagnosis.decision import NORMAL_OUTSIDE_SHARE, SLIM_MARGIN_SHARE
from fragdoctor.diagnosis.figures import peak_of
from fragdoctor.model.diagnosis import Cause, ChecklistItem, Status, Verdict
from fragdoctor.model.gpus import FULL_SHARE
from fragdoctor.model.story import Direction
from fragdoctor.rules.failed_request import CONTEXT_ALLOWANCE_BYTES, FULL_SLACK_SHARE, FailedRequest
from fragdoctor.rules.fragmentation.drifting_sizes import variety_text
from fragdoctor.rules.growth.growing_line import growth_text, slope_text
from fragdoctor.rules.growth.growing_statistics import (
    MIN_RECORDS,
    climb_text,
    grown_bytes,
    rise_text,
)
from fragdoctor.rules.rule import Context
from fragdoctor.story.trends import STEPS, accumulation, growth_sentence, memory_over_trials
from fragdoctor.units import format_count, format_share, format_size, plural

RULE_OF_THUMB_SHARE: Final = 0.30
"""The popular 30% rule: reserved but unallocated memory over reserved. PyTorch does not document
it, and cache that is returned on demand is harmless, so the item never fails by itself."""


class DeviceTotals(Struct, frozen=True):
    """Reserved, allocated and free cached bytes, and the input they come from."""

    reserved_bytes: int
    allocated_bytes: int
    returned_bytes: int | None
    source: str

    @property
    def gap_bytes(self) -> int:
        """Reserved - allocated."""
        return max(0, self.reserved_bytes - self.allocated_bytes)

    @property
    def stuck_bytes(self) -> int:
        """The part of the gap that a flush does not return, or the whole gap if unknown."""
        return max(0, self.gap_bytes - (self.returned_bytes or 0))


def totals_of(context: Context) -> DeviceTotals | None:
    """Return the totals at the failure, or at the end of the input if nothing failed."""
    r = context.failed_request
    if r is not None and r.live_bytes is not None and r.reserved_bytes is not None:
        # The flush that precedes a failure leaves nothing that could be returned.
        return DeviceTotals(r.reserved_bytes, r.live_bytes - r.pending_bytes, 0, r.source)
    at, source = context.totals or (None, "")
    if at is None or at.reserved_bytes is None or at.allocated_bytes is None:
        return None
    if isinstance(at, DeviceAnalysis):
        returned: int | None = at.free_space.releasable_bytes
    elif (returned := at.inactive_split_bytes) is not None:
        returned = max(0, at.reserved_bytes - at.allocated_bytes - returned)
    return DeviceTotals(at.reserved_bytes, at.allocated_bytes, returned, source)


class Answer(NamedTuple):
    """The answer of the inputs to one question, and which input gave it."""

    status: Status
    value: str
    detail: str
    source: str = ""


passed = partial(Answer, Status.PASS)
warn = partial(Answer, Status.WARN)
fail = partial(Answer, Status.FAIL)


def skip(reason: str, value: str = "") -> Answer:
    """Return the answer that no input answers the question, with the reason."""
    return Answer(Status.SKIP, value, reason)


def check_capacity(context: Context, _verdict: Verdict) -> Answer:
    """Ask first: do live memory and the request fit at all?"""
    r = context.failed_request
    if r is not None and r.needed_bytes is not None:
        return _capacity_of_request(r)
    if r is not None and r.total_bytes is not None and r.requested_bytes > r.total_bytes:
        value = f"{format_size(r.requested_bytes)} requested of {format_size(r.total_bytes)}"
        return fail(value, "The request alone is larger than the device.", r.source)
    peak, source = peak_of(context, "active")
    is_peak, a = peak is not None, context.analysis
    if a is not None and (peak is None or a.active_bytes > peak):
        peak, source = a.active_bytes, "snapshot"
    if peak is None:
        return skip("No input says how much was live.")
    total = context.total_bytes
    if total is None:
        return skip(
            "No input says how large the device is: give --capacity.",
            f"Live memory {'peaked at' if is_peak else 'is'} {format_size(peak)}",
        )
    value = f"peak {format_size(peak)} of {format_size(total)} ({format_share(peak, total)})"
    if peak >= FULL_SHARE * total:
        return warn(value, "Little is left for context, libraries and larger inputs.", source)
    return passed(value, "Live memory stays well below the device.", source)


def _capacity_of_request(r: FailedRequest) -> Answer:
    needed, available = r.needed_bytes, r.available_bytes
    if available is None:
        if r.total_bytes is None or needed is None:
            return skip("The message does not print what was free.")
        value = f"{format_size(needed)} needed of {format_size(r.total_bytes)}"
        if needed > r.total_bytes + r.tolerance_bytes:
            return fail(value, "Live memory and request exceed the device.", r.source)
        return warn(
            value, "No free figure is printed, so it is unknown what others hold.", r.source
        )
    value = f"{format_size(needed)} needed, {format_size(available)} available"
    asked = "segment" if r.segment_rest_bytes else "request"
    against = f"reserved {format_size(r.reserved_bytes)} + free {format_size(r.free_bytes)}"
    if r.limit_bytes is not None and available == r.limit_bytes:
        against = f"a limit of {format_size(r.limit_bytes)}"
    parts = (
        f"live {format_size(r.live_bytes)} + {asked} {format_size(r.requested_bytes)} against "
        f"{against}"
    )
    margin = r.margin_bytes or 0
    if margin < 0:
        close = "" if -margin > r.tolerance_bytes else " (within the rounding of the message)"
        return fail(value, f"Short of {format_size(-margin)}{close}: {parts}.", r.source)
    if margin < SLIM_MARGIN_SHARE * available:
        return warn(
            value, f"It would fit with only {format_size(margin)} to spare: {parts}.", r.source
        )
    return passed(value, f"It would fit if packed perfectly: {parts}.", r.source)


def check_gap(context: Context, _verdict: Verdict) -> Answer:
    """Ask how much is reserved but not allocated, and how much of that is stuck."""
    totals = totals_of(context)
    if totals is None:
        return skip("No input has both reserved and allocated memory.")
    value = f"{format_size(totals.gap_bytes)} of {format_size(totals.reserved_bytes)}"
    r = context.failed_request
    if r is None:
        if totals.returned_bytes is None:
            return passed(value, "A gap alone is just cache, not a problem.", totals.source)
        detail = (
            f"{format_size(totals.returned_bytes)} of it is returned on demand, "
            f"{format_size(totals.stuck_bytes)} is not; without a failure a gap is no problem."
        )
        return passed(value, detail, totals.source)
    detail = "After the flush that precedes a failure this is what could not be returned"
    if totals.gap_bytes < FULL_SLACK_SHARE * totals.reserved_bytes:
        return passed(value, f"{detail}: next to nothing.", totals.source)
    answer, than = (fail, "more") if totals.gap_bytes >= r.requested_bytes else (warn, "less")
    return answer(value, f"{detail}: {than} than the {r.request_text}.", totals.source)


def check_retries(context: Context, _verdict: Verdict) -> Answer:
    """Ask how often the allocator had to flush its cache and try again."""
    known = context.retries
    if known is None:
        return skip("No input counts retries: memory_stats() or a trace does.")
    n, source = known
    if n == 0:
        return passed("0", "The allocator never had to flush its cache.", source)
    saved = n - (context.n_ooms or 0)
    if context.n_ooms and saved <= 0:
        detail = "As many as failures: flushing the cache never helped."
    else:
        detail = f"{format_count(max(0, saved))} saved by flushing the cache, which is slow."
    climb = climb_text(context)
    return (fail if climb else warn)(format_count(n), f"{detail}{climb}", source)


def check_largest_free_block(context: Context, _verdict: Verdict) -> Answer:
    """Ask whether the largest free block could have held the request."""
    r = context.failed_request
    if r is None:
        if context.analysis is None:
            return skip("Statistics do not record the size of free blocks.")
        cached = context.analysis.free_space.largest_free_block_bytes
        return skip("No request failed.", format_size(cached))
    wanted = r.block_bytes or r.requested_bytes
    largest = r.largest_free_block_bytes
    if largest is None:
        bound = r.unallocated_bytes
        if bound is not None and bound < r.requested_bytes:
            value = f"at most {format_size(bound)} for {format_size(r.requested_bytes)}"
            return fail(
                value, "All free cached memory together is smaller than the request.", r.source
            )
        return skip(
            "A message does not print the size of free blocks; a snapshot taken at the failure "
            "has it.",
            "" if bound is None else f"at most {format_size(bound)}",
        )
    value = f"{format_size(largest)} for {format_size(wanted)}"
    if largest < wanted:
        return fail(value, _too_small(context, wanted), r.source)
    return warn(
        value, "A block is large enough: it came free too late, or a setting forbids it.", r.source
    )


def _too_small(context: Context, wanted: int) -> str:
    """Say that no block fits, and where a larger block lies out of reach."""
    space = context.analysis.free_space if context.analysis is not None else None
    if space is None or space.largest_free_block_bytes < wanted:
        return "No cached block could hold the request."
    return (
        "No cached block of its own pool and stream could hold the request; one of "
        f"{format_size(space.largest_free_block_bytes)} lies in another."
    )


def check_fragmentation_ratio(context: Context, _verdict: Verdict) -> Answer:
    """Compute the popular ratio, and say what it is worth."""
    totals = totals_of(context)
    if totals is None or totals.reserved_bytes == 0:
        return skip("No input has both reserved and allocated memory, or nothing is reserved.")
    value = format_share(totals.gap_bytes, totals.reserved_bytes)
    stuck = format_share(totals.stuck_bytes, totals.reserved_bytes)
    rule = "a rule of thumb that PyTorch does not document"
    if totals.gap_bytes < RULE_OF_THUMB_SHARE * totals.reserved_bytes:
        return passed(value, f"Below 30%, {rule}.", totals.source)
    if totals.returned_bytes is not None and (
        totals.stuck_bytes < RULE_OF_THUMB_SHARE * totals.reserved_bytes
    ):
        return passed(
            value,
            f"Above 30%, {rule}, but only {stuck} is stuck; the rest is cache that is returned "
            "on demand.",
            totals.source,
        )
    return warn(value, f"Above 30%, {rule}; {stuck} is not returned on demand.", totals.source)


def check_outside_pytorch(context: Context, verdict: Verdict) -> Answer:
    """Ask how much of the device is neither free nor in PyTorch's cache."""
    r = context.failed_request
    if r is None:
        return skip("Only a message or an out-of-memory event records what the driver had free.")
    outside = r.outside_bytes
    if outside is None:
        # If a failed request proves what PyTorch could have, a given size is that of another card.
        option = " or --capacity" if context.proven_capacity_bytes is None else ""
        return skip(f"No input says how large the device is: give the message{option}.")
    total = r.total_bytes or 0
    value = f"{format_size(outside)} of {format_size(total)} ({format_share(outside, total)})"
    detail = _outside_detail(r)
    if verdict.cause in (Cause.OTHER_PROCESS, Cause.NON_PYTORCH_MEMORY):
        return fail(value, detail, r.source)
    if outside > max(CONTEXT_ALLOWANCE_BYTES, NORMAL_OUTSIDE_SHARE * total):
        return warn(value, detail, r.source)
    return passed(value, detail, r.source)


def _outside_detail(r: FailedRequest) -> str:
    parts = []
    if r.non_pytorch_bytes is not None:
        parts.append(f"{format_size(r.non_pytorch_bytes)} in this process (context, libraries)")
    if r.other_processes:
        listed = format_size(sum(p.n_bytes for p in r.other_processes))
        n = plural(len(r.other_processes), "other process", "other processes")
        parts.append(f"{listed} in {n}")
    text = "; ".join(parts) if parts else "Context, libraries and other processes together"
    if r.own_pid is not None:
        text += f"; process {r.own_pid} is this one, seen from a container"
    return f"{text}."


def check_growth(context: Context, _verdict: Verdict) -> Answer:  # noqa: PLR0911 - a row each
    """Ask whether live memory grows from step to step."""
    a = context.analysis
    if a is not None and a.capture.has_trace:
        kept = a.kept
        if kept is None:
            return passed("none", "No line's memory grows steadily.", "trace")
        return fail(slope_text(kept), f"{growth_text(context, kept)}.", "trace")
    if context.is_series and len(context.stats) >= MIN_RECORDS:
        grown = grown_bytes(context)
        if grown is not None:
            return fail(format_size(grown), rise_text(context, grown), "memory_stats")
        return passed("none", "Allocated memory does not climb.", "memory_stats")
    by_log = _growth_by_log(context)
    if by_log is not None:
        return by_log
    if a is not None:
        return skip("The snapshot has no trace of events.")
    return skip(
        "One message or one set of statistics shows a state, not a history: a trace or a series "
        "does."
    )


def _growth_by_log(context: Context) -> Answer | None:
    """Return what the trials, failures and prints of a log say, or None if they say nothing."""
    grown = accumulation(context.story)
    if grown is not None:
        value = f"{format_size(grown.slope_bytes)} a {STEPS[grown.over]}"
        return fail(value, growth_sentence(grown), "log")
    trend = memory_over_trials(context.story) if context.story is not None else None
    if trend is None or trend.direction is not Direction.LEVEL:
        return None
    n = plural(len(trend.points), STEPS[trend.over])
    return passed("none", f"{trend.figure.capitalize()} memory is level over {n}.", "log")


def check_size_diversity(context: Context, _verdict: Verdict) -> Answer:
    """Ask how varied the sizes of large requests are, and whether they drift."""
    if context.analysis is None or context.analysis.sizes is None:
        return skip("Only a trace records the sizes of requests.")
    sizes = context.analysis.sizes
    value = variety_text(sizes)
    if sizes.drifting:
        return warn(
            value, "The same lines keep asking for new sizes, which rarely fit old blocks.", "trace"
        )
    return passed(value, "Sizes repeat, so blocks can be reused.", "trace")


def check_capture_quality(context: Context, _verdict: Verdict) -> Answer:
    """Ask how much of the run the file holds."""
    if context.analysis is None:
        return skip("No snapshot was given.")
    quality = context.analysis.capture
    notes = " ".join(quality.notes)
    if quality.tiling_errors or not quality.is_consistent:
        return fail("inconsistent", notes or "The trace contradicts the state.", "snapshot")
    shortcomings = (
        (not quality.has_trace, "no history"),
        (quality.is_truncated, "truncated history"),
        (quality.is_late_start, "late start"),
        (quality.has_stacks == 0, "no stacks"),
    )
    value = next((name for applies, name in shortcomings if applies), "")
    if value:
        return warn(value, notes or "Part of the story is missing.", "snapshot")
    value = plural(context.analysis.n_events, "event")
    return passed(value, notes or "The history is complete.", "snapshot")


def check_settings(context: Context, _verdict: Verdict) -> Answer:
    """Ask which allocator settings the run had, and whether they do what they seem to."""
    settings = context.settings
    if settings is None:
        if context.failed_request is not None and context.failed_request.expandable:
            return passed(
                "expandable_segments:True", "The message says so.", context.failed_request.source
            )
        return skip("No input records the settings: a snapshot from PyTorch 2.2 or later does.")
    value = settings.conf or "defaults"
    problems = []
    if settings.garbage_collection_threshold and not context.has_memory_fraction:
        problems.append("garbage_collection_threshold has no effect without a memory fraction.")
    if settings.max_split_bytes is not None and settings.expandable_segments:
        problems.append("max_split_size_mb and expandable_segments should not be combined.")
    if problems:
        return warn(value, " ".join(problems), "snapshot")
    return passed(value, "Nothing contradictory.", "snapshot")


ITEMS: Final[tuple[tuple[str, str, Callable[[Context, Verdict], Answer]], ...]] = (
    ("capacity", "Is it real capacity?", check_capacity),
    ("gap", "Gap between reserved and allocated", check_gap),
    ("retries", "Allocation retries", check_retries),
    ("largest_free_block", "Largest free block against the request", check_largest_free_block),
    ("fragmentation_ratio", "Fragmentation ratio (30% rule of thumb)", check_fragmentation_ratio),
    ("outside_pytorch", "Memory outside PyTorch", check_outside_pytorch),
    ("growth", "Memory that grows step by step", check_growth),
    ("size_diversity", "Variety of request sizes", check_size_diversity),
    ("capture_quality", "Completeness of the recording", check_capture_quality),
    ("settings", "Allocator settings", check_settings),
)


def build_checklist(context: Context, verdict: Verdict) -> tuple[ChecklistItem, ...]:
    """Return the checklist items for the device that the verdict is about."""
    return tuple(ChecklistItem(id_, title, *ask(context, verdict)) for id_, title, ask in ITEMS)
