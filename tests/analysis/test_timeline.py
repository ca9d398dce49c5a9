from __future__ import annotations

import json

import numpy as np
import pytest
from analysis.toy_allocator import random_run
from builders import MIB
from fragdoctor.analysis.columns import device_columns
from fragdoctor.analysis.layout import layout_at
from fragdoctor.analysis.timeline import round_size, undo
from fragdoctor.model.settings import AllocatorSettings
from hypothesis import given, settings
from hypothesis import strategies as st
from stock import from_python, load_stock


@given(seed=st.integers(0, 2**32 - 1), n_ops=st.integers(1, 80), cut=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_undo_random_run_equals_the_states_that_were(seed, n_ops, cut):
    toy = random_run(seed, n_ops)
    first = int(cut * len(toy.events))
    snapshot = from_python(toy.data(first))

    undone = undo(device_columns(snapshot, 0), snapshot.settings)

    t = undone.timeline
    got = list(zip(t.allocated_bytes.tolist(), t.active_bytes.tolist(), t.reserved_bytes.tolist()))
    if first == 0:
        assert toy.states == got
        assert undone.lifetimes.n_contradictions == 0
    else:
        # Of a block that was there before the trace only the rounded size may show.
        assert [s[2] for s in toy.states[first:]] == [g[2] for g in got]
        assert all(g[0] <= s[0] and g[1] <= s[1] for s, g in zip(toy.states[first:], got))
    assert undone.is_exact


@given(seed=st.integers(0, 2**32 - 1), n_ops=st.integers(1, 50))
@settings(max_examples=40, deadline=None)
def test_layout_at_random_run_equals_the_free_blocks_that_were(seed, n_ops):
    toy = random_run(seed, n_ops)
    snapshot = from_python(toy.data())
    columns = device_columns(snapshot, 0)
    undone = undo(columns, snapshot.settings)

    for k in range(0, len(toy.events) + 1, 7):
        layout = layout_at(columns, snapshot.settings, undone, k)
        got = list(zip(layout.free_address.tolist(), layout.free_size.tolist()))
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
    for folder in sorted((shared / "snapshots").iterdir()):
        if not folder.is_dir() or folder.name in WITHOUT_PEAK:
            continue
        snapshot = load_stock(folder / "snapshot.pickle")
        stats = json.loads((folder / "stats.json").read_text())
        for device in snapshot.devices:
            one = stats[device] if isinstance(stats, list) else stats
            t = undo(device_columns(snapshot, device), snapshot.settings).timeline
            want = [one.get(f"{n}_bytes.all.peak", 0) for n in ("allocated", "active", "reserved")]
            got = [t.peak_allocated_bytes, t.peak_active_bytes, t.peak_reserved_bytes]
            assert want == got, (folder.name, device)
            checked += 1
    assert checked >= 45
