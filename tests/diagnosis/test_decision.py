"""The decision table, row by row, with figures as a message prints them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from oom_messages import GIB, MIB, message

from fragdoctor.diagnosis.decision import decide
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.rules.failed_request import FailedRequest
from fragdoctor.rules.request_sources import request_of_message


def failed(asked, total, free, live, unallocated, **more):
    """Return a failed from figures in MiB."""
    figures = {
        "source": "oom message",
        "requested_bytes": int(asked * MIB),
        "total_bytes": int(total * MIB),
        "free_bytes": int(free * MIB),
        "live_bytes": int(live * MIB),
        "unallocated_bytes": int(unallocated * MIB),
        "reserved_bytes": int((live + unallocated) * MIB),
    }
    return FailedRequest(**{**figures, **more})


def causes(case):
    """Return the cause of a verdict, and those that are possible besides."""
    found = decide(case)
    return [found.cause, *found.also]


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        # asked, total, free, live, unallocated
        (failed(2 * 1024 * 1024, 81920, 1000, 70000, 100), Cause.SIZE_BUG),
        (failed(100_000, 81920, 60_000, 8000, 100), Cause.CAPACITY),
        (failed(400, 16384, 13000, 3000, 20, limit_bytes=3200 * MIB), Cause.MEMORY_LIMIT),
        (failed(2048, 24576, 200, 22000, 100), Cause.CAPACITY),
        (failed(500, 4000, 300, 2700, 700), Cause.FRAGMENTATION),
        # the next request of that size would not fit, however the memory were packed
        (failed(500, 4000, 400, 3000, 300), Cause.CAPACITY),
        (failed(500, 4000, 400, 2500, 800), Cause.FRAGMENTATION),
        (failed(1000, 15000, 920, 12590, 287), Cause.CAPACITY),
        (failed(20, 8000, 2, 7800, 30), Cause.CAPACITY),
        (failed(200, 500, 140, 180, 0, pools_free_bytes=180 * MIB, reserved_bytes=360 * MIB),
         Cause.PRIVATE_POOLS),
        # what lies free in pools would do, the ordinary holes would not
        (failed(32, 1267, 29, 464, 5, pools_free_bytes=768 * MIB, reserved_bytes=1237 * MIB),
         Cause.PRIVATE_POOLS),
        # both would do: the larger holes are blamed
        (failed(24, 1906, 6, 826, 200, pools_free_bytes=874 * MIB, reserved_bytes=1900 * MIB),
         Cause.PRIVATE_POOLS),
        (failed(500, 4000, 100, 2200, 1000, pools_free_bytes=600 * MIB,
                reserved_bytes=3800 * MIB), Cause.FRAGMENTATION),
        (failed(128, 24576, 60, 1100, 20), Cause.OTHER_PROCESS),
        (failed(128, 24576, 60, 1100, 20, process_bytes=23_000 * MIB), Cause.NON_PYTORCH_MEMORY),
        # more than a context and its libraries take is nobody's need, even on a card that is full
        (failed(72, 24207, 33, 17336, 87, process_bytes=24_146 * MIB), Cause.NON_PYTORCH_MEMORY),
        # a neighbor smaller than a context is a desktop, of which no program is to blame
        (failed(256, 3901, 138, 2263, 164), Cause.CAPACITY),
        (failed(256, 3901, 138, 1863, 164), Cause.OTHER_PROCESS),
        (failed(256, 8192, 60, 7000, 20, process_bytes=8_132 * MIB), Cause.CAPACITY),
        (failed(16, 24576, 34, 22600, 1400), Cause.CAPACITY),  # 18 MiB too much is a full card
        (failed(16, 24576, 534, 22600, 900), Cause.UNKNOWN),
    ],
)  # fmt: skip
def test_decide_row_of_the_table_gives_its_cause(case, cause):
    found = decide(case)

    assert cause is found.cause
    assert found.summary


def test_decide_slim_margin_without_large_cache_is_capacity_and_perhaps_fragmentation():
    assert causes(failed(1000, 15000, 920, 12590, 287)) == [Cause.CAPACITY, Cause.FRAGMENTATION]


def test_decide_within_rounding_of_the_message_is_not_called_proven():
    live, free, asked = int(4.66 * GIB), 98 * MIB, 100 * MIB
    close = FailedRequest("oom message", asked, None, 6 * GIB, free, live, 0, reserved_bytes=live)

    assert Confidence.LIKELY is decide(close).confidence
    assert Confidence.PROVEN is decide(replace(close, is_exact=True)).confidence


def test_decide_request_above_the_device_wins_over_another_process():
    found = causes(
        request_of_message(
            message(
                requested_bytes=113 * GIB,
                total_bytes=79 * GIB,
                free_bytes=58 * GIB,
                allocated_bytes=8 * GIB,
                reserved_unallocated_bytes=GIB,
                reserved_bytes=9 * GIB,
                process_bytes=10 * GIB,
                other_processes=((7, 11 * GIB),),
            )
        )
    )

    assert found == [Cause.CAPACITY, Cause.SIZE_BUG]


def test_decide_listed_process_is_proof_remainder_is_not():
    listed = request_of_message(
        message(
            requested_bytes=GIB,
            total_bytes=24 * GIB,
            free_bytes=MIB,
            allocated_bytes=8 * GIB,
            reserved_bytes=8 * GIB,
            process_bytes=int(8.5 * GIB),
            other_processes=((7, 15 * GIB),),
        )
    )
    remainder = replace(listed, other_processes=(), process_bytes=None)

    assert Confidence.PROVEN is decide(listed).confidence
    assert Confidence.LIKELY is decide(remainder).confidence
    assert Cause.OTHER_PROCESS is decide(remainder).cause


def test_decide_own_process_in_a_container_is_not_another():
    told = request_of_message(
        message(
            requested_bytes=GIB,
            total_bytes=24 * GIB,
            free_bytes=512 * MIB,
            allocated_bytes=22 * GIB,
            reserved_bytes=int(22.5 * GIB),
            reserved_unallocated_bytes=GIB // 2,
            other_processes=((99, 23 * GIB), (7, 300 * MIB)),
        )
    )

    assert told.own_pid == 99
    assert [p.pid for p in told.other_processes] == [7]
    assert Cause.OTHER_PROCESS is not decide(told).cause


def test_decide_limit_with_large_holes_is_fragmentation_and_limit():
    case = failed(316, 2350, 356, 1598, 396, limit_bytes=2280 * MIB)

    assert causes(case) == [Cause.FRAGMENTATION, Cause.MEMORY_LIMIT]


def test_decide_exact_free_enough_points_to_a_fraction():
    case = failed(384, 16384, 13382, 2985, 17, is_exact=True)

    assert Cause.MEMORY_LIMIT is decide(case).cause
    assert Confidence.LIKELY is decide(case).confidence


def test_decide_holes_under_a_hidden_fraction_count_what_is_reserved():
    case = failed(3, 4000, 2700, 1000, 41, is_exact=True)
    found = decide(replace(case, largest_free_block_bytes=2 * MIB))

    assert found.cause is Cause.FRAGMENTATION
    assert "although 41.00 MiB of what is reserved was free" in found.summary
    assert "2.64 GiB is free on the device, but something keeps PyTorch" in found.summary


def test_decide_page_rounding_explains_a_refusal_with_enough_free():
    case = failed(24, 1024, 38, 900, 60, is_exact=True, expandable=True)

    assert case.fails_by_pages
    assert Cause.MEMORY_LIMIT not in causes(case)


def test_decide_block_that_came_free_too_late_is_pending_frees():
    case = failed(800, 1000, 2, 100, 898, is_exact=True)
    late = replace(case, largest_free_block_bytes=898 * MIB, late_free_bytes=898 * MIB)

    assert Cause.PENDING_FREES is decide(late).cause
    assert Cause.PENDING_FREES is not decide(replace(late, late_free_bytes=0)).cause


def test_decide_pending_blocks_that_cover_the_lack_come_before_capacity():
    case = failed(300, 1000, 0, 900, 100, is_exact=True, pending_bytes=400 * MIB)

    assert causes(case) == [Cause.PENDING_FREES, Cause.CAPACITY]


@given(
    asked=st.integers(1, 4 * GIB),
    total=st.none() | st.integers(1, 100 * GIB),
    free=st.none() | st.integers(0, 100 * GIB),
    live=st.none() | st.integers(0, 100 * GIB),
    unallocated=st.integers(0, 50 * GIB),
    pools=st.integers(0, 10 * GIB),
    limit=st.none() | st.integers(0, 100 * GIB),
    exact=st.booleans(),
)
def test_decide_any_figures_give_a_reasoned_reading(
    asked, total, free, live, unallocated, pools, limit, exact
):
    reserved = None if live is None else live + unallocated + pools
    case = FailedRequest(
        "oom message", asked, None, total, free, live,
        None if live is None else unallocated, pools, 0, reserved, limit, is_exact=exact,
    )  # fmt: skip

    found = decide(case)

    assert found.summary
    assert len(causes(case)) == len(set(causes(case)))
    margin = case.margin_bytes
    if margin is not None and margin < -case.tolerance_bytes:
        assert found.cause is not Cause.FRAGMENTATION


def test_small_block_in_a_large_segment_is_no_proof_against_settings():
    """4 MiB ask the driver for 20; live memory and the block alone would fit."""
    figures = {"requested_bytes": 20 * MIB, "live_bytes": 990 * MIB, "reserved_bytes": 996 * MIB,
               "free_bytes": 4 * MIB, "unallocated_bytes": 6 * MIB, "is_exact": True}  # fmt: skip

    small = decide(FailedRequest("trace", block_bytes=4 * MIB, **figures))
    whole = decide(FailedRequest("trace", block_bytes=20 * MIB, **figures))

    assert (small.cause, small.confidence) == (Cause.CAPACITY, Confidence.LIKELY)
    assert "no allocator setting" not in small.summary
    assert (whole.cause, whole.confidence) == (Cause.CAPACITY, Confidence.PROVEN)
    assert "no allocator setting" in whole.summary


def test_rests_of_live_blocks_are_no_proof_against_settings():
    """Blocks of the default layout keep rests of up to 1 MiB that other layouts do not."""
    figures = {"requested_bytes": 20 * MIB, "block_bytes": 20 * MIB, "live_bytes": 990 * MIB,
               "reserved_bytes": 996 * MIB, "free_bytes": 4 * MIB, "unallocated_bytes": 6 * MIB,
               "is_exact": True}  # fmt: skip

    loose = decide(FailedRequest("trace", unsplit_bytes=11 * MIB, **figures))
    tight = decide(FailedRequest("trace", unsplit_bytes=9 * MIB, **figures))

    assert (loose.cause, loose.confidence) == (Cause.CAPACITY, Confidence.LIKELY)
    assert "no allocator setting" not in loose.summary
    assert (tight.cause, tight.confidence) == (Cause.CAPACITY, Confidence.PROVEN)


def test_request_beyond_device_and_all_that_is_live_is_a_wrong_size():
    wrong = decide(failed(265216, 6072, 4400, 108, 16))
    scores = decide(failed(265216, 6072, 400, 5000, 16))
    known = decide(failed(265216, 6072, 4400, 108, 16, doing="while attention made the scores"))

    assert wrong.cause is Cause.SIZE_BUG
    assert Cause.CAPACITY in wrong.also
    assert scores.cause is Cause.CAPACITY
    assert known.cause is Cause.CAPACITY


def test_more_live_than_the_device_has_lies_in_the_memory_of_the_host():
    paged = decide(failed(1823, 4096, 0, 7598, 1853))

    assert paged.cause is Cause.CAPACITY
    assert "moved the rest to the host's memory" in paged.summary


def test_free_memory_beyond_the_device_is_no_figure():
    printed = message(
        backend="rocm",
        requested_bytes=288 * MIB,
        total_bytes=512 * MIB,
        free_bytes=1 << 64,
        allocated_bytes=243 * MIB,
        reserved_unallocated_bytes=20 * MIB,
    )

    request = request_of_message(printed)

    assert printed.true_free_bytes is None
    assert request is not None
    assert request.free_bytes is None
