"""The reader gives what the stock unpickler gives, for every schema and both writers."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path

import builders
import numpy as np
import pytest
from builders import BASE, MIB, alloc, block, cpp_pickled, frame, pickled, segment, small, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from stock import assert_same, from_python, load_stock

from fragdoctor.errors import (
    InputError,
    LimitExceeded,
    NotASnapshot,
    RefusedSnapshot,
    TruncatedSnapshot,
)
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.inputs.source import zstd_module
from fragdoctor.limits import Limits
from fragdoctor.model.snapshot import Action, BlockState, HostSegment, SegmentType


def shared_recordings() -> list[Path]:
    from conftest import shared_dir

    folder = shared_dir()
    return sorted([*folder.glob("snapshots/*/*.pickle"), *folder.glob("real/*.pickle")])


@pytest.mark.shared
@pytest.mark.parametrize("path", shared_recordings(), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_recording_equals_stock_unpickler(path):
    assert_same(load_stock(path), read_snapshot(path))


def test_samples_equal_stock_unpickler(samples):
    for path in sorted(samples.glob("*.pickle")):
        assert_same(load_stock(path), read_snapshot(path))


def test_column_of_one_value_at_first_keeps_what_comes_later():
    notes = [*[""] * 200, "cache", "", "pool"]
    events = [alloc(BASE + i * MIB, MIB) | {"user_metadata": n} for i, n in enumerate(notes)]

    result = read_snapshot(pickled(snapshot(events=events)))

    assert [result.strings[i] for i in result.events.user_metadata.tolist()] == notes


@pytest.mark.parametrize(("notes", "stride"), [(("", "", ""), 0), (("", "cache", ""), 4)])
def test_column_of_one_value_takes_no_memory_for_each_event(notes, stride):
    events = [alloc(BASE + i * MIB, MIB) | {"user_metadata": n} for i, n in enumerate(notes)]

    result = read_snapshot(pickled(snapshot(events=events)))

    column = result.events.user_metadata
    assert [result.strings[i] for i in column.tolist()] == [*notes]
    assert column.strides == (stride,)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_python_writer_equals_stock_unpickler(protocol):
    data = small()

    result = read_snapshot(pickled(data, protocol))

    assert_same(from_python(data), result)
    assert (protocol, "python") == (result.provenance.protocol, result.provenance.writer)


def test_pure_python_pickler_equals_stock_unpickler():
    data = snapshot(events=[alloc(BASE + i * 512, 512, time_us=i) for i in range(2501)])
    file = io.BytesIO()
    pickle._Pickler(file, 4).dump(data)

    assert_same(from_python(data), read_snapshot(file.getvalue()))


def test_cpp_writer_equals_stock_unpickler():
    data = small()
    raw = cpp_pickled(data)

    result = read_snapshot(raw)

    assert pickle.loads(raw) == data
    assert_same(from_python(data), result)
    assert (result.provenance.protocol, result.provenance.writer) == (2, "c++")


def test_cpp_writer_long_trace_without_batches():
    data = snapshot(events=[alloc(BASE + i * 512, i, time_us=i) for i in range(5000)])

    assert_same(from_python(data), read_snapshot(cpp_pickled(data)))


@pytest.mark.parametrize("n", [1, 999, 1000, 1001, 2000, 2001])
def test_batches_of_the_pickle_module_are_joined(n):
    data = snapshot(events=[alloc(BASE + i * 512, i) for i in range(n)])

    assert_same(from_python(data), read_snapshot(pickled(data)))


def test_json_equals_stock_unpickler():
    data = small()

    result = read_snapshot(json.dumps(data, indent=1).encode())

    assert_same(from_python(data), result)
    assert (result.provenance.container, result.provenance.protocol) == ("json", -1)


def test_json_long_lists_are_joined():
    data = snapshot(events=[alloc(BASE + i * 512, i) for i in range(2500)], extra=list(range(3000)))

    result = read_snapshot(json.dumps(data).encode())

    assert_same(from_python(data), result)
    assert result.provenance.unknown_keys == {"extra": 1}


def test_list_of_segments_is_read():
    data = small()["segments"]

    result = read_snapshot(pickled(data))

    assert_same(from_python(data), result)
    assert result.provenance.is_list
    assert len(result.events) == 0
    assert not result.settings.is_recorded


def test_schema_of_2_0_addresses_and_history_are_derived():
    stack = [frame("a.py", 1, "f")]
    newest = {"addr": BASE, "real_size": 300, "frames": stack}
    older = {"addr": BASE, "real_size": 77, "frames": []}
    data = {
        "segments": [
            {
                "device": 0, "address": BASE, "total_size": 2 * MIB, "allocated_size": 512,
                "active_size": 512, "requested_size": 300, "stream": 0, "segment_type": "small",
                "blocks": [
                    {"size": 512, "state": "active_allocated", "history": [newest, older]},
                    {"size": 2 * MIB - 512, "requested_size": 0, "state": "inactive"},
                ],
            }
        ],
        "device_traces": [[{"action": "alloc", "addr": BASE, "size": 300, "stream": 0}]],
    }  # fmt: skip

    result = read_snapshot(pickled(data))

    assert_same(from_python(data), result)
    assert result.blocks.address.tolist() == [BASE, BASE + 512]
    assert result.blocks.requested_bytes.tolist() == [300, 0]
    assert result.stack(int(result.blocks.stack[0]))[0].function == "f"
    assert result.blocks.stack[1] == -1
    assert result.events.time_us[0] == -1
    assert (result.provenance.version_low, result.provenance.version_high) == ("2.0", "2.0")


def test_empty_stack_and_missing_stack_differ():
    data = snapshot(events=[alloc(BASE, 512, frames=[]), alloc(BASE, 512)])

    result = read_snapshot(pickled(data))

    assert_same(from_python(data), result)
    assert result.stack(int(result.events.stack[0])) == ()
    assert result.events.stack[0] >= 0
    assert result.events.stack[1] == -1


def test_signed_addresses_and_huge_lines_are_taken_modulo_2_64():
    top = 0xFFFF800000000000
    data = snapshot(
        segment(top - 2**64, block(512, address=top - 2**64), frames=[frame(line=2**64 - 1)]),
        events=[alloc(top - 2**64, 512, frames=[frame(line=-1)])],
    )

    result = read_snapshot(pickled(data))

    assert_same(from_python(data), result)
    assert top == int(result.events.address[0])
    assert result.stack(int(result.events.stack[0]))[0].line == 2**64 - 1


def test_unknown_keys_of_any_plain_value_are_skipped_and_counted():
    data = small()
    shared = [frame("x.py", 3, "g")]
    odd = {1: [2, (3, None)], "b": {"c": 1.5, "deep": [[["x"]]]}, (1, 2): 10**30, None: True}
    data["novelty"] = odd
    data["again"] = odd
    data["more"] = {"action": 5, "size": -1}
    for i, e in enumerate(data["device_traces"][0]):
        e["novelty"] = [shared, {"size": "wrong"}, i]
        e["frames"] = shared
    data["segments"][0]["blocks"][0]["colour"] = "red"
    data["segments"][0]["blocks"][0]["category"] = "parameter"
    data["segments"][0]["tail"] = [{"state": 1}]
    shared[0]["fx_node_op"] = "call"
    shared[0]["weight"] = 2

    python = pickled(data)
    odd[(1, 2)] = 2**62  # the C++ writer has no larger integers
    for raw in (python, cpp_pickled(data)):
        result = read_snapshot(raw)

        assert_same(from_python(data), result)
        assert result.provenance.unknown_keys == {
            "novelty": 1, "again": 1, "more": 1, "events.novelty": 6, "blocks.colour": 1,
            "segments.tail": 1, "frames.weight": 1,
        }  # fmt: skip


def test_unknown_values_are_counted():
    data = small()
    data["device_traces"][0][1]["action"] = "teleport"
    data["segments"][0]["blocks"][0]["state"] = "frozen"
    data["segments"][0]["segment_type"] = "medium"

    result = read_snapshot(pickled(data))

    assert result.events.action[1] == Action.OTHER
    assert result.blocks.state[0] == BlockState.OTHER
    assert result.segments.kind[0] == SegmentType.UNKNOWN
    assert result.provenance.unknown_values == {
        "events.action=teleport": 1,
        "blocks.state=frozen": 1,
        "segments.segment_type=medium": 1,
    }


def test_distinct_unknown_keys_are_bounded():
    data = small() | {f"key{i}": i for i in range(500)}

    result = read_snapshot(pickled(data), limits=Limits(max_unknown_keys=10))

    assert len(result.provenance.unknown_keys) == 11
    assert sum(result.provenance.unknown_keys.values()) == 500


def test_lone_surrogates_are_replaced_and_counted():
    data = snapshot(events=[alloc(BASE, 512, frames=[frame("a\ud800b\udfff.py")])])

    for raw in (pickled(data), cpp_pickled(data), json.dumps(data).encode()):
        result = read_snapshot(raw)

        assert result.stack(0)[0].filename == "a\ufffdb\ufffd.py"
        assert result.provenance.n_replaced_strings == 1


def test_surrogate_pairs_of_json_become_one_character():
    data = snapshot(events=[alloc(BASE, 512, frames=[frame("\U0001f525.py")])])

    assert read_snapshot(json.dumps(data).encode()).stack(0)[0].filename == "\U0001f525.py"


def test_host_memory_is_kept_apart():
    data = small()
    data["host_segments"] = [{"address": 5, "size": 4096, "allocated": True}, {"total_size": 1}]
    data["host_traces"] = [[alloc(BASE, 1), alloc(BASE, 2)], [alloc(BASE, 3)]]
    n_events = len(data["device_traces"][0])

    result = read_snapshot(pickled(data))

    assert (HostSegment(5, 4096, True), HostSegment(-1, 1, None)) == result.host_segments
    assert result.host_events is not None
    assert [1, 2, 3] == result.host_events.size_bytes.tolist()
    assert n_events == len(result.events)


def test_host_traces_before_device_traces_are_left_out():
    data = {"host_traces": [[alloc(BASE, 9)]], **small()}

    assert_same(from_python(data), read_snapshot(pickled(data)))


def test_duplicate_keys_the_last_wins():
    raw = json.dumps(small())[:-1] + ', "segments": []}'

    result = read_snapshot(raw.encode())

    assert len(result.segments) == 0
    assert len(result.blocks) == 0


def test_keys_in_any_order_are_read():
    data = small()
    for e in data["device_traces"][0]:
        items = sorted(e.items(), reverse=True)
        e.clear()
        e.update(items)

    assert_same(from_python(data), read_snapshot(pickled(data)))


def test_bytes_after_stop_are_ignored_and_noted():
    raw = pickled(small())

    assert not read_snapshot(raw).provenance.has_trailing_bytes
    assert read_snapshot(raw + b"\x00\x00").provenance.has_trailing_bytes


def test_several_devices_have_their_own_rows():
    data = snapshot(traces=[[], [alloc(BASE, 1)], [], [alloc(BASE, 2), alloc(BASE, 3)]])

    result = read_snapshot(pickled(data))

    assert result.events.offsets.tolist() == [0, 0, 1, 1, 3]
    assert result.devices == (1, 3)


@pytest.mark.parametrize("pack", [gzip.compress, zstd_module().compress])
def test_compressed_snapshot_is_read(pack):
    data = small()

    result = read_snapshot(pack(pickled(data)))

    assert_same(from_python(data), result)
    assert result.provenance.compression in {"gzip", "zstd"}


def test_every_truncation_is_told_as_such():
    raw = pickled(small())

    for n in range(1, len(raw)):
        with pytest.raises(TruncatedSnapshot) as caught:
            read_snapshot(raw[:n])
        assert n == caught.value.offset


def test_every_truncation_of_json_is_told_as_such():
    raw = json.dumps(small()).encode()

    for n in range(2, len(raw)):
        with pytest.raises(TruncatedSnapshot):
            read_snapshot(raw[:n])


def test_path_and_stream_and_stdin_give_the_same(tmp_path):
    path = tmp_path / "s.pickle"
    path.write_bytes(pickled(small()))
    program = "import sys; from fragdoctor.inputs.snapshot_reader import read_snapshot\n"
    program += "s = read_snapshot('-'); print(len(s.events), s.provenance.source)"

    with path.open("rb") as file:
        assert_same(read_snapshot(path), read_snapshot(file))
    with path.open("rb") as file:
        out = subprocess.run(
            [sys.executable, "-c", program], stdin=file, capture_output=True, text=True, check=True
        )
    assert out.stdout.strip() == "6 -"


def test_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="does not exist") as caught:
        read_snapshot(tmp_path / "none.pickle")

    assert caught.value.exit_code == 2


def test_folder_is_an_input_error(tmp_path):
    with pytest.raises(InputError):
        read_snapshot(tmp_path)


def test_input_limit_is_kept():
    with pytest.raises(LimitExceeded):
        read_snapshot(pickled(small()), limits=Limits(max_input_bytes=100))


def test_pipe_that_gives_single_bytes_is_read():
    class Trickle:
        def __init__(self, raw):
            self.rest = raw

        def readable(self):
            return True

        def read(self, n=-1):
            first, self.rest = self.rest[:1], self.rest[1:]
            return first

    assert_same(from_python(small()), read_snapshot(Trickle(pickled(small()))))


def test_error_of_the_stream_goes_through():
    raw = pickled(snapshot(events=[alloc(BASE + i, i) for i in range(2000)]))

    class Broken:
        def __init__(self):
            self.n = 0

        def read(self, n=-1):
            self.n += 1
            if self.n > 1:
                raise KeyboardInterrupt
            return raw[:4096]

    with pytest.raises(KeyboardInterrupt):
        read_snapshot(Broken())


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
SIZES = st.integers(0, 2**63 - 1)  # the C++ writer has no larger ones
ADDRESSES = st.integers(-(2**63), 2**64 - 1)
FRAMES = st.lists(st.builds(frame, st.text(max_size=4), ADDRESSES, st.text(max_size=4)), max_size=4)
EVENTS = st.builds(
    builders.event,
    st.sampled_from(
        [a.name.lower() for a in Action if a is not Action.OTHER and a is not Action.OOM]
    ),
    ADDRESSES,
    SIZES,
    stream=ADDRESSES,
    frames=st.none() | FRAMES,
    time_us=st.integers(0, 2**63 - 1),
    pool=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
BLOCKS = st.builds(
    block,
    st.integers(0, 2**60),  # three of them are a segment, which PyTorch writes in 63 bits
    st.sampled_from(["inactive", "active_allocated", "active_pending_free"]),
    frames=FRAMES,
)


@settings(deadline=None)
@given(
    st.lists(st.lists(EVENTS, max_size=5), max_size=3),
    st.lists(st.lists(BLOCKS, max_size=3), max_size=3),
    PLAIN,
    st.sampled_from(["python 2", "python 5", "c++"]),
)
def test_any_snapshot_equals_stock_unpickler(traces, segments, extra, writer):
    data = snapshot(
        *(segment(BASE + (i << 40), *blocks) for i, blocks in enumerate(segments)),
        traces=traces,
        extra=extra,
    )
    raw = cpp_pickled(data) if writer == "c++" else pickled(data, int(writer[-1]))

    assert_same(from_python(pickle.loads(raw)), read_snapshot(raw))


def test_frame_ends_between_values_wherever_that_is_and_never_in_one():
    raw = pickled(small())
    begin = raw.index(pickle.FRAME) + 9
    ends = {at for *_, at in pickletools.genops(raw) if at is not None and at >= begin}
    whole = read_snapshot(raw)

    for end in range(begin, len(raw) + 1):
        framed = raw[: begin - 8] + (end - begin).to_bytes(8, "little") + raw[begin:]
        if end in {*ends, len(raw)}:
            assert_same(whole, read_snapshot(framed))
        else:
            with pytest.raises(RefusedSnapshot, match="beyond the end of its frame"):
                read_snapshot(framed)


@settings(deadline=None)
@given(st.data())
def test_mutated_file_is_never_read_more_leniently_than_stock(data):
    raw = bytearray(pickled(small()))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))

    try:
        result = read_snapshot(bytes(raw))
    except InputError as error:
        assert error.exit_code in (2, 3)  # noqa: PT017
        return
    assert_same(from_python(pickle.loads(raw)), result)


def test_setting_that_is_a_tuple_is_left_out_as_unknown():
    raw = pickled(snapshot(conf={"expandable_segments": True, "strange": ()}))

    result = read_snapshot(raw)

    assert "strange" not in result.settings.other
    assert_same(from_python(pickle.loads(raw)), result)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(raw):
    try:
        read_snapshot(b"\x80\x04" + raw)
    except InputError as error:
        assert error.message  # noqa: PT017


def test_columns_have_their_documented_types():
    result = read_snapshot(pickled(small()))

    assert np.uint64 == result.events.address.dtype
    assert result.pools.shape == (1, 2)
    assert result.segments.is_expandable.dtype == np.bool_


def test_text_is_not_a_snapshot():
    with pytest.raises(NotASnapshot, match="text"):
        read_snapshot(b"hello")


def test_reader_leaves_no_file_open(tmp_path):
    path = tmp_path / "s.pickle"
    path.write_bytes(pickled(small()))
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        pytest.skip("this system does not list open files")
    before = len(list(folder.iterdir()))

    for _ in range(20):
        read_snapshot(path)

    assert before == len(list(folder.iterdir()))
