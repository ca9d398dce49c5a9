"""The documents' own workflow: capacity, gap, retries, largest free block, fragmentation ratio."""

from __future__ import annotations

from typing import Final

from fragdoctor.diagnosis.decision import SLIM_MARGIN_SHARE
from fragdoctor.frozen import frozen
from fragdoctor.model.diagnosis import ChecklistItem, Status, Verdict
from fragdoctor.rules.failed_request import FULL_SLACK_SHARE, FailedRequest
from fragdoctor.rules.growth.growing_statistics import count_rises, values_of
from fragdoctor.rules.rule import Context
from fragdoctor.units import format_count, format_share, format_size

RULE_OF_THUMB_SHARE: Final = 0.30
"""The popular 30 % rule: reserved but unallocated memory over reserved. Nothing in PyTorch
documents it, and cache that is returned on demand does no harm; so it never fails by itself."""

NEAR_CAPACITY_SHARE: Final = 0.9
"""A peak above nine tenths of the device leaves no room for context, libraries and a longer
sample."""


@frozen
class DeviceTotals:
    """Reserved, allocated and free cached bytes, and the input that says them."""

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
        """The part of the gap that a flush does not return; all of it where that is unknown."""
        return max(0, self.gap_bytes - (self.returned_bytes or 0))


def totals_of(context: Context) -> DeviceTotals | None:
    """Return the totals at the failure, else at the end of the input."""
    r, a = context.failed_request, context.analysis
    if r is not None and r.source != "user" and r.live_bytes is not None:
        # After the flush that precedes a failure nothing returnable is left.
        allocated = r.live_bytes - r.pending_bytes
        if r.reserved_bytes is not None:
            return DeviceTotals(r.reserved_bytes, allocated, 0, r.source)
    if a is not None:
        returned = a.free_space.releasable_bytes
        return DeviceTotals(a.reserved_bytes, a.allocated_bytes, returned, "snapshot")
    if context.stats:
        s = context.stats[-1]
        if s.reserved_bytes is not None and s.allocated_bytes is not None:
            split = s.inactive_split_bytes
            gap = s.reserved_bytes - s.allocated_bytes
            back = None if split is None else max(0, gap - split)
            return DeviceTotals(s.reserved_bytes, s.allocated_bytes, back, s.origin)
    return None


def check_capacity(context: Context, verdict: Verdict) -> ChecklistItem:
    """Ask first: does what is live, and what is asked for, fit at all?"""
    del verdict
    item = ItemMaker("capacity", "Is it real capacity?")
    r = context.failed_request
    if r is not None and r.needed_bytes is not None:
        return _capacity_of_request(item, r)
    if r is not None and r.total_bytes is not None and r.requested_bytes > r.total_bytes:
        value = f"{format_size(r.requested_bytes)} requested of {format_size(r.total_bytes)}"
        return item.fail(value, "The request alone is larger than the device.", r.source)
    peak, source = _peak(context)
    if peak is None:
        return item.skip("No input says how much was live.")
    total = context.total_bytes
    if total is None:
        # A state without history, and without statistics beside it, has no peak.
        a = context.analysis
        is_peak = bool(context.stats) or (a is not None and a.timeline is not None)
        return item.skip(
            "No input says how large the device is: give --capacity.",
            f"Live memory {'peaked at' if is_peak else 'is'} {format_size(peak)}",
        )
    value = f"peak {format_size(peak)} of {format_size(total)} ({format_share(peak, total)})"
    if peak >= NEAR_CAPACITY_SHARE * total:
        return item.warn(value, "Little is left for context, libraries and larger inputs.", source)
    return item.passed(value, "Live memory stays well below the device.", source)


