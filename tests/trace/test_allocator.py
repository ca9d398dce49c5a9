from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fragdoctor._native import _ext
from fragdoctor.errors import ConfigError, OutOfMemory, SimulationError
from fragdoctor.model.settings import Era, parse_conf
from fragdoctor.trace.allocator import Allocator, native_config
from fragdoctor.units import MIB

CONFS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:64",
    "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.5",
    "large_segment_size_mb:64,expandable_segments:True",
)


@st.composite
def operations(draw):
    sizes = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(MIB, 90 * MIB))
    kinds = st.one_of(
        st.tuples(st.just("malloc"), sizes, st.integers(0, 2)),
        st.tuples(st.just("free"), st.integers(0, 1000), st.integers(0, 3)),
        st.tuples(st.just("empty"), st.just(0), st.just(0)),
    )
    return draw(st.lists(kinds, max_size=60))


def play(allocator, ops):
    """Run operations; return the live addresses and everything that was answered."""
    live, answers = [], []
    for kind, value, stream in ops:
        if kind == "malloc":
            try:
                address = allocator.malloc(value, stream)
            except OutOfMemory as error:
                answers.append(str(error))
                continue
            live.append(address)
            answers.append(address)
        elif kind == "free" and live:
            address = live.pop(value % len(live))
            if stream == 3:
                allocator.record_stream(address, 1)
            allocator.free(address)
        elif kind == "empty":
            allocator.empty_cache()
    return live, answers


@settings(max_examples=60, deadline=None)
@given(ops=operations(), conf=st.sampled_from(CONFS), version=st.sampled_from(["2.11.0", "2.15.0"]))
def test_segments_after_any_operations_are_tiled_and_add_up(ops, conf, version):
    allocator = Allocator(conf, 80 * MIB, version, memory_fraction=0.9)

    live, _ = play(allocator, ops)

    segments = allocator.segments()
    end = 0
    for segment in segments:
        assert segment.address >= end
        end = segment.address
        for block in segment.blocks:
            assert block.address == end
            assert block.size_bytes > 0
            end += block.size_bytes
        assert end == segment.address + segment.total_bytes
    blocks = [b for s in segments for b in s.blocks]
    active = [b for b in blocks if b.state != "inactive"]
    allocated = [b for b in blocks if b.state == "active_allocated"]
    assert allocator.reserved_bytes == sum(s.total_bytes for s in segments)
    assert allocator.active_bytes == sum(b.size_bytes for b in active)
    assert allocator.allocated_bytes == sum(b.size_bytes for b in allocated)
    assert allocator.requested_bytes == sum(b.requested_bytes for b in active)
    assert sorted(live) == [b.address for b in allocated]
    assert allocator.allocated_bytes <= allocator.active_bytes <= allocator.reserved_bytes
    assert allocator.reserved_bytes <= 0.9 * 300 * MIB
    assert allocator.peak_reserved_bytes >= allocator.peak_allocated_bytes


@settings(max_examples=40, deadline=None)
@given(ops=operations(), conf=st.sampled_from(CONFS))
def test_all_freed_and_flushed_leaves_nothing(ops, conf):
    allocator = Allocator(conf, 300 * MIB)
    live, _ = play(allocator, ops)

    for address in live:
        allocator.free(address)
    allocator.empty_cache()

    assert allocator.reserved_bytes == 0
    assert allocator.active_bytes == 0
    assert allocator.segments() == []


@settings(max_examples=40, deadline=None)
@given(ops=operations(), conf=st.sampled_from(CONFS))
def test_same_operations_twice_give_the_same_answers(ops, conf):
    first, second = Allocator(conf, 200 * MIB), Allocator(conf, 200 * MIB)

    assert play(first, ops) == play(second, ops)
    assert first.segments() == second.segments()
    assert first.driver_calls == second.driver_calls


def test_alternate_blocks_freed_cannot_hold_a_larger_one():
    allocator = Allocator(capacity_bytes=1024 * MIB)
    blocks = [allocator.malloc(100 * MIB) for _ in range(10)]
    for address in blocks[::2]:
        allocator.free(address)

    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(600 * MIB)

    error = caught.value
    assert error.requested_bytes == error.alloc_bytes == 600 * MIB
    assert error.total_bytes == 1024 * MIB
    assert error.free_bytes == 524 * MIB
    assert error.allocated_bytes == error.reserved_bytes == 500 * MIB
    assert error.limit_bytes is None
    assert allocator.alloc_retries == allocator.ooms == 1


def test_small_requests_share_one_segment():
    allocator = Allocator()

    first, second = allocator.malloc(1), allocator.malloc(1000)

    assert first == 0x700000000000
    assert second == first + 512
    (segment,) = allocator.segments()
    assert segment.total_bytes == 2 * MIB
    assert segment.segment_type == "small"
    assert not segment.is_expandable
    assert [b.size_bytes for b in segment.blocks] == [512, 1024, 2 * MIB - 1536]
    assert [b.requested_bytes for b in segment.blocks][:2] == [1, 1000]


