from __future__ import annotations

import numpy as np
import pytest
from analysis.recordings import recording, recordings, stats_of
from analysis.toy_allocator import random_run
from builders import MIB
from hypothesis import given, settings
from hypothesis import strategies as st
from stock import from_python

from fragdoctor.analysis.columns import device_columns
from fragdoctor.analysis.layout import layout_at
from fragdoctor.analysis.timeline import round_size, undo
from fragdoctor.model.settings import AllocatorSettings


@given(seed=st.integers(0, 2**32 - 1), n_ops=st.integers(1, 80), cut=st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_undo_random_run_equals_the_states_that_were(seed, n_ops, cut):
    toy = random_run(seed, n_ops)
    first = int(cut * len(toy.events))
    snapshot = from_python(toy.data(first))

    undone = undo(device_columns(snapshot, 0), snapshot.settings)

    t = undone.timeline
    got = list(
        zip(
            *(a.tolist() for a in (t.allocated_bytes, t.active_bytes, t.reserved_bytes)),
            strict=True,
        )
    )
    if first == 0:
        assert toy.states == got
        assert undone.lifetimes.n_contradictions == 0
    elif any(e["action"] == "free_requested" for e in toy.events[first:]):
        # Of a block that was there before the trace only the rounded size may show.
        assert [s[2] for s in toy.states[first:]] == [g[2] for g in got]
        assert all(
            g[0] <= s[0] and g[1] <= s[1] for s, g in zip(toy.states[first:], got, strict=True)
        )
    assert undone.is_exact


@given(seed=st.integers(0, 2**32 - 1), n_ops=st.integers(1, 50))
@settings(max_examples=25, deadline=None)
def test_layout_at_random_run_equals_the_free_blocks_that_were(seed, n_ops):
    toy = random_run(seed, n_ops)
    snapshot = from_python(toy.data())
    columns = device_columns(snapshot, 0)
    undone = undo(columns, snapshot.settings)

    for k in range(0, len(toy.events) + 1, 7):
        layout = layout_at(columns, snapshot.settings, undone, k)
        got = list(zip(layout.free_address.tolist(), layout.free_size.tolist(), strict=True))
        assert toy.layouts[k] == got


@pytest.mark.parametrize(
    ("requested", "divisions", "expected"),
    [
        (1, 0, 512),
        (512, 0, 512),
        (513, 0, 1024),
        (1200, 4, 1536),
        (1_048_577, 4, 1_310_720),
        (3_000_000, 4, 3_145_728),
        (10_485_759, 0, 10_485_760),
        (4 * MIB, 4, 4 * MIB),
        (2**30 - 1, 8, 2**30),
    ],
)
def test_round_size_golden_values_are_met(requested, divisions, expected):
    conf = AllocatorSettings(roundup_power2_divisions=(divisions,) * 16)

    got = round_size(np.array([requested], np.int64), conf)

    assert expected == int(got[0])


# Their peak lies before the oldest event that the file holds, or there are no events at all.
WITHOUT_PEAK = {"frag_gpt_long_truncated", "no_history", "state_only"}


@pytest.mark.shared
def test_undo_recordings_peaks_equal_memory_stats(shared):
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
    assert checked >= 45
