"""The figures of a refusal from messages and events."""

from __future__ import annotations

from builders import MIB
from hypothesis import given
from hypothesis import strategies as st
from oom_messages import GIB, message
from oom_snapshots import full, holes, late_free

from fragdoctor.diagnosis.contexts import build_contexts
from fragdoctor.model.case import Case
from fragdoctor.rules.refusal import Refusal, rounding_bytes
from fragdoctor.rules.refusal_message import refusal_from_message


def of(case):
    return build_contexts(case)[0].refusal


def test_refusal_from_message_takes_pools_out_of_allocated():
    told = refusal_from_message(
        message(
            requested_bytes=200 * MIB,
            allocated_bytes=360 * MIB,
            private_pools_bytes=180 * MIB,
            reserved_bytes=360 * MIB,
            reserved_unallocated_bytes=0,
            free_bytes=140 * MIB,
        )
    )

    assert told.live_bytes == 180 * MIB
    assert told.cache_bytes == 180 * MIB
    assert told.margin_bytes == 120 * MIB


def test_refusal_from_message_of_the_async_backend_has_no_limit():
    told = refusal_from_message(
        message(requested_bytes=MIB, allocated_bytes=GIB, free_bytes=0, limit_bytes=1 << 64)
    )

    assert told.limit_bytes is None
    assert told.available_bytes == GIB


def test_refusal_from_message_versions_that_hide_the_limit():
    def hides(low, high):
        told = message(requested_bytes=MIB, version_low=low, version_high=high)
        return refusal_from_message(told).may_hide_limit

    assert hides("2.1", "2.1")
    assert hides("2.2", "2.8")
    assert not hides("2.10", "")
    assert not hides("1.4", "1.9")


def test_refusal_from_message_active_memory_counts_as_live():
    told = refusal_from_message(
        message(
            backend="npu",
            requested_bytes=GIB,
            allocated_bytes=20 * GIB,
            active_bytes=22 * GIB,
            reserved_bytes=25 * GIB,
        )
    )

    assert (told.live_bytes, told.pending_bytes) == (22 * GIB, 2 * GIB)
    assert told.unallocated_bytes == 3 * GIB


def test_refusal_from_event_is_exact_and_knows_the_largest_hole():
    exact = of(Case(snapshot=holes()))

    assert exact.is_exact
    assert exact.largest_free_block_bytes == 40 * MIB
    assert (exact.live_bytes, exact.unallocated_bytes) == (600 * MIB, 400 * MIB)
    assert exact.tolerance_bytes == 0


def test_refusal_from_event_counts_frees_of_the_last_flush():
    assert of(Case(snapshot=late_free())).n_late_free_bytes == 100 * MIB
    assert of(Case(snapshot=holes())).n_late_free_bytes == 0


def test_refusal_at_the_end_of_a_trace_is_not_caught():
    assert not of(Case(snapshot=full())).is_caught


def test_rounding_grows_with_the_printed_unit():
    assert rounding_bytes(512) == 0
    assert rounding_bytes(500 * MIB) < rounding_bytes(2 * GIB)
    assert rounding_bytes(2 * GIB) <= 6 * MIB


@given(st.integers(0, 1 << 45))
def test_rounding_bounds_what_printing_loses(n_bytes):
    unit = 1024 if n_bytes <= MIB else MIB if n_bytes <= GIB else GIB
    printed = n_bytes if n_bytes <= 1024 else int(round(n_bytes / unit, 2) * unit)

    assert abs(printed - n_bytes) <= rounding_bytes(n_bytes)


def test_mapped_bytes_are_whole_pages():
    r = Refusal("trace", 24 * MIB, free_bytes=38 * MIB, expandable=True)

    assert r.mapped_bytes == 40 * MIB
    assert r.is_refused_by_pages
