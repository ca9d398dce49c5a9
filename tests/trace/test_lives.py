"""Lives, totals and layouts against programs whose every state is known, and against nonsense."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from analysis.recordings import recording, recordings, stats_of
from builders import BASE, MIB, block, event, segment, snapshot
from hypothesis import example, given, settings
from hypothesis import strategies as st
from programs import Program, programs, record
from stock import from_python
from toy_allocator import random_run

from fragdoctor._native import _ext
from fragdoctor.model.snapshot import Action, BlockState, SegmentType
from fragdoctor.trace.lives import BEFORE, NEVER
from fragdoctor.trace.trace import Trace

TOTALS = ("allocated_bytes", "active_bytes", "reserved_bytes")


def trace_of(data: dict[str, Any]) -> Trace:
    return Trace.of(from_python(data), 0)


def states(trace: Trace) -> list[tuple[int, int, int]]:
    """Return allocated, active and reserved bytes in every state."""
    columns = [getattr(trace.totals, name).tolist() for name in TOTALS]
    return list(zip(*columns, strict=True))


def test_words_are_counted_alike_in_python_and_in_the_core():
    assert [a.name.lower() for a in Action][:-1] == list(_ext.ACTION_NAMES)
    assert [t.name.lower() for t in SegmentType][:-1] == list(_ext.TYPE_NAMES)
    assert _ext.STATE_NAMES[BlockState.ALLOCATED] == "active_allocated"
    assert _ext.STATE_NAMES[BlockState.PENDING_FREE] == "active_pending_free"
    assert _ext.STATE_NAMES[BlockState.INACTIVE] == "inactive"


@given(seed=st.integers(0, 2**32 - 1), n_ops=st.integers(1, 80), cut=st.floats(0, 1))
@example(seed=284071, n_ops=70, cut=0.9375)
@settings(max_examples=40, deadline=None)
def test_totals_of_a_random_run_equal_the_states_that_were(seed, n_ops, cut):
    toy = random_run(seed, n_ops)
    first = int(cut * len(toy.events))

    trace = trace_of(toy.data(first))

    got = states(trace)
    if first == 0:
        assert toy.states == got
    elif any(e["action"] == "free_requested" for e in toy.events[first:]):
        # Of a block that was there before the trace only the rounded size may show.
        assert [s[2] for s in toy.states[first:]] == [g[2] for g in got]
        assert all(
            g[0] <= s[0] and g[1] <= s[1] for s, g in zip(toy.states[first:], got, strict=True)
        )
    # Without any request a recording looks like one that skipped them; its first row alone may
    # complete a free that was asked for before.
    actions = [e["action"] for e in toy.events[first:]]
    n_unrequested = 0 if "free_requested" in actions else actions[1:].count("free_completed")
    expected = {"completed_unrequested": n_unrequested} if n_unrequested else {}
    assert trace.contradictions == expected


@given(seed=st.integers(0, 2**32 - 1), n_ops=st.integers(1, 50))
@settings(max_examples=25, deadline=None)
def test_layouts_of_a_random_run_equal_the_free_blocks_that_were(seed, n_ops):
    toy = random_run(seed, n_ops)
    trace = trace_of(toy.data())

    for k in range(0, len(toy.events) + 1, 7):
        layout = trace.layout_at(k)
        address = layout.segment_address[layout.free_segment].astype(np.int64) + layout.free_offset
        got = list(zip(address.tolist(), layout.free_bytes.tolist(), strict=True))
        assert toy.layouts[k] == got


@given(seed=st.integers(0, 2**32 - 1), n_ops=st.integers(1, 60))
@settings(max_examples=25, deadline=None)
def test_last_layout_of_a_random_run_is_the_recorded_one(seed, n_ops):
    trace = trace_of(random_run(seed, n_ops).data())

    recorded, undone = trace.layout, trace.layout_at(trace.n_events)

    names = ("segment_address", "segment_bytes", "live_offset", "live_bytes", "live_segment")
    for name in (*names, "live_row", "live_stack", "free_offset", "free_bytes", "free_segment"):
        assert getattr(recorded, name).tolist() == getattr(undone, name).tolist(), name


@given(seed=st.integers(0, 2**32 - 1), n_ops=st.integers(2, 80), data=st.data())
@settings(max_examples=40, deadline=None)
def test_answers_without_columns_equal_the_columns(seed, n_ops, data):
    trace = trace_of(random_run(seed, n_ops).data())
    n_states = trace.n_events + 1
    starts = [0, *sorted(data.draw(st.sets(st.integers(1, n_states - 1), max_size=5)))]

    for i, name in enumerate(TOTALS):
        column = getattr(trace.totals, name)
        low, high = trace.totals.envelope(name, starts)
        assert low.tolist() == np.minimum.reduceat(column, starts).tolist()
        assert high.tolist() == np.maximum.reduceat(column, starts).tolist()
        assert trace.totals.at(starts)[:, i].tolist() == column[starts].tolist()
        kind = name.removesuffix("_bytes")
        assert getattr(trace.totals, f"peak_{kind}_bytes") == column.max()
        assert getattr(trace.totals, f"peak_{kind}_state") == column.argmax()


def test_states_of_a_long_trace_equal_the_columns():
    # So long that totals are walked from marks in between; frees without events lie between too.
    events = [event("alloc", BASE + (i % 700) * MIB, 512 * (1 + i % 9)) for i in range(9_000)]
    for i in range(0, 9_000, 250):
        events[i] = event("segment_alloc", BASE + (i + 1_000) * 2 * MIB, 2 * MIB)
    trace = trace_of(snapshot(events=events))
    wanted = [0, 0, 1, 4_095, 4_096, 4_097, 8_191, 8_192, 8_500, 9_000, 9_050]

    got = trace.totals.at(wanted)

    columns = np.stack([getattr(trace.totals, name) for name in TOTALS], axis=1)
    assert got.tolist() == columns[np.minimum(wanted, 9_000)].tolist()
    for state in wanted:
        assert trace.totals.at([state]).tolist() == [columns[min(state, 9_000)].tolist()]


@given(programs())
@settings(deadline=None)
def test_lives_are_numbered_as_the_operations_of_a_replay(one: Program):
    trace = Trace.of(record(one), 0)
    lives = trace.lives

    made = lives.start[lives.n_initial : lives.n_regular]
    assert made.tolist() == np.flatnonzero(trace.events.action == Action.ALLOC).tolist()
    peak = trace.totals.peak_allocated_state
    assert lives.size_bytes[lives.allocated_at(peak)].sum() == trace.totals.peak_allocated_bytes


def test_segments_over_time_are_cut_where_pages_go():
    """Pages of an expandable segment come in one piece and go in two."""

    def page(action, at, n, size=20 * MIB):
        return event(action, BASE + at * size, n * size)

    trace = trace_of(
        snapshot(
            segment(BASE, block(20 * MIB), is_expandable=True),
            events=[page("segment_map", 0, 3), page("segment_unmap", 1, 1),
                    page("segment_unmap", 2, 1)],
        )
    )  # fmt: skip

    lives = trace.segment_lives
    found = sorted(
        zip((lives.address - np.uint64(BASE)).tolist(), lives.size_bytes.tolist(),
            lives.start.tolist(), lives.done.tolist(), strict=True)
    )  # fmt: skip
    assert found == [
        (0, 20 * MIB, 0, NEVER),
        (20 * MIB, 20 * MIB, 0, 1),
        (40 * MIB, 20 * MIB, 0, 2),
    ]
    assert [trace.layout_at(k).segment_bytes.tolist() for k in range(4)] == [
        [], [60 * MIB], [20 * MIB, 20 * MIB], [20 * MIB],
    ]  # fmt: skip


# ---- nonsense -----------------------------------------------------------------------------------

PLACES = [BASE + i * MIB for i in range(3)]
WORDS = ("alloc", "free_requested", "free_completed")
Row = tuple[int, int, int, int]


class Site:
    """The blocks at one address, paired as ``undone.h`` says: rows [start, free, done]."""

    def __init__(self, has_requests: bool) -> None:
        self.has_requests = has_requests
        self.closed: list[list[int]] = []
        self.now: list[int] | None = None
        self.is_known = False

    def close(self, free: int, done: int) -> None:
        assert self.now is not None
        self.closed.append([self.now[0], free, done])
        self.now = None

    def alloc(self, row: int) -> None:
        if self.now is not None:  # frees are missing: all of them, or the completion
            self.end_by(row)
        self.now = [row, NEVER, NEVER]

    def free_requested(self, row: int) -> None:
        if self.now is None and not self.is_known:
            self.now = [BEFORE, row, NEVER]
        elif self.now is not None and self.now[1] == NEVER:
            self.now[1] = row

    def free_completed(self, row: int) -> None:
        if self.now is None and self.is_known:
            return
        if self.now is None:
            self.now = [BEFORE, BEFORE if self.has_requests or row == 0 else row, NEVER]
        self.close(row if self.now[1] == NEVER else self.now[1], row)

    def end_by(self, row: int) -> None:
        """End what the file lost the frees of: at this row at the latest."""
        free = self.now[1] if self.now is not None else NEVER
        self.close(*((row, row) if free == NEVER else (free, free)))

    def end(self, state: str | None, last: int) -> list[list[int]]:
        if state is None:
            if self.now is not None:
                self.end_by(last)
            return self.closed
        is_live = state == "active_allocated"
        if self.now is None:  # an alloc is missing, or it was there from before
            start = max((done for _, _, done in self.closed), default=BEFORE)
            self.now = [start, NEVER if is_live else start, NEVER]
        elif is_live:
            self.now[1] = NEVER
        elif self.now[1] == NEVER:
            self.now[1] = last
        return [*self.closed, self.now]


def reference(events: list[tuple[str, int]], final: dict[int, str]) -> list[Row]:
    """Return (address, start, free, done) of every block."""
    found = []
    for address in PLACES:
        site = Site(any(action == "free_requested" for action, _ in events))
        for row, (action, at) in enumerate(events):
            if at == address:
                getattr(site, action)(row)
                site.is_known = True
        found += [(address, *life) for life in site.end(final.get(address), len(events) - 1)]
    return sorted(found)


@given(
    events=st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(PLACES)), max_size=14),
    final=st.dictionaries(
        st.sampled_from(PLACES), st.sampled_from(["active_allocated", "active_pending_free"])
    ),
)
@settings(max_examples=300, deadline=None)
def test_lives_of_any_events_are_those_of_a_simple_pairing(events, final):
    blocks = [block(MIB, final.get(at, "inactive"), requested=MIB) for at in PLACES]
    trace = trace_of(
        snapshot(segment(BASE, *blocks), events=[event(action, at, MIB) for action, at in events])
    )
    lives = trace.lives

    got = zip(
        lives.address.tolist(), lives.start.tolist(), lives.free.tolist(), lives.done.tolist(),
        strict=True,
    )  # fmt: skip
    assert sorted(got) == reference(events, final)
    in_the_end = [int(trace.blocks.size_bytes[trace.blocks.state == s].sum())
                  for s in (BlockState.ALLOCATED, BlockState.PENDING_FREE)]  # fmt: skip
    assert states(trace)[-1][:2] == (in_the_end[0], sum(in_the_end))


@pytest.fixture(scope="module")
def long_trace():
    n = 200_000
    address = BASE + (np.arange(n) % 5000) * 512
    events = []
    for i in range(n):
        events.append(event("alloc", int(address[i]), 512))
        events.append(event("free_requested", int(address[i]), 512))
        events.append(event("free_completed", int(address[i]), 512))
    trace = trace_of(snapshot(segment(BASE, block(4 * MIB)), events=events))
    trace.layout_at(0)
    return trace


@pytest.mark.slow
@pytest.mark.parametrize("state", [0, 300_000, 600_000])
def test_layout_of_a_long_trace_takes_a_moment(long_trace, state):
    began = time.process_time()
    long_trace.layout_at(state)

    assert time.process_time() - began < 0.5


# Their peak lies before the oldest event that the file holds, or there are no events at all.
WITHOUT_PEAK = {"frag_gpt_long_truncated", "no_history", "state_only"}


@pytest.mark.shared
def test_peaks_of_recordings_equal_memory_stats(shared, has_all_recordings):
    checked = 0
    for folder in recordings(shared):
        if folder.name in WITHOUT_PEAK:
            continue
        for result in recording(folder)[1]:
            if result.timeline is None:
                continue
            stats, t = stats_of(folder, result.device), result.timeline
            want = [stats[f"{n}_bytes.all.peak"] for n in ("allocated", "active", "reserved")]
            got = [t.peak_allocated_bytes, t.peak_active_bytes, t.peak_reserved_bytes]
            assert want == got, (folder.name, result.device)
            checked += 1
    assert checked >= (45 if has_all_recordings else 29)
