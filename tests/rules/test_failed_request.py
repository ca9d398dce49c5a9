"""The figures of a failed request from messages, events and bundles."""

from __future__ import annotations

import pytest
from builders import MIB
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from oom_messages import GIB, message
from oom_snapshots import full, holes, late_free

from fragdoctor.diagnosis.pipeline import build_contexts
from fragdoctor.model.case import BundleDevice, BundleFacts, Case, OtherProcess, Overrides
from fragdoctor.rules.failed_request import FailedRequest, rounding_bytes
from fragdoctor.rules.request_sources import request_of_message, split_processes, with_bundle


def of(case):
    return build_contexts(case)[0].failed_request


def test_from_message_takes_pools_out_of_allocated():
    printed = request_of_message(
        message(
            requested_bytes=200 * MIB,
            allocated_bytes=360 * MIB,
            private_pools_bytes=180 * MIB,
            reserved_bytes=360 * MIB,
            reserved_unallocated_bytes=0,
            free_bytes=140 * MIB,
        )
    )

    assert printed.live_bytes == 180 * MIB
    assert printed.cache_bytes == 180 * MIB
    assert printed.margin_bytes == 120 * MIB


def test_from_message_of_the_async_backend_has_no_limit():
    printed = request_of_message(
        message(requested_bytes=MIB, allocated_bytes=GIB, free_bytes=0, limit_bytes=1 << 64)
    )

    assert printed.limit_bytes is None
    assert printed.available_bytes == GIB


def test_from_message_versions_that_hide_the_limit():
    def hides(low, high):
        printed = message(requested_bytes=MIB, version_low=low, version_high=high)
        return request_of_message(printed).may_hide_limit

    assert hides("2.1", "2.1")
    assert hides("2.2", "2.8")
    assert not hides("2.10", "")
    assert not hides("1.4", "1.9")


def test_from_message_active_memory_counts_as_live():
    printed = request_of_message(
        message(
            backend="npu",
            requested_bytes=GIB,
            allocated_bytes=20 * GIB,
            active_bytes=22 * GIB,
            reserved_bytes=25 * GIB,
        )
    )

    assert (printed.live_bytes, printed.pending_bytes) == (22 * GIB, 2 * GIB)
    assert printed.unallocated_bytes == 3 * GIB


def test_from_event_is_exact_and_knows_the_largest_hole():
    exact = of(Case(snapshot=holes()))

    assert exact.is_exact
    assert exact.largest_free_block_bytes == 40 * MIB
    assert (exact.live_bytes, exact.unallocated_bytes) == (600 * MIB, 400 * MIB)
    assert exact.tolerance_bytes == 0


def test_from_event_counts_frees_of_the_last_flush():
    assert of(Case(snapshot=late_free())).late_free_bytes == 100 * MIB
    assert of(Case(snapshot=holes())).late_free_bytes == 0


def test_at_the_end_of_a_trace_is_not_caught():
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
    r = FailedRequest("trace", 24 * MIB, free_bytes=38 * MIB, expandable=True)

    assert r.mapped_bytes == 40 * MIB
    assert r.fails_by_pages


FAILED = FailedRequest(
    source="trace",
    requested_bytes=GIB,
    free_bytes=GIB // 2,
    live_bytes=GIB,
    unallocated_bytes=0,
    reserved_bytes=GIB,
    is_exact=True,
    may_hide_limit=True,
    device=0,
)


def facts(**device) -> BundleFacts:
    return BundleFacts("oom", oom_device=0, devices=(BundleDevice(0, **device),))


def test_bundle_adds_device_processes_and_fraction_of_the_same_moment() -> None:
    bundle = facts(
        total_bytes=8 * GIB,
        process_bytes=2 * GIB,
        other_processes=(OtherProcess(7, 5 * GIB),),
        memory_fraction=0.5,
    )

    found = with_bundle(FAILED, bundle, Overrides())

    assert (8 * GIB, 4 * GIB, 2 * GIB) == (
        found.total_bytes,
        found.limit_bytes,
        found.process_bytes,
    )
    assert (5 * GIB, GIB, False) == (
        found.other_bytes,
        found.non_pytorch_bytes,
        found.may_hide_limit,
    )


