from __future__ import annotations

from fragdoctor.model.case import BundleDevice, BundleFacts, Overrides
from fragdoctor.model.oom import OtherProcess
from fragdoctor.rules.refusal import Refusal
from fragdoctor.rules.refusal_bundle import with_bundle

GIB = 1 << 30
REFUSAL = Refusal(
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


def test_bundle_tells_device_processes_and_fraction_of_the_same_moment() -> None:
    bundle = facts(
        total_bytes=8 * GIB,
        process_bytes=2 * GIB,
        other_processes=(OtherProcess(7, 5 * GIB),),
        memory_fraction=0.5,
    )

    found = with_bundle(REFUSAL, bundle, Overrides())

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

    found = with_bundle(REFUSAL, facts(total_bytes=8 * GIB, other_processes=listed), Overrides())

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

    found = with_bundle(REFUSAL, bundle, Overrides())

    assert (8 * GIB, None, GIB // 2) == (found.total_bytes, found.process_bytes, found.free_bytes)


def test_bundle_yields_to_the_message_and_to_the_user() -> None:
    told = Refusal(
        **{f: getattr(REFUSAL, f) for f in ("source", "requested_bytes", "device")},
        total_bytes=GIB,
        process_bytes=5,
        reserved_bytes=4,
    )
    bundle = facts(total_bytes=8 * GIB, process_bytes=2 * GIB, memory_fraction=0.5)

    found = with_bundle(told, bundle, Overrides(memory_fraction=0.9))

    assert (GIB, 5, None) == (found.total_bytes, found.process_bytes, found.limit_bytes)


def test_no_bundle_or_another_device_changes_nothing() -> None:
    other = BundleFacts("oom", devices=(BundleDevice(1, total_bytes=GIB),))

    assert REFUSAL == with_bundle(REFUSAL, None, Overrides())
    assert REFUSAL == with_bundle(REFUSAL, other, Overrides())
