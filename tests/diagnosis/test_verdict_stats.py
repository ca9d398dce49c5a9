"""The verdict on statistics alone."""

from __future__ import annotations

from builders import MIB

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.model.case import Case, MemoryStats, StatsSeries
from fragdoctor.model.diagnosis import Cause, Status


def record(allocated=500, reserved=1000, split=50, retries=0, ooms=0, **more):
    return MemoryStats(
        {
            "allocated_bytes.all.current": allocated * MIB,
            "allocated_bytes.all.peak": allocated * MIB,
            "active_bytes.all.current": allocated * MIB,
            "reserved_bytes.all.current": reserved * MIB,
            "inactive_split_bytes.all.current": split * MIB,
            "num_alloc_retries": retries,
            "num_ooms": ooms,
        },
        **more,
    )


def of(*records, is_series=False):
    return diagnose(Case(stats=StatsSeries(records, is_series=is_series)))


def test_diagnose_stats_without_retries_are_healthy_whatever_the_gap():
    diagnosis = of(record(allocated=100, reserved=1000, split=10))

    assert Cause.HEALTHY is diagnosis.verdict.cause
    ratio = next(item for item in diagnosis.checklist if item.id == "fragmentation_ratio")
    assert "a rule of thumb that PyTorch does not document" in ratio.detail


def test_diagnose_stats_after_failures_with_large_splits_suggest_fragmentation():
    verdict = of(record(split=300, retries=3, ooms=1)).verdict

    assert Cause.FRAGMENTATION is verdict.cause
    assert Cause.CAPACITY in verdict.also


def test_diagnose_stats_after_failures_without_splits_suggest_capacity():
    diagnosis = of(record(allocated=990, split=5, retries=1, ooms=1))

    assert Cause.CAPACITY is diagnosis.verdict.cause
    # Holes of 5 MiB are not worth a setting before the batch is.
    assert "smaller-batch" == diagnosis.recommendations[0].code


def test_diagnose_series_whose_retries_climb_says_so():
    series = [record(retries=n) for n in (0, 3, 9, 17)]

    diagnosis = of(*series, is_series=True)

    assert "climbs" in diagnosis.verdict.summary
    item = next(i for i in diagnosis.checklist if i.id == "retries")
    assert Status.FAIL is item.status


def test_diagnose_series_whose_memory_climbs_is_a_leak():
    series = [record(allocated=n) for n in (100, 200, 300, 400, 500)]

    diagnosis = of(*series, is_series=True)

    assert Cause.LEAK is diagnosis.verdict.cause
    assert "FD402" in [f.code for f in diagnosis.findings]


def test_diagnose_level_series_is_healthy():
    assert Cause.HEALTHY is of(*[record() for _ in range(6)], is_series=True).verdict.cause


def test_diagnose_stats_without_counters_are_unknown():
    assert Cause.UNKNOWN is of(MemoryStats({"reserved_bytes.all.current": MIB})).verdict.cause
