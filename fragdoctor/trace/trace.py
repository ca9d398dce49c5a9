"""One device's recording, undone once: everything that looks at a trace uses this.

A snapshot holds the segments at its end and the events that led there. ``Trace.of`` undoes the
events in the native core (``undone.h``) and keeps the result; lives of blocks, totals, layouts,
steps and operations all come from the one ``Trace``. Nothing else undoes events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Final, TypeVar

import numpy as np
from msgspec import field
from msgspec.structs import asdict

from fragdoctor._native import _ext
from fragdoctor.model.hooks import report_progress
from fragdoctor.model.settings import AllocatorSettings, Era
from fragdoctor.model.snapshot import I32, I64, Action, BlockState, Bools, Snapshot
from fragdoctor.trace.allocator import native_config
from fragdoctor.trace.columns import (
    MAX_SUM,
    SMALL_SEGMENT_BYTES,
    DeviceColumns,
    FinalSegments,
    device_columns,
)
from fragdoctor.trace.lives import NEVER, Layout, Lives, Totals
from fragdoctor.trace.stacks import Stacks
from fragdoctor.units import MIB

T = TypeVar("T")

SMALL_REQUEST_BYTES: Final = 1 * MIB
LONG_TRACE_EVENTS: Final = 1_000_000
"""A trace this long leaves tens of megabytes in the heap, which are worth the time to return."""

ABSURD_BYTES: Final = 2**56  # no device has 64 PiB


class SegmentLives(FinalSegments, frozen=True, kw_only=True):
    """Segments over time: ordinary ones, and groups of expandable pages with the same lifetime.

    ``start`` and ``done`` are rows, as in ``Lives``: a segment is there in state k iff
    ``start < k <= done``.
    """

    start: I32
    done: I32


class Trace(DeviceColumns, frozen=True, eq=False, dict=True, kw_only=True):
    """One device's recording, undone.

    Attributes:
        settings: settings that it was recorded under; sizes are rounded by them.
        stacks: what the stacks of the snapshot say; shared by its devices.
        native: the undone trace of the native core.
        contradictions: kind -> count of things that do not fit together; empty for a sound file.
            The kinds are those of ``Contradiction`` in ``undone.h``.
        missing: action -> number of events that must have happened but are not in the file.
        memo: whatever was worked out from the trace, keyed by the function (:meth:`once`).
    """

    snapshot: Snapshot
    device: int
    settings: AllocatorSettings
    stacks: Stacks
    native: _ext.NativeTrace
    facts: Mapping[str, Any]
    memo: dict[Callable[..., Any], Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        device: int,
        settings: AllocatorSettings | None = None,
        stacks: Stacks | None = None,
    ) -> Trace:
        """Return the trace of a device, undone.

        For a snapshot without a trace, the initial state is its final state; for a device that the
        file does not know, the trace is empty. The settings are those it was recorded under, the
        snapshot's own if None. ``stacks`` are the snapshot's, if another device has them already.
        """
        report_progress("Undoing the trace")
        bounded = bounded_settings(settings or snapshot.settings)
        columns, of_core = device_columns(snapshot, device)
        native = _ext.NativeTrace(**of_core, config=native_config(bounded, era=Era.ADDRESS))
        return cls(
            **asdict(columns),
            snapshot=snapshot,
            device=device,
            settings=bounded,
            stacks=stacks or Stacks(snapshot),
            native=native,
            facts=native.facts(),
        )

    def once(self, find: Callable[[Trace], T]) -> T:
        """Return what a function finds in the trace; it runs only the first time."""
        if find not in self.memo:
            self.memo[find] = find(self)
        found: T = self.memo[find]
        return found

    @property
    def first_row(self) -> int:
        """Row of the device's first event in the snapshot."""
        return int(self.snapshot.events.device_slice(self.device).start)

    @property
    def n_events(self) -> int:
        """Number of events of the device."""
        return len(self.events)

    @property
    def contradictions(self) -> Mapping[str, int]:
        """Kind -> count of things that do not fit together; empty for a sound file."""
        result: Mapping[str, int] = self.facts["contradictions"]
        return result

    @property
    def missing(self) -> Mapping[str, int]:
        """Action -> number of events that must have happened but are not in the file."""
        names = ("alloc", "free_requested", "free_completed")
        return {n: k for n, k in zip(names, self.facts["missing"], strict=True) if k}

    @cached_property
    def lives(self) -> Lives:
        """Every block that lived at some time."""
        return Lives(self.native, (self.events, self.blocks, self.segments), self.facts)

    @cached_property
    def n_until_unwound(self) -> int | None:
        """Events up to a failure that no allocation follows, or None if there is no such failure.

        Blocks freed after it were released by the exception, not by the program.
        """
        rows = np.flatnonzero(np.isin(self.events.action, (Action.OOM, Action.ALLOC)))
        if not len(rows) or self.events.action[rows[-1]] != Action.OOM:
            return None
        return int(rows[-1]) + 1

    @cached_property
    def lives_of_program(self) -> Lives:
        """Every block; blocks that only the last failure's exception released are still alive."""
        return self.lives.until(self.n_until_unwound)

    @cached_property
    def totals(self) -> Totals:
        """Allocated, active and reserved bytes in every state."""
        return Totals(self.native, self.facts)

    @cached_property
    def segment_lives(self) -> SegmentLives:
        """Segments over time."""
        raw = self.native.segments()
        raw["size_bytes"] = raw.pop("size")
        return SegmentLives(**self._named(raw, ""))

    @cached_property
    def initial(self) -> Mapping[str, Any]:
        """The device before the first event: columns of its segments and its blocks, by address.

        The size of a block is known unless it was computed (``round_size``) or is bounded by the
        neighbors because the block is gone at the end.
        """
        return self.native.initial()

    @property
    def initial_reserved_bytes(self) -> int:
        """Reserved memory before the first event."""
        return int(self.facts["initial_reserved_bytes"])

    @cached_property
    def layout(self) -> Layout:
        """The device at the end, as in the file."""
        return _final_layout(self)

    def layout_at(self, state: int) -> Layout:
        """Return the device after this many events; takes under 1 ms per 100,000 lives."""
        raw = self._named(self.native.layout_at(state), "segment_")
        live, pool = raw["live"].astype(np.int64), raw["segment_pool"]
        lives, address = self.lives, raw["segment_address"]
        small, expandable = raw["segment_is_small"], raw["segment_is_expandable"]
        live_segment, free_segment = raw["live_segment"], raw["free_segment"]
        live_address = lives.address[live]
        return Layout(
            segment_address=address,
            segment_bytes=raw["segment_bytes"].view(np.int64),
            segment_stream=raw["segment_stream"],
            segment_pool=pool,
            is_small=small,
            is_private=pool != self.default_pool,
            page_bytes=_pages(expandable, small, self.settings),
            live_offset=(live_address - address[live_segment]).view(np.int64),
            live_bytes=lives.size_bytes[live],
            live_stack=lives.stack[live],
            live_is_pending=lives.free[live] < state,
            live_segment=live_segment,
            live_row=live,
            free_offset=(raw["free_address"] - address[free_segment]).view(np.int64),
            free_bytes=raw["free_bytes"].view(np.int64),
            free_segment=free_segment,
        )

    @cached_property
    def oom_rows(self) -> I64:
        """Rows of requests that failed."""
        return np.flatnonzero(self.events.action == Action.OOM)

    @cached_property
    def oom_capacity_bytes(self) -> I64:
        """For each failed request, what PyTorch could have then: driver-free plus reserved bytes.

        -1 if the file does not say.
        """
        free = [self.snapshot.oom_free_bytes.get(self.first_row + r, -1) for r in self.oom_rows]
        reserved = self.totals.at(self.oom_rows + 1)[:, 2].tolist()
        known = [
            f + r if 0 <= f < ABSURD_BYTES else -1 for f, r in zip(free, reserved, strict=True)
        ]
        return np.array(known, np.int64)

    @cached_property
    def module_rows(self) -> I64:
        """Rows of allocations inside a call of a module."""
        is_alloc = self.events.action == Action.ALLOC
        return np.flatnonzero(is_alloc & self.stacks.roles.in_module[self.events.stack])

    @cached_property
    def frees_tell(self) -> bool:
        """Whether frees have stacks of their own; ``context="alloc"`` repeats those of allocs."""
        lives = self.lives
        rows = np.flatnonzero((lives.start >= 0) & (lives.free >= 0) & (lives.free != NEVER))
        stack = self.events.stack[lives.free[rows]]
        return bool(((stack >= 0) & (stack != lives.stack[rows])).any())

    @cached_property
    def ends_in_failure(self) -> bool:
        """Whether the last request failed; frees by its exception may follow it."""
        return self.n_until_unwound is not None

    @cached_property
    def is_cut(self) -> bool:
        """Whether memory from before the first event was freed while the program went on.

        Then the recording began in the middle of the work, as that of a full ring does. If history
        was switched on after the model was built, what is older stays.
        """
        free = self.lives.free[: self.lives.n_initial]
        end = int(self.oom_rows[-1]) if self.ends_in_failure else self.n_events
        return bool((free < end).any())

    @cached_property
    def n_requests(self) -> int:
        """Number of requests, including failed ones."""
        action = self.events.action
        return int(np.count_nonzero((action == Action.ALLOC) | (action == Action.OOM)))

    def _named(self, raw: dict[str, Any], prefix: str) -> dict[str, Any]:
        """Return native columns with streams and pools in the snapshot's numbering."""
        raw[f"{prefix}stream"] = self.stream_of_rank[raw[f"{prefix}stream"]]
        raw[f"{prefix}pool"] = self.pool_of_number[raw[f"{prefix}pool"]]
        for name in ("is_small", "is_expandable"):
            raw[prefix + name] = raw[prefix + name].view(np.bool_)
        return raw


