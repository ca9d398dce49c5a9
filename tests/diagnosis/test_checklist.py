"""The checklist: order, sources, and honest skips."""

from __future__ import annotations

from builders import MIB, pickled
from builders import snapshot as built
from msgspec.structs import replace
from oom_messages import case_of, new_style
from oom_snapshots import calm, full, holes

from fragdoctor import load
from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.model.case import Case, MemoryStats, Overrides, StatsSeries
from fragdoctor.model.diagnosis import Status

IDS = [
    "capacity",
    "gap",
    "retries",
    "largest_free_block",
    "fragmentation_ratio",
    "outside_pytorch",
    "growth",
    "size_diversity",
    "capture_quality",
    "settings",
]
FULL_MESSAGE = new_style("48.00 MiB", "2.93 GiB", "12.00 MiB", "2.91 GiB", "7.31 MiB")


def items(case):
    return {item.id: item for item in diagnose(case).checklist}


def test_checklist_any_case_has_all_items_in_the_documents_order():
    for case in (Case(), case_of(FULL_MESSAGE), Case(snapshot=holes())):
        assert [item.id for item in diagnose(case).checklist] == IDS


def test_checklist_item_is_skipped_with_a_reason_or_names_its_source():
    for case in (Case(), case_of(FULL_MESSAGE), Case(snapshot=calm()), Case(snapshot=holes())):
        for item in diagnose(case).checklist:
            assert item.detail
            assert bool(item.source) == (item.status is not Status.SKIP), item


def test_checklist_message_alone_cannot_count_retries_or_see_growth():
    found = items(case_of(FULL_MESSAGE))

    assert Status.SKIP is found["retries"].status
    assert Status.SKIP is found["growth"].status
    assert Status.FAIL is found["capacity"].status


def test_checklist_message_with_little_cache_bounds_the_largest_block():
    found = items(case_of(FULL_MESSAGE))["largest_free_block"]

    assert Status.FAIL is found.status
    assert "7.31 MiB" in found.value


def test_checklist_statistics_beside_a_message_answer_the_retries():
    stats = StatsSeries((MemoryStats({"num_alloc_retries": 3, "num_ooms": 1}),))

    found = items(case_of(FULL_MESSAGE, stats=stats))["retries"]

    assert (found.status, found.value, found.source) == (Status.WARN, "3", "memory_stats")


def test_checklist_holes_fail_the_largest_block_and_the_gap():
    found = items(Case(snapshot=holes()))

    assert found["largest_free_block"].value == "40.00 MiB for 200.00 MiB"
    assert Status.FAIL is found["largest_free_block"].status
    assert Status.FAIL is found["gap"].status
    assert Status.PASS is found["capacity"].status


def test_checklist_ratio_above_thirty_per_cent_of_returnable_cache_passes():
    found = items(Case(snapshot=calm()))["fragmentation_ratio"]

    assert found.value == "71%"
    assert Status.PASS is found.status
    assert "rule of thumb" in found.detail


def test_checklist_ratio_above_thirty_per_cent_after_a_failure_warns():
    found = items(Case(snapshot=holes()))["fragmentation_ratio"]

    assert (found.status, found.value) == (Status.WARN, "40%")


def test_checklist_capacity_needs_the_size_of_the_device():
    unknown = items(Case(snapshot=calm()))["capacity"]
    known = items(Case(snapshot=calm(), overrides=Overrides(capacity_bytes=290 * MIB)))["capacity"]

    assert Status.SKIP is unknown.status
    assert "--capacity" in unknown.detail
    assert Status.WARN is known.status


def test_checklist_outside_memory_of_a_full_device_is_reported():
    text = new_style("200.00 MiB", "16.00 GiB", "50.00 MiB", "1000.00 MiB", "0 bytes")
    case = case_of(text, snapshot=full())

    found = items(case)["outside_pytorch"]

    assert Status.FAIL is found.status
    assert "14.97 GiB" in found.value


def test_checklist_idle_collection_threshold_is_a_warning():
    case = Case(snapshot=holes(conf="garbage_collection_threshold:0.8", free_mib=50,
                               garbage_collection_threshold=0.8))  # fmt: skip

    found = items(case)["settings"]

    assert Status.WARN is found.status
    assert "no effect" in found.detail


def test_capacity_without_history_speaks_of_now_and_not_of_a_peak():
    state = replace(calm(), events=load(pickled(built())).events)

    found = items(Case(snapshot=state))

    assert found["capacity"].value.startswith("Live memory is ")
    assert "message" not in found["retries"].detail
