"""DataFrames of a snapshot: the same facts as the columns, in words."""

from __future__ import annotations

import pandas as pd
import pytest
from builders import BASE, MIB, alloc, block, columns, event, frame, oom, segment, small, snapshot
from stock import load_stock

from fragdoctor.inputs.snapshot_reader import read_snapshot

STACK = [frame("train.py", 10, "forward"), frame("train.py", 99, "<module>")]


def test_events_are_rows_in_words():
    frame_ = columns(small()).events_frame()

    assert frame_["action"].tolist() == [
        "segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "oom"
    ]  # fmt: skip
    assert frame_["size_bytes"].tolist()[:2] == [2 * MIB, 500]
    assert frame_["address"].tolist()[1] == BASE
    assert frame_["time_us"].tolist() == [1, 2, 3, 4, 5, 6]
    assert set(frame_["device"]) == {0}
    assert set(frame_["pool"]) == {"(0, 0)"}
    assert frame_["location"].tolist()[1] == "train.py:10 in forward"
    assert frame_["compile_context"].tolist()[1] == "N/A"
    assert frame_["user_metadata"].tolist()[1] == ""


def test_oom_has_its_free_bytes_and_other_rows_none():
    free = columns(small()).events_frame()["oom_free_bytes"]

    assert free.tolist()[-1] == MIB
    assert free.isna().tolist() == [True] * 5 + [False]


def test_what_the_file_does_not_say_is_missing():
    row = {"action": "alloc", "addr": BASE, "size": 1, "stream": 0}

    frame_ = columns(snapshot(events=[row])).events_frame()

    for column in ("time_us", "pool", "compile_context", "user_metadata", "location"):
        assert frame_[column].isna().all(), column


def test_empty_stack_is_an_empty_text():
    frame_ = columns(snapshot(events=[alloc(BASE, 1, frames=[])])).events_frame()

    assert frame_["location"].tolist() == [""]


def test_one_device_gives_its_rows_alone():
    data = snapshot(
        traces=[
            [alloc(BASE, 1)],
            [],
            [alloc(BASE, 2), oom(5, 7)],
        ]
    )
    result = columns(data)

    assert result.events_frame()["device"].tolist() == [0, 2, 2]
    assert result.events_frame(2)["size_bytes"].tolist() == [2, 5]
    assert result.events_frame(2)["oom_free_bytes"].tolist()[1] == 7
    assert result.events_frame(0)["oom_free_bytes"].isna().all()
    assert len(result.events_frame(1)) == len(result.events_frame(9)) == 0


def test_stream_is_the_handle_of_the_file():
    frame_ = columns(snapshot(events=[alloc(BASE, 1, stream=-1), alloc(BASE, 1)])).events_frame()

    assert frame_["stream"].tolist() == [2**64 - 1, 0]


def test_an_action_of_a_newer_version_is_other():
    frame_ = columns(snapshot(events=[event("brand_new", BASE, 1)])).events_frame()

    assert frame_["action"].tolist() == ["other"]


def test_segments_are_rows_in_words():
    data = snapshot(
        segment(BASE, block(512, "active_allocated", frames=STACK), block(2 * MIB - 512)),
        segment(BASE + 32 * MIB, block(20 * MIB), device=1, pool=(0, 3), frames=STACK),
    )

    frame_ = columns(data).segments_frame()

    assert frame_["kind"].tolist() == ["small", "large"]
    assert frame_["n_blocks"].tolist() == [2, 1]
    assert frame_["device"].tolist() == [0, 1]
    assert frame_["pool"].tolist() == ["(0, 0)", "(0, 3)"]
    assert frame_["total_bytes"].tolist() == [2 * MIB, 20 * MIB]
    assert frame_["allocated_bytes"].tolist() == [512, 0]
    assert frame_["location"].tolist()[1] == "train.py:10 in forward"


def test_blocks_name_their_segment():
    frame_ = columns(small()).blocks_frame()

    assert frame_["segment"].tolist() == [0, 0, 1, 1]
    assert frame_["state"].tolist() == ["allocated", "inactive", "pending_free", "inactive"]
    assert frame_["address"].tolist()[:2] == [BASE, BASE + 512]


def test_snapshot_without_anything_gives_empty_frames():
    result = columns(snapshot(traces=[]))

    for frame_ in (result.events_frame(), result.segments_frame(), result.blocks_frame()):
        assert isinstance(frame_, pd.DataFrame)
        assert len(frame_) == 0


@pytest.mark.parametrize("name", ["two_devices_oom.pickle", "private_pool_oom.pickle"])
def test_frames_of_a_sample_agree_with_its_columns(samples, name):
    result = read_snapshot(samples / name)
    stock = load_stock(samples / name)

    frame_ = result.events_frame()

    assert frame_["size_bytes"].tolist() == stock.events.size_bytes.tolist()
    assert frame_["address"].tolist() == stock.events.address.tolist()
    stacks = [stock.stack(int(i)) for i in stock.events.stack]  # noqa: PD013 - of frames
    innermost = [f"{s[0].filename}:{s[0].line} in {s[0].function}" for s in stacks if s]
    assert [text for text in frame_["location"].dropna() if text] == innermost
    assert len(innermost) > 0
    assert result.blocks_frame()["size_bytes"].sum() == result.segments_frame()["total_bytes"].sum()