def traces_of(snapshot: Snapshot) -> tuple[Trace, ...]:
    """Return the traces of all devices of a snapshot, in their order."""
    stacks = Stacks(snapshot)
    return tuple(Trace.of(snapshot, device, stacks=stacks) for device in snapshot.devices)


def return_free_memory(trace: Trace) -> None:
    """Give back the memory that work on a long trace has left in the heap."""
    if trace.n_events >= LONG_TRACE_EVENTS:
        _ext.return_free_memory()


def bounded_settings(settings: AllocatorSettings) -> AllocatorSettings:
    """Return recorded settings with numbers that no allocator has reduced to 64 bits."""
    split = settings.max_split_bytes
    return settings.changed(
        backend="native",
        max_split_bytes=None if split is None or split >= ABSURD_BYTES else split,
        max_non_split_rounding_bytes=min(settings.max_non_split_rounding_bytes, ABSURD_BYTES),
        large_segment_bytes=min(max(settings.large_segment_bytes, 10 * MIB), ABSURD_BYTES),
        roundup_power2_divisions=tuple(min(d, 2**31) for d in settings.roundup_power2_divisions),
    )


def large_page_bytes(settings: AllocatorSettings) -> int:
    """Return the page of expandable segments in the large pool, within what can be computed."""
    return min(max(512, settings.large_segment_bytes), 2**40)


