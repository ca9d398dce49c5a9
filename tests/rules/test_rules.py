"""Each rule on the smallest input that shows its pattern, and on one that does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import MIB, alloc, block, columns, event, frame, oom, segment, segment_alloc
from builders import settings as recorded
from builders import snapshot as assembled
from oom_messages import GIB, case_of, log_of, message, new_style, process
from oom_snapshots import LINE, at, full, holes, late_free

from fragdoctor.diagnosis.contexts import build_contexts
from fragdoctor.model.case import Case, Overrides
from fragdoctor.model.finding import Severity
from fragdoctor.model.snapshot import Provenance
from fragdoctor.rules.registry import RULES, find_rule
from fragdoctor.rules.rule import run_rules

FULL = new_style("48.00 MiB", "2.93 GiB", "12.00 MiB", "2.91 GiB", "7.31 MiB")


def found(code, case):
    return list(run_rules([find_rule(code)], build_contexts(case)).findings)


def pool_snapshot(pool=(0, 1), asked_mib=200):
    low = at(0)
    stack = [frame("graph.py", 3, "capture")]
    events = [segment_alloc(low, 100 * MIB, pool=pool), alloc(low, 20 * MIB, pool=pool)]
    events.append(oom(asked_mib * MIB, 150 * MIB))
    blocks = (block(20 * MIB, "active_allocated", frames=stack), block(80 * MIB))
    return columns(assembled(segment(low, *blocks, pool=pool), events=events))


def stream_snapshot(stream=7):
    low = at(0)
    blocks = (block(20 * MIB, "active_allocated", frames=LINE), block(80 * MIB))
    events = [
        segment_alloc(low, 100 * MIB, stream=stream),
        alloc(low, 20 * MIB, stream=stream, frames=LINE),
        oom(60 * MIB, 10 * MIB, frames=LINE),
    ]
    return columns(assembled(segment(low, *blocks, stream=stream), events=events))


def settings_snapshot(conf="", **changes):
    low = at(0)
    events = [segment_alloc(low, 20 * MIB), alloc(low, 20 * MIB)]
    return columns(
        assembled(
            segment(low, block(20 * MIB, "active_allocated")),
            events=events,
            conf=recorded(PYTORCH_CUDA_ALLOC_CONF=conf, **changes),
        )
    )


def pending_snapshot():
    low = at(0)
    blocks = (block(20 * MIB, "active_pending_free"), block(20 * MIB, "active_allocated"))
    events = [
        segment_alloc(low, 40 * MIB),
        alloc(low, 20 * MIB),
        alloc(low + 20 * MIB, 20 * MIB),
        event("free_requested", low, 20 * MIB),
    ]
    return columns(assembled(segment(low, *blocks), events=events))


def wasteful_snapshot():
    low = at(0)
    blocks = (block(20 * MIB, "active_allocated", requested=17 * MIB),)
    events = [segment_alloc(low, 20 * MIB), alloc(low, 17 * MIB)]
    return columns(assembled(segment(low, *blocks), events=events))


def untiled_snapshot():
    data = segment(at(0), block(20 * MIB, "active_allocated"))
    data["total_size"] = 40 * MIB
    return columns(assembled(data))


def spiky_snapshot():
    low, events, segments = at(0), [], []
    events.append(segment_alloc(low, 20 * MIB))
    events.append(alloc(low, 20 * MIB))
    segments.append(segment(low, block(20 * MIB, "active_allocated")))
    step = at(1)
    events.append(segment_alloc(step, 40 * MIB))
    for _ in range(6):
        events.append(alloc(step, 40 * MIB))
        events += [event("free_requested", step, 40 * MIB), event("free_completed", step, 40 * MIB)]
    segments.append(segment(step, block(40 * MIB, requested=40 * MIB)))
    for i in range(2, 8):
        events += [segment_alloc(at(i), 40 * MIB), alloc(at(i), 40 * MIB)]
        segments.append(segment(at(i), block(40 * MIB, "active_allocated")))
    events.append(oom(400 * MIB, 10 * MIB))
    return columns(assembled(*segments, events=events))


def with_unknown_keys():
    snapshot = full()
    origin = Provenance(unknown_keys={"events.colour": 3, "blocks.mood": 1})
    return replace(snapshot, provenance=origin)


def caught_snapshot():
    low = at(0)
    events = [
        oom(4000 * MIB, 500 * MIB, frames=LINE),
        segment_alloc(low, 20 * MIB),
        alloc(low, 20 * MIB),
    ]
    return columns(assembled(segment(low, block(20 * MIB, "active_allocated")), events=events))


LIMITED = new_style(
    "384.00 MiB", "16.00 GiB", "13.07 GiB", "2.91 GiB", "17.46 MiB", allowed="3.20 GiB"
)
SHARED_DEVICE = new_style(
    "128.00 MiB", "8.00 GiB", "68.00 MiB", "1.10 GiB", "20.34 MiB",
    processes=process(4242, "6.35 GiB"), own="1.59 GiB",
)  # fmt: skip
CROWDED = new_style("1.00 GiB", "24.00 GiB", "0.20 GiB", "18.00 GiB", "0.30 GiB", own="23.50 GiB")
OPTIMIZER = [frame("/x/site-packages/torch/optim/adam.py", 5, "_init_group"), *LINE]


CASES = [
    ("FD101", Case(snapshot=holes()), Case(snapshot=full())),
    ("FD102", Case(snapshot=holes()), Case(snapshot=full())),
    ("FD105", Case(snapshot=pool_snapshot()), Case(snapshot=pool_snapshot(pool=(0, 0)))),
    ("FD106", Case(snapshot=pending_snapshot()), Case(snapshot=holes())),
    ("FD106", Case(snapshot=late_free()), Case(snapshot=full())),
    ("FD107", Case(snapshot=stream_snapshot()), Case(snapshot=stream_snapshot(stream=0))),
    ("FD108", Case(snapshot=wasteful_snapshot()), Case(snapshot=full())),
    ("FD201", Case(snapshot=full()), Case(snapshot=holes())),
    ("FD202", Case(oom=log_of(message(requested_bytes=2 * GIB, total_bytes=GIB))),
     case_of(FULL)),
    ("FD203", Case(snapshot=spiky_snapshot()), Case(snapshot=full())),
    ("FD204", Case(snapshot=full(frames=OPTIMIZER)), Case(snapshot=full())),
    ("FD206", Case(snapshot=caught_snapshot()), Case(snapshot=full())),
    ("FD301", case_of(LIMITED), case_of(FULL)),
    ("FD301", Case(snapshot=full(free_mib=4000)), Case(snapshot=full())),
    ("FD302", Case(snapshot=settings_snapshot(garbage_collection_threshold=0.8)),
     Case(snapshot=settings_snapshot(garbage_collection_threshold=0.8),
          overrides=Overrides(memory_fraction=0.5))),
    ("FD303", Case(snapshot=settings_snapshot(max_split_size=128 * MIB,
                                              expandable_segments=True)),
     Case(snapshot=settings_snapshot(expandable_segments=True))),
    ("FD304", Case(snapshot=settings_snapshot("large_segment_size_mb:64"),
                   overrides=Overrides(torch_version="2.4.1")),
     Case(snapshot=settings_snapshot("large_segment_size_mb:64"),
          overrides=Overrides(torch_version="2.12.1"))),
    ("FD305", Case(snapshot=settings_snapshot("backend:cudaMallocAsync,max_split_size_mb:64",
                                              max_split_size=64 * MIB)),
     Case(snapshot=settings_snapshot("max_split_size_mb:64", max_split_size=64 * MIB))),
    ("FD501", case_of(SHARED_DEVICE), case_of(FULL)),
    ("FD502", case_of(CROWDED), case_of(SHARED_DEVICE)),
    ("FD503", Case(oom=log_of(*[message(rank=r, requested_bytes=MIB) for r in range(4)])),
     case_of(FULL)),
    ("FD504", Case(oom=log_of(message(kind="cudnn"))), case_of(FULL)),
    ("FD505", Case(oom=log_of(message(kind="host-ram", backend="cpu", is_device_oom=False))),
     case_of(FULL)),
    ("FD902", Case(snapshot=untiled_snapshot()), Case(snapshot=full())),
    ("FD903", Case(snapshot=settings_snapshot()), Case(snapshot=full())),
    ("FD905", Case(snapshot=untiled_snapshot()), Case(snapshot=full())),
    ("FD906", Case(snapshot=with_unknown_keys()), Case(snapshot=full())),
    ("FD907", Case(oom=log_of(message(requested_bytes=MIB))), case_of(FULL)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "shows", "shows_not"), CASES, ids=[find_rule(code).name for code, *_ in CASES]
)
def test_rule_finds_its_pattern_and_nothing_else(code, shows, shows_not):
    assert {code} == {f.code for f in found(code, shows)}
    assert found(code, shows_not) == []


def test_findings_have_numbers_fingerprints_and_one_sentence():
    cases = [Case(snapshot=holes()), Case(snapshot=full()), case_of(SHARED_DEVICE)]
    for case in cases:
        for finding in run_rules(RULES, build_contexts(case)).findings:
            assert finding.message.endswith(".")
            assert finding.fingerprint
            assert len(finding.fingerprint) == 16


def test_page_rounding_is_found_under_expandable_segments():
    snapshot = columns(
        assembled(
            segment(at(0), block(900 * MIB, "active_allocated"), is_expandable=True),
            events=[
                event("segment_map", at(0), 900 * MIB),
                alloc(at(0), 900 * MIB),
                oom(24 * MIB, 38 * MIB),
            ],
            conf=recorded(
                PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", expandable_segments=True
            ),
        )
    )

    findings = found("FD104", Case(snapshot=snapshot))

    assert ["40.00 MiB" in f.message for f in findings] == [True]


def test_caught_failure_is_no_error():
    findings = found("FD201", Case(snapshot=caught_snapshot()))

    assert [f.severity for f in findings] == [Severity.WARNING]
