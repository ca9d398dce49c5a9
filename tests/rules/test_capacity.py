"""Rules of capacity, each on an input with its pattern and one without."""

from __future__ import annotations

import pytest
from analysis.training_loop import USER, TrainingLoop
from builders import MIB, alloc, block, columns, event, frame, oom, segment, segment_alloc
from builders import snapshot as assembled
from oom_messages import GIB, case_of, log_of, message
from oom_snapshots import LINE, at, full, holes
from rule_inputs import (
    FULL,
    assert_finds,
    caught_snapshot,
    found,
)
from stock import from_python

from fragdoctor.model.case import Case
from fragdoctor.model.finding import Severity
from fragdoctor.rules.registry import find_rule

OPTIMIZER = [frame("/x/site-packages/torch/optim/adam.py", 5, "_init_group"), *LINE]


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


CASES = [
    ("FD201", Case(snapshot=full()), Case(snapshot=holes())),
    ("FD202", Case(oom=log_of(message(requested_bytes=2 * GIB, total_bytes=GIB))),
     case_of(FULL)),
    ("FD203", Case(snapshot=spiky_snapshot()), Case(snapshot=full())),
    ("FD204", Case(snapshot=full(frames=OPTIMIZER)), Case(snapshot=full())),
    ("FD206", Case(snapshot=caught_snapshot()), Case(snapshot=full())),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "shows", "shows_not"), CASES, ids=[find_rule(code).name for code, *_ in CASES]
)
def test_rule_finds_its_pattern_and_nothing_else(code, shows, shows_not):
    assert_finds(code, shows, shows_not)


def test_caught_failure_is_no_error():
    findings = found("FD201", Case(snapshot=caught_snapshot()))

    assert [f.severity for f in findings] == [Severity.WARNING]


def test_stages_of_a_first_step_are_no_peak_on_a_second_gpu_either():
    loop = TrainingLoop()
    loop.build()
    for _ in range(4):
        loop.free(loop.new(40 * MIB, USER), USER)
    loop.new(300 * MIB, USER)
    for _ in range(3):
        loop.step()
    data = loop.recording()
    other = [segment_alloc(at(0), 20 * MIB)]
    for _ in range(100):
        other += [alloc(at(0), 20 * MIB), event("free_requested", at(0), 20 * MIB),
                  event("free_completed", at(0), 20 * MIB)]  # fmt: skip
    data["device_traces"].insert(0, other)
    for one in data["segments"]:
        one["device"] = 1

    assert found("FD203", Case(snapshot=from_python(data))) == []