def _capacity_of_request(item: ItemMaker, r: FailedRequest) -> ChecklistItem:
    needed, available = r.needed_bytes, r.available_bytes
    if available is None:
        if r.total_bytes is None or needed is None:
            return item.skip("The message does not print what was free.")
        value = f"{format_size(needed)} needed of {format_size(r.total_bytes)}"
        if needed > r.total_bytes + r.tolerance_bytes:
            return item.fail(value, "Live memory and request exceed the device.", r.source)
        return item.warn(
            value, "No free figure is printed, so that what others hold is open.", r.source
        )
    value = f"{format_size(needed)} needed, {format_size(available)} available"
    asked = "segment" if r.segment_rest_bytes else "request"
    parts = (
        f"live {format_size(r.live_bytes)} + {asked} {format_size(r.requested_bytes)} against "
        f"{_available_parts(r)}"
    )
    margin = r.margin_bytes or 0
    if margin < 0:
        close = "" if -margin > r.tolerance_bytes else " (within the rounding of the message)"
        return item.fail(value, f"Short of {format_size(-margin)}{close}: {parts}.", r.source)
    if margin < SLIM_MARGIN_SHARE * available:
        return item.warn(
            value, f"It would fit with only {format_size(margin)} to spare: {parts}.", r.source
        )
    return item.passed(value, f"It would fit if packed perfectly: {parts}.", r.source)


def _available_parts(r: FailedRequest) -> str:
    if r.limit_bytes is not None and r.available_bytes == r.limit_bytes:
        return f"a limit of {format_size(r.limit_bytes)}"
    return f"reserved {format_size(r.reserved_bytes)} + free {format_size(r.free_bytes)}"


def _peak(context: Context) -> tuple[int | None, str]:
    candidates: list[tuple[int, str]] = []
    if context.analysis is not None:
        line = context.analysis.timeline
        now = context.analysis.active_bytes
        candidates.append((line.peak_active_bytes if line is not None else now, "snapshot"))
    for s in context.stats[-1:]:
        peak = s.get("active_bytes.all.peak")
        if peak is not None:
            candidates.append((peak, s.origin))
    return max(candidates) if candidates else (None, "")


def check_gap(context: Context, verdict: Verdict) -> ChecklistItem:
    """Ask how much is reserved but not allocated, and how much of that is stuck."""
    del verdict
    item = ItemMaker("gap", "Gap between reserved and allocated")
    totals = totals_of(context)
    if totals is None:
        return item.skip("No input says both reserved and allocated memory.")
    value = f"{format_size(totals.gap_bytes)} of {format_size(totals.reserved_bytes)}"
    r = context.failed_request
    if r is None or r.source == "user":
        if totals.returned_bytes is None:
            return item.passed(value, "A gap alone is cache and no fault.", totals.source)
        detail = (
            f"{format_size(totals.returned_bytes)} of it are returned on demand, "
            f"{format_size(totals.stuck_bytes)} are not; before a failure a gap is no fault."
        )
        return item.passed(value, detail, totals.source)
    detail = "After the flush that precedes a failure this is what could not be returned"
    if totals.gap_bytes < FULL_SLACK_SHARE * totals.reserved_bytes:
        return item.passed(value, f"{detail}: next to nothing.", totals.source)
    if totals.gap_bytes >= r.requested_bytes:
        return item.fail(
            value,
            f"{detail}: more than the {r.request_text}.",
            totals.source,
        )
    return item.warn(
        value,
        f"{detail}: less than the {r.request_text}.",
        totals.source,
    )


def check_retries(context: Context, verdict: Verdict) -> ChecklistItem:
    """Ask how often the allocator had to flush its cache and try again."""
    del verdict
    item = ItemMaker("retries", "Allocation retries")
    known = context.retries
    if known is None:
        return item.skip("No input counts retries: memory_stats() or a trace does.")
    n, source = known
    if n == 0:
        return item.passed("0", "The allocator never had to flush its cache.", source)
    n_ooms = next((s.n_ooms for s in reversed(context.stats) if s.n_ooms is not None), None)
    if n_ooms is None and context.analysis is not None:
        n_ooms = len(context.analysis.ooms)
    saved = n - (n_ooms or 0)
    if n_ooms and saved <= 0:
        detail = "As many as failures: flushing the cache never helped."
    else:
        detail = f"{format_count(max(0, saved))} saved by flushing the cache, which is slow."
    if context.is_series and count_rises(context.stats, "num_alloc_retries"):
        values = values_of(context.stats, "num_alloc_retries")
        detail += f" The counter climbs from {values[0]} to {values[-1]} over the series."
        return item.fail(format_count(n), detail, source)
    return item.warn(format_count(n), detail, source)


