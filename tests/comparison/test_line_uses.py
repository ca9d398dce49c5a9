from __future__ import annotations

import pytest
from runs import Ask, case, columns_of

from fragdoctor.comparison import lines
from fragdoctor.comparison.compare_cases import compare_cases
from fragdoctor.comparison.compared_run import read_device
from fragdoctor.trace.trace import Trace
from fragdoctor.units import MIB

ASKS = (
    Ask(10, 40, "build"),
    Ask(50, 30, calls=("linear",)),
    Ask(50, 12, calls=("linear",), kept=False),
    Ask(60, 20, has_stack=False),
)


def test_line_holds_its_blocks_at_the_peak_and_now() -> None:
    snapshot = columns_of(*ASKS)

    device, _ = read_device(Trace.of(snapshot, 0))

    step = next(u for u in device.lines if u.place is not None and u.place.line == 50)
    assert (step.peak_bytes, step.n_peak) == (42 * MIB, 2)
    assert (step.now_bytes, step.n_now) == (30 * MIB, 1)
    assert step.sizes == ((30 * MIB, 1), (12 * MIB, 1))
    assert step.callees == {"linear"}


def test_all_lines_add_up_to_the_peak() -> None:
    snapshot = columns_of(*ASKS)

    device, analysis = read_device(Trace.of(snapshot, 0))

    assert analysis.timeline is not None
    assert sum(u.peak_bytes for u in device.lines) == analysis.timeline.peak_allocated_bytes
    assert [u.place for u in device.lines].count(None) == 1


def test_smallest_lines_are_summed_up_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINES", 1)

    comparison = compare_cases([("a", case(*ASKS)), ("b", case(*ASKS, Ask(70, 14)))])

    assert comparison.delta_bytes == sum(c.delta_bytes for c in comparison.lines) == 14 * MIB
    assert any("summed up" in note for note in comparison.notes)