def test_bundle_of_a_container_tells_this_process_by_its_size() -> None:
    listed = (OtherProcess(7, 5 * GIB), OtherProcess(8, GIB + GIB // 4))

    found = with_bundle(FAILED, facts(total_bytes=8 * GIB, other_processes=listed), Overrides())

    assert ((listed[0],), 8, GIB + GIB // 4) == (
        tuple(found.other_processes),
        found.own_pid,
        found.process_bytes,
    )


def test_bundle_of_another_moment_tells_only_what_does_not_change() -> None:
    bundle = BundleFacts(
        "exit",
        devices=(BundleDevice(0, total_bytes=8 * GIB, free_bytes=3, process_bytes=2 * GIB),),
    )

    found = with_bundle(FAILED, bundle, Overrides())

    assert (8 * GIB, None, GIB // 2) == (found.total_bytes, found.process_bytes, found.free_bytes)


def test_bundle_yields_to_the_message_and_to_the_user() -> None:
    told = FailedRequest(
        **{f: getattr(FAILED, f) for f in ("source", "requested_bytes", "device")},
        total_bytes=GIB,
        process_bytes=5,
        reserved_bytes=4,
    )
    bundle = facts(total_bytes=8 * GIB, process_bytes=2 * GIB, memory_fraction=0.5)

    found = with_bundle(told, bundle, Overrides(memory_fraction=0.9))

    assert (GIB, 5, None) == (found.total_bytes, found.process_bytes, found.limit_bytes)


def test_no_bundle_or_another_device_changes_nothing() -> None:
    other = BundleFacts("oom", devices=(BundleDevice(1, total_bytes=GIB),))

    assert FAILED == with_bundle(FAILED, None, Overrides())
    assert FAILED == with_bundle(FAILED, other, Overrides())


def test_request_and_its_segment_are_told_apart():
    small = FailedRequest("trace", requested_bytes=20 * MIB, block_bytes=3 * MIB)
    whole = FailedRequest("trace", requested_bytes=20 * MIB, block_bytes=20 * MIB)
    printed = FailedRequest("oom message", requested_bytes=20 * MIB)
    alike = FailedRequest("trace", requested_bytes=3 * GIB + MIB, block_bytes=3 * GIB)

    assert small.request_text == "request of 3.00 MiB (a segment of 20.00 MiB)"
    assert whole.request_text == printed.request_text == "request of 20.00 MiB"
    assert alike.request_text == "request of 3.00 GiB"  # no figure twice


@pytest.mark.parametrize(
    ("own", "listed", "expected"),
    [
        # together with ours more than is in use: it is ours, whatever NCCL and graphs add to it
        (None, [(7, 79.0)], (79.0, [])),
        (None, [(7, 1.0), (8, 77.5)], (77.5, [7])),
        # beside ours it fits: another one
        (None, [(7, 9.0)], (None, [7])),
        (71.0, [(7, 8.0)], (71.0, [7])),
    ],
)
def test_process_that_cannot_be_beside_ours_is_ours(own, listed, expected):
    gib = 1 << 30
    others = tuple(OtherProcess(pid, int(size * gib)) for pid, size in listed)

    found, rest, _ = split_processes(
        own and int(own * gib), others, int(69.5 * gib), int(79.2 * gib)
    )

    assert (found and found / gib, [p.pid for p in rest]) == expected


@pytest.mark.parametrize(
    ("asked", "free", "covered"),
    [(16, 30, False), (16, 49, True), (8000, 8070, False), (8000, 8090, True), (8000, 7000, False)],
)
def test_free_memory_just_above_the_request_is_a_full_card(asked, free, covered):
    r = FailedRequest("oom message", asked * MIB, free_bytes=free * MIB)

    assert r.is_covered_by_free is covered
    assert (r.uncovered_bytes > 0) is not covered


@pytest.mark.parametrize(("unallocated", "real"), [(300, False), (900, True)])
def test_holes_of_a_few_per_cent_are_the_state_of_a_full_card(unallocated, real):
    printed = FailedRequest(
        "oom message",
        20 * MIB,
        live_bytes=(6000 - unallocated) * MIB,
        unallocated_bytes=unallocated * MIB,
        reserved_bytes=6000 * MIB,
        free_bytes=2 * MIB,
    )

    assert printed.has_real_holes is real
    assert replace(printed, is_exact=True).has_real_holes
