from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.errors import ConfigError
from fragdoctor.future.steps import Steps
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.case import Case

SAMPLES = Path(__file__).parents[2] / "sample_snapshots"


@pytest.fixture(scope="module")
def case() -> Case:
    return Case(snapshot=read_snapshot(SAMPLES / "fragmentation_oom.pickle"))


@pytest.mark.parametrize("asked", ["peak", "oom", "oom:1", "end", "step:3", "event:1200", "STEP:1"])
def test_lines_and_categories_of_a_moment_add_up_to_what_is_allocated(case: Case, asked: str):
    told = diagnose(case, replays=False, at=asked)

    m = told.moment
    assert m is not None
    trace = told.analyses[m.device].trace
    assert sum(h.n_bytes for h in m.lines) == m.allocated_bytes
    assert sum(h.n_bytes for h in m.categories) == m.allocated_bytes
    assert m.allocated_bytes == trace.totals.allocated_bytes[m.event]
    assert [h.n_bytes for h in m.lines] == sorted((h.n_bytes for h in m.lines), reverse=True)


def test_peak_of_a_step_lies_in_it_and_is_its_highest(case: Case):
    told = diagnose(case, replays=False, at="step:3")
    m = told.moment
    trace = told.analyses[m.device].trace
    first, end = Steps.of(trace).rows[2:4].tolist()

    assert first < m.event <= end
    assert m.step == 3
    assert m.allocated_bytes == np.max(trace.totals.allocated_bytes[first + 1 : end + 1])


def test_moment_of_the_peak_is_the_highest_of_all_steps(case: Case):
    whole = diagnose(case, replays=False, at="peak").moment
    steps = [
        diagnose(case, replays=False, at=f"step:{n}").moment.allocated_bytes
        for n in range(1, whole.n_steps + 1)
    ]

    assert max(steps) == whole.allocated_bytes
    assert steps[whole.step - 1] == whole.allocated_bytes


def test_changes_between_two_moments_lead_from_one_to_the_other(case: Case):
    before = diagnose(case, replays=False, at="step:1").moment
    m = diagnose(case, replays=False, at="step:1..step:3").moment

    assert (m.since, m.since_event) == (before.asked, before.event)
    held = {h.location: h.n_bytes for h in m.lines}
    for change in m.changes:
        was = next((h.n_bytes for h in before.lines if h.location == change.location), 0)
        assert held.get(change.location, 0) - was == change.n_bytes
    assert sum(h.n_bytes for h in m.changes) == m.allocated_bytes - before.allocated_bytes
    back = diagnose(case, replays=False, at="step:3..step:1").moment
    assert {(h.location, -h.n_bytes, -h.n_blocks) for h in back.changes} == {
        (h.location, h.n_bytes, h.n_blocks) for h in m.changes
    }


@pytest.mark.parametrize(
    ("asked", "said"),
    [("step:0", "no step 0"), ("step:999", "no step 999"), ("event:99999999", "no event"),
     ("oom:2", "no such failure"), ("", "no moment"), ("step", "no moment"),
     ("event:-1", "no moment"), ("step:1..", "no moment"), ("x..peak", "no moment"),
     ("step:" + "9" * 40, "no moment")],
)  # fmt: skip
def test_moment_that_is_not_there_is_refused_in_a_sentence(case: Case, asked: str, said: str):
    with pytest.raises(ConfigError, match=said):
        diagnose(case, replays=False, at=asked)


def test_recording_without_a_trace_has_no_moments():
    with pytest.raises(ConfigError, match="no trace"):
        diagnose(Case(snapshot=read_snapshot(SAMPLES / "empty.pickle")), at="peak")