def test_free_block_of_another_stream_is_not_taken():
    allocator = Allocator()
    allocator.free(allocator.malloc(30 * MIB, stream=0))

    allocator.malloc(30 * MIB, stream=7)

    assert [s.stream for s in allocator.segments()] == [0, 7]


def test_recorded_stream_delays_reuse_to_the_next_request():
    allocator = Allocator()
    address = allocator.malloc(30 * MIB)
    allocator.record_stream(address, 1)

    allocator.free(address)

    assert (allocator.allocated_bytes, allocator.active_bytes) == (0, 30 * MIB)
    assert allocator.segments()[0].blocks[0].state == "active_pending_free"
    assert allocator.malloc(30 * MIB) == address


def test_zero_bytes_are_no_block():
    allocator = Allocator()

    assert allocator.malloc(0) == 0
    allocator.free(0)

    assert allocator.reserved_bytes == 0


def test_free_of_unknown_address_is_refused():
    allocator = Allocator()
    address = allocator.malloc(512)
    allocator.free(address)

    with pytest.raises(SimulationError, match="No live block"):
        allocator.free(address)
    with pytest.raises(SimulationError, match="No live block"):
        allocator.record_stream(123, 1)


def test_more_than_an_exabyte_is_refused_without_counting():
    allocator = Allocator()

    with pytest.raises(OutOfMemory, match="more than 1EB"):
        allocator.malloc(2**60)

    assert allocator.ooms == 0


@pytest.mark.parametrize(("size", "stream"), [(-1, 0), (1, -1)])
def test_negative_arguments_are_refused(size, stream):
    with pytest.raises(ValueError, match="cannot be negative"):
        Allocator().malloc(size, stream)


def test_fraction_limits_reserved_memory_and_is_named_in_the_message():
    allocator = Allocator(capacity_bytes=1024 * MIB, memory_fraction=0.5)

    with pytest.raises(OutOfMemory, match=r"512\.00 MiB allowed; ") as caught:
        allocator.malloc(600 * MIB)

    assert caught.value.limit_bytes == 512 * MIB
    allocator.set_per_process_memory_fraction(1.0)
    assert allocator.malloc(600 * MIB)


@pytest.mark.parametrize(
    ("version", "part"),
    [
        ("1.5.0", "20.00 MiB (GPU 0; 10.00 MiB total capacity; 0 bytes already allocated;"),
        ("2.0.1", "reserved in total by PyTorch) If reserved memory is >> allocated"),
        ("2.1.2", "total capacty of 10.00 MiB"),
        ("2.4.1", "cuda.html#environment-variables)"),
        ("2.9.1", "try setting PYTORCH_ALLOC_CONF=expandable_segments:True"),
        ("2.12.1", "optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"),
    ],
)
def test_message_has_the_words_of_the_version(version, part):
    allocator = Allocator(capacity_bytes=10 * MIB, torch_version=version)

    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(3 * MIB)

    assert part in str(caught.value)


def test_private_pool_memory_is_not_given_to_others():
    allocator = Allocator(capacity_bytes=100 * MIB)
    pool = allocator.create_pool()
    with allocator.use_pool(pool):
        allocator.free(allocator.malloc(60 * MIB))

    with pytest.raises(OutOfMemory, match=r"with 60\.00 MiB allocated in private pools"):
        allocator.malloc(60 * MIB)
    allocator.drop_pool(pool)

    assert allocator.malloc(60 * MIB)


def test_settings_changed_at_run_time_apply_to_new_segments():
    allocator = Allocator("max_split_size_mb:64")
    allocator.malloc(30 * MIB)

    allocator.set_allocator_settings("expandable_segments:True")
    allocator.malloc(30 * MIB)
    allocator.set_allocator_settings("")

    assert [s.is_expandable for s in allocator.segments()] == [True, False]
    assert allocator.settings.expandable_segments
    assert allocator.settings.max_split_bytes is None


def test_other_backend_is_refused():
    with pytest.raises(SimulationError, match="native allocator"):
        Allocator("backend:cudaMallocAsync")


def test_setting_too_new_for_the_version_is_refused():
    with pytest.raises(ConfigError, match="does not know"):
        Allocator("large_segment_size_mb:64", torch_version="2.4.1")


@pytest.mark.parametrize("bad", [{"capacity_bytes": -1}, {"memory_fraction": 1.5}])
def test_arguments_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match="must lie between"):
        Allocator(**bad)


def test_failures_with_private_pools_cost_no_look_at_every_block() -> None:
    """A replay on a device that is too small fails thousands of times, and reads no message."""
    config = native_config(parse_conf(""), era=Era.ADDRESS, capacity_bytes=128 * MIB)
    core = _ext.AllocatorCore(config)
    pool = core.pool_create()
    kept = [core.malloc(512, 0, pool) for _ in range(200_000)]
    core.free(kept[0])
    start = time.process_time()

    for _ in range(20_000):
        assert core.malloc(256 * MIB) is None

    assert time.process_time() - start < 2  # block by block: 4 * 10^9 looks
    n_reserved = core.reserved_bytes
    assert core.last_oom()["private_free_bytes"] == n_reserved - 199_999 * 512
