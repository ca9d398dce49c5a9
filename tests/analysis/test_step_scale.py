"""How much larger a step is than those before it."""

from __future__ import annotations

from typing import Any

import pytest
from analysis.training_loop import ACTIVATION, BATCH, INPUT, LINEAR, TrainingLoop

from fragdoctor.analysis.step_scale import StepScale, step_scale
from fragdoctor.trace.trace import Trace


def scale_of(factor: float, n_steps: int = 4) -> StepScale | None:
    loop = TrainingLoop()
    loop.build()
    for _ in range(n_steps):
        loop.step()
    for _ in range(2):
        loop.new(int(factor * ACTIVATION), LINEAR)
    trace = Trace.of(loop.snapshot(), 0)
    return step_scale(trace, trace.n_events)


@pytest.mark.parametrize("factor", [1, 3])
def test_step_scale_is_of_the_largest_request_of_each_line(factor: int):
    scale = scale_of(factor)

    assert scale is not None
    assert scale.step == pytest.approx(factor, rel=0.01)


@pytest.mark.parametrize(("stack", "is_of_line"), [(BATCH, True), (LINEAR, False)])
def test_step_scale_tells_a_line_that_outgrew_its_requests_from_a_larger_step(
    stack: Any, *, is_of_line: bool
):
    loop = TrainingLoop()
    loop.build()
    for _ in range(4):
        loop.step()
    loop.new(ACTIVATION, LINEAR)
    for _ in range(2):
        asked = loop.new(3 * ACTIVATION, stack)
    trace = Trace.of(loop.snapshot(), 0)
    scale = step_scale(trace, int(trace.lives.start.max()))

    assert scale is not None
    assert (asked.size, scale.is_of_line) == (3 * ACTIVATION, is_of_line)
    assert set(scale.usual_bytes.tolist()) == {INPUT if is_of_line else ACTIVATION}


def test_step_scale_is_unknown_without_steps_to_compare_with():
    assert scale_of(3, n_steps=1) is None
