"""How much larger a step is than those before it."""

from __future__ import annotations

import pytest
from analysis.training_loop import ACTIVATION, LINEAR, TrainingLoop

from fragdoctor.analysis.step_scale import step_scale
from fragdoctor.trace.trace import Trace


def scale_of(factor: float, n_steps: int = 4) -> float | None:
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
    assert scale_of(factor) == pytest.approx(factor, rel=0.01)


def test_step_scale_is_unknown_without_steps_to_compare_with():
    assert scale_of(3, n_steps=1) is None