# ---- layouts -------------------------------------------------------------------------------------


def _pages(is_expandable: Bools, is_small: Bools, settings: AllocatorSettings) -> I64:
    page = np.where(is_small, SMALL_SEGMENT_BYTES, large_page_bytes(settings))
    return np.where(is_expandable, page, 0).astype(np.int64)


def _final_layout(trace: Trace) -> Layout:
    segments, blocks = trace.segments, trace.blocks
    offset = (blocks.address - segments.address[blocks.segment]).view(np.int64)
    offset = np.clip(offset, -MAX_SUM, MAX_SUM)  # nonsense must not overflow later
    row = np.full(len(blocks), -1, np.int64)
    of_life = trace.lives.block
    found = np.flatnonzero(of_life >= 0)
    row[of_life[found]] = found
    live = np.flatnonzero(blocks.state != BlockState.INACTIVE)
    free = np.flatnonzero(blocks.state == BlockState.INACTIVE)
    return Layout(
        segment_address=segments.address,
        segment_bytes=segments.size_bytes,
        segment_stream=segments.stream,
        segment_pool=segments.pool,
        is_small=segments.is_small,
        is_private=segments.pool != trace.default_pool,
        page_bytes=_pages(segments.is_expandable, segments.is_small, trace.settings),
        live_offset=offset[live],
        live_bytes=blocks.size_bytes[live],
        live_stack=blocks.stack[live],
        live_is_pending=blocks.state[live] == BlockState.PENDING_FREE,
        live_segment=blocks.segment[live],
        live_row=row[live],
        free_offset=offset[free],
        free_bytes=blocks.size_bytes[free],
        free_segment=blocks.segment[free],
    )