def check_largest_free_block(context: Context, verdict: Verdict) -> ChecklistItem:
    """Ask whether the largest free block could have held the request."""
    del verdict
    item = ItemMaker("largest_free_block", "Largest free block against the request")
    r = context.failed_request
    if r is None:
        return _largest_without_request(context, item)
    wanted = r.block_bytes or r.requested_bytes
    largest = r.largest_free_block_bytes
    if largest is None:
        bound = r.unallocated_bytes
        if bound is not None and bound < r.requested_bytes:
            value = f"at most {format_size(bound)} for {format_size(r.requested_bytes)}"
            return item.fail(
                value, "All free cached memory together is smaller than the request.", r.source
            )
        return item.skip(
            "A message does not print the size of free blocks; a snapshot taken at the failure "
            "has it.",
            "" if bound is None else f"at most {format_size(bound)}",
        )
    value = f"{format_size(largest)} for {format_size(wanted)}"
    if largest < wanted:
        return item.fail(value, _too_small(context, wanted), r.source)
    if r.source == "user":
        return item.passed(value, "A cached block can hold the request.", r.source)
    return item.warn(
        value, "A block is large enough: it came free too late, or a setting forbids it.", r.source
    )


def _too_small(context: Context, wanted: int) -> str:
    """Say that no block fits, and where a larger one lies out of reach."""
    space = context.analysis.free_space if context.analysis is not None else None
    if space is None or space.largest_free_block_bytes < wanted:
        return "No cached block could hold the request."
    return (
        "No cached block of its own pool and stream could hold the request; one of "
        f"{format_size(space.largest_free_block_bytes)} lies in another."
    )


def _largest_without_request(context: Context, item: ItemMaker) -> ChecklistItem:
    a, wanted = context.analysis, context.case.overrides.request_bytes
    if a is None:
        return item.skip("Statistics do not record the size of free blocks.")
    largest = a.free_space.largest_free_block_bytes
    if wanted is None:
        return item.skip("No request failed; --request compares it with one.", format_size(largest))
    value = f"{format_size(largest)} for {format_size(wanted)}"
    if largest >= wanted:
        return item.passed(value, "A cached block can hold the request.", "snapshot")
    return item.warn(value, "No cached block can hold it; new memory would be needed.", "snapshot")


def check_fragmentation_ratio(context: Context, verdict: Verdict) -> ChecklistItem:
    """Compute the popular ratio, and say what it is worth."""
    del verdict
    item = ItemMaker("fragmentation_ratio", "Fragmentation ratio (30 % rule of thumb)")
    totals = totals_of(context)
    if totals is None or totals.reserved_bytes == 0:
        return item.skip(
            "No input says both reserved and allocated memory, or nothing is reserved."
        )
    value = format_share(totals.gap_bytes, totals.reserved_bytes)
    stuck = format_share(totals.stuck_bytes, totals.reserved_bytes)
    rule = "a rule of thumb that PyTorch does not document"
    if totals.gap_bytes < RULE_OF_THUMB_SHARE * totals.reserved_bytes:
        return item.passed(value, f"Below 30 %, {rule}.", totals.source)
    if totals.returned_bytes is not None and (
        totals.stuck_bytes < RULE_OF_THUMB_SHARE * totals.reserved_bytes
    ):
        return item.passed(
            value,
            f"Above 30 %, {rule}, but only {stuck} is stuck; the rest is cache that is returned "
            "on demand.",
            totals.source,
        )
    return item.warn(
        value, f"Above 30 %, {rule}; {stuck} is not returned on demand.", totals.source
    )


@frozen
class ItemMaker:
    """Id and title of an item; each method makes the item with one outcome."""

    id: str
    title: str

    def passed(self, value: str, detail: str, source: str) -> ChecklistItem:
        """Return the item as passed."""
        return ChecklistItem(self.id, self.title, Status.PASS, value, detail, source)

    def warn(self, value: str, detail: str, source: str) -> ChecklistItem:
        """Return the item as worth a look."""
        return ChecklistItem(self.id, self.title, Status.WARN, value, detail, source)

    def fail(self, value: str, detail: str, source: str) -> ChecklistItem:
        """Return the item as failed."""
        return ChecklistItem(self.id, self.title, Status.FAIL, value, detail, source)

    def skip(self, reason: str, value: str = "") -> ChecklistItem:
        """Return the item as not answered by any input, with the reason."""
        return ChecklistItem(self.id, self.title, Status.SKIP, value, reason)
