"""Columns that no allocator would write: nothing crashes, overflows or takes long."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from analysis.training_loop import USER, TrainingLoop
from hypothesis import given, settings
from hypothesis import strategies as st
from stock import from_python

from fragdoctor.analysis.device import analyze_device
from fragdoctor.model.settings import AllocatorSettings, Era
from fragdoctor.model.snapshot import (
    BlockTable,
    EventTable,
    FrameTable,
    SegmentTable,
    Snapshot,
    StackTable,
)
from fragdoctor.trace.allocator import native_config

EXTREMES = [0, 1, 511, 512, 2**20, 2**20 + 1, 20 * 2**20, 2**40, 2**61, 2**62, 2**63, 2**64 - 1]


def random_snapshot(seed: int, n_events: int, n_segments: int, n_blocks: int) -> Snapshot:
    rng = np.random.default_rng(seed)
    n_stacks, n_frames = 5, 7

    def words(n: int) -> Any:
        if n and rng.random() < 0.5:
            return rng.choice(np.array(EXTREMES, np.uint64), n)
        return rng.integers(0, 64, n, dtype=np.uint64) * np.uint64(2**20)

    def ids(n: int, bound: int, low: int = -1) -> Any:
        return rng.integers(low, bound, n).astype(np.int32)

    owner = np.sort(ids(n_blocks, max(1, n_segments), 0)) if n_segments else np.zeros(0, np.int32)
    n_blocks = len(owner)
    cuts = np.sort(rng.integers(0, n_events + 1, 1))
    return Snapshot(
        strings=("train.py", "<string>", "torch/nn/modules/module.py", "??"),
        frames=FrameTable(ids(n_frames, 4), words(n_frames), ids(n_frames, 4)),
        stacks=StackTable(
            np.concatenate([[0], np.sort(rng.integers(0, 12, n_stacks - 1)), [12]]).astype(
                np.int64
            ),
            ids(12, n_frames, 0),
        ),
        streams=np.array([0, 2**64 - 1], np.uint64),
        pools=np.array([[0, 0], [0, 1], [2**62, -1]], np.int64),
        segments=SegmentTable(
            device=ids(n_segments, 2, 0),
            address=words(n_segments),
            total_bytes=words(n_segments),
            allocated_bytes=words(n_segments),
            active_bytes=words(n_segments),
            requested_bytes=words(n_segments),
            stream=ids(n_segments, 2, 0),
            kind=rng.integers(0, 3, n_segments).astype(np.uint8),
            pool=ids(n_segments, 3),
            is_expandable=rng.random(n_segments) < 0.5,
            stack=ids(n_segments, n_stacks),
            block_offsets=np.searchsorted(owner, np.arange(n_segments + 1)).astype(np.int64),
        ),
        blocks=BlockTable(
            segment=owner,
            address=words(n_blocks),
            size_bytes=words(n_blocks),
            requested_bytes=words(n_blocks),
            state=rng.integers(0, 4, n_blocks).astype(np.uint8),
            stack=ids(n_blocks, n_stacks),
        ),
        events=EventTable(
            action=rng.integers(0, 11, n_events).astype(np.uint8),
            address=words(n_events),
            size_bytes=words(n_events),
            stream=ids(n_events, 2, 0),
            time_us=np.zeros(n_events, np.int64),
            stack=ids(n_events, n_stacks),
            pool=ids(n_events, 3),
            compile_context=ids(n_events, 1),
            user_metadata=ids(n_events, 1),
            offsets=np.array([0, int(cuts[0]), n_events], np.int64),
        ),
        oom_free_bytes={0: 2**64 - 1},
        settings=AllocatorSettings(
            expandable_segments=bool(rng.random() < 0.3),
            max_split_bytes=int(rng.choice([20 * 2**20, 2**63])) if rng.random() < 0.5 else None,
            garbage_collection_threshold=0.5 if rng.random() < 0.5 else 0.0,
            roundup_power2_divisions=tuple(int(d) for d in rng.choice([0, 1, 4, 8, 2**40], 16)),
            max_non_split_rounding_bytes=int(rng.choice([20 * 2**20, 2**70 % 2**63])),
            large_segment_bytes=int(rng.choice([20 * 2**20, 1, 0, 2**62])),
        ),
    )


@given(
    seed=st.integers(0, 2**32 - 1),
    n_events=st.integers(0, 60),
    n_segments=st.integers(0, 6),
    n_blocks=st.integers(0, 20),
)
@settings(max_examples=150, deadline=None)
def test_analyze_device_random_columns_never_fails(seed, n_events, n_segments, n_blocks):
    snapshot = random_snapshot(seed, n_events, n_segments, n_blocks)

    for device in snapshot.devices:
        result = analyze_device(snapshot, device)
        free = result.free_space
        assert 0 <= free.releasable_bytes <= free.free_cached_bytes
        assert free.stranded_free_bytes >= 0
        assert all(strander.stranded_bytes >= 0 for strander in result.stranders)


@pytest.mark.parametrize("seed", range(4))
def test_analyze_device_many_hostile_rows_takes_time_in_their_number(seed):
    n = 200_000
    snapshot = random_snapshot(seed, n, 1000, 20_000)

    began = time.process_time()
    analyze_device(snapshot, 0)
    analyze_device(snapshot, 1)

    assert time.process_time() - began < 30


def test_analyze_device_crowded_addresses_takes_bounded_time():
    """Every block overlaps thousands of other addresses: no pairwise search."""
    n = 200_000
    snapshot = random_snapshot(1, n, 1, 1)
    address = np.arange(n, dtype=np.uint64) * np.uint64(512)
    events = snapshot.events
    events.address[:] = address
    events.size_bytes[:] = 2**20 + 512
    events.action[:] = 0

    began = time.process_time()
    result = analyze_device(snapshot, 0)

    assert time.process_time() - began < 30
    assert not result.capture.is_consistent


@pytest.mark.parametrize("action", ["alloc", "free_requested", "free_completed"])
@pytest.mark.parametrize("context", ["all", "none"])
def test_trace_that_loses_one_kind_of_event_from_some_row_on(action: str, context: str) -> None:
    run = TrainingLoop(context=context)
    run.build()
    for _ in range(3):
        run.step()
        for block in run.forward():  # an evaluation
            run.free(block, USER)
    events = run.recording()["device_traces"][0]

    for first in range(0, len(events), 3):
        data = run.recording()
        data["device_traces"][0] = events[:first] + [
            e for e in events[first:] if e["action"] != action
        ]
        assert analyze_device(from_python(data), 0).device == 0


@pytest.mark.parametrize("n_bytes", [-(2**70), -1, 2**64, 2**70])
def test_capacity_that_a_damaged_file_gives_is_one_of_the_model(n_bytes: int) -> None:
    config = native_config(
        AllocatorSettings(), era=Era.ADDRESS, capacity_bytes=n_bytes, device_total_bytes=n_bytes
    )

    assert config.capacity_bytes == (0 if n_bytes < 0 else 2**64 - 1)
