"""Rules of fragmentation, each on an input with its pattern and one without."""

from __future__ import annotations

import pytest
from builders import MIB, alloc, block, columns, event, frame, oom, segment, segment_alloc
from builders import settings as recorded
from builders import snapshot as assembled
from oom_snapshots import at, full, holes, late_free
from rule_inputs import (
    assert_finds,
    found,
)

from fragdoctor.model.case import Case
from fragdoctor.rules.registry import find_rule


def pool_snapshot(pool=(0, 1), asked_mib=200):
    low = at(0)
    stack = [frame("graph.py", 3, "capture")]
    events = [segment_alloc(low, 100 * MIB, pool=pool), alloc(low, 20 * MIB, pool=pool)]
    events.append(oom(asked_mib * MIB, 150 * MIB))
    blocks = (block(20 * MIB, "active_allocated", frames=stack), block(80 * MIB))
    return columns(assembled(segment(low, *blocks, pool=pool), events=events))


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


CASES = [
    ("FD101", Case(snapshot=holes()), Case(snapshot=full())),
    ("FD102", Case(snapshot=holes()), Case(snapshot=full())),
    ("FD105", Case(snapshot=pool_snapshot()), Case(snapshot=pool_snapshot(pool=(0, 0)))),
    ("FD106", Case(snapshot=pending_snapshot()), Case(snapshot=holes())),
    ("FD106", Case(snapshot=late_free()), Case(snapshot=full())),
    ("FD108", Case(snapshot=wasteful_snapshot()), Case(snapshot=full())),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "shows", "shows_not"), CASES, ids=[find_rule(code).name for code, *_ in CASES]
)
def test_rule_finds_its_pattern_and_nothing_else(code, shows, shows_not):
    assert_finds(code, shows, shows_not)


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
