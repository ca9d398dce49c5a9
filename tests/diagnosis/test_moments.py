from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from builders import BASE, MIB, alloc, block, columns, free, oom, segment, segment_alloc, snapshot
from oom_messages import case_of, new_style
from toy_allocator import ToyAllocator

import fragdoctor
from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.errors import ConfigError
from fragdoctor.future.steps import Steps
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.case import Case
from fragdoctor.model.diagnosis import Diagnosis, Moment, RunState
from fragdoctor.report.base import RenderOptions, render

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


def test_comparison_counts_the_steps_that_a_moment_is_numbered_by():
    sample = SAMPLES / "leak_oom.pickle.gz"
    told = diagnose(Case(snapshot=read_snapshot(sample)), replays=False, at="end")

    assert told.moment.n_steps == 3  # two of training, and the evaluation that failed
    assert {side.n_steps for side in fragdoctor.compare(sample, sample).runs} == {3}
    assert "after 13 batches of the evaluation" in told.verdict.summary


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

    assert m.since == before.asked
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
     ("oom:2", "no OOM 2"), ("", "not a moment"), ("step", "not a moment"),
     ("event:-1", "not a moment"), ("step:1..", "not a moment"), ("x..peak", "not a moment"),
     ("step:" + "9" * 40, "not a moment")],
)  # fmt: skip
def test_moment_that_is_not_there_is_refused_in_a_sentence(case: Case, asked: str, said: str):
    with pytest.raises(ConfigError, match=said):
        diagnose(case, replays=False, at=asked)


def test_recording_without_a_trace_has_no_moments():
    with pytest.raises(ConfigError, match="no trace"):
        diagnose(Case(snapshot=read_snapshot(SAMPLES / "empty.pickle")), at="peak")


def caught(after: int = 2) -> tuple[ToyAllocator, Diagnosis]:
    """Return a run that fills a device, fails, drops everything, and goes on with ``after`` blocks.

    Lines 1 to 3 hold 40, 20 and 10 MiB when 30 MiB are refused at line 4 with 16 MiB free.
    """
    toy = ToyAllocator()
    blocks = [toy.malloc(20 * MIB, line=1), toy.malloc(20 * MIB, line=1)]
    blocks += [toy.malloc(20 * MIB, line=2), toy.malloc(10 * MIB, line=3)]
    toy.refuse(30 * MIB, 16 * MIB, line=4)
    for one in blocks:
        toy.free(one)
    for _ in range(after):
        toy.malloc(2 * MIB, line=5)
    return toy, diagnose(Case(snapshot=columns(toy.data())), replays=False)


def lines(diagnosis: Diagnosis) -> list[tuple[int, int, int]]:
    return [(h.location.line, h.held_bytes, h.n_blocks) for h in diagnosis.holders if h.held_bytes]


def test_failure_that_was_caught_is_what_the_first_screen_is_about():
    toy, told = caught()
    (device,) = told.devices
    m = device.moment

    assert told.verdict.state is RunState.FAILED
    failed_at = next(i for i, e in enumerate(toy.events) if e["action"] == "oom")
    assert (m.moment, m.event, m.is_end) == (Moment.FAILURE, failed_at, False)
    assert (m.allocated_bytes, m.active_bytes, m.reserved_bytes) == toy.states[failed_at]
    assert m.device_free_bytes == 16 * MIB
    assert device.allocated_bytes == 4 * MIB
    assert lines(told) == [(1, 40 * MIB, 2), (2, 20 * MIB, 1), (3, 10 * MIB, 1)]
    assert {h.moment for h in told.holders} == {Moment.FAILURE}
    assert {h.location.line: h.now_bytes for h in told.holders}[5] == 4 * MIB


def test_failure_at_the_end_is_told_from_the_file_as_it_is():
    toy = ToyAllocator()
    toy.malloc(20 * MIB, line=1)
    toy.refuse(30 * MIB, 16 * MIB, line=4)

    told = diagnose(Case(snapshot=columns(toy.data())), replays=False)

    assert (told.devices[0].moment.moment, told.devices[0].moment.is_end) == (Moment.FAILURE, True)
    assert lines(told) == [(1, 20 * MIB, 1)]
    assert told.holders[0].failure_bytes == told.holders[0].now_bytes == 20 * MIB


def test_without_a_failure_the_moment_is_the_peak_and_without_a_trace_the_end():
    toy = ToyAllocator()
    dropped = toy.malloc(40 * MIB, line=1)
    toy.malloc(20 * MIB, line=2)
    toy.free(dropped)

    told = diagnose(Case(snapshot=columns(toy.data())), replays=False)

    m = told.devices[0].moment
    assert (m.moment, m.is_end, m.allocated_bytes) == (Moment.PEAK, False, 60 * MIB)
    assert lines(told) == [(1, 40 * MIB, 1), (2, 20 * MIB, 1)]

    bare = diagnose(Case(snapshot=columns({**toy.data(), "device_traces": [[]]})), replays=False)

    m = bare.devices[0].moment
    assert (m.moment, m.event, m.allocated_bytes) == (Moment.END, None, 20 * MIB)


def test_stranding_blocks_are_told_at_the_failure_and_without_a_trace_at_the_end():
    data = pickle.loads((SAMPLES / "fragmentation_oom.pickle").read_bytes())
    bare = {**data, "device_traces": [[] for _ in data["device_traces"]]}

    told = [diagnose(Case(snapshot=columns(d)), replays=False).stranders for d in (data, bare)]

    assert [{one.moment for one in found} for found in told] == [{Moment.FAILURE}, {Moment.END}]


def test_another_device_is_shown_when_the_failure_happened():
    def at(us: int, one: dict[str, object]) -> dict[str, object]:
        return {**one, "time_us": us}

    near, far = BASE, 2 * BASE
    traces = [
        [at(10, segment_alloc(near, 40 * MIB)), at(20, alloc(near, 40 * MIB)),
         at(30, oom(30 * MIB, 0))],
        [at(5, segment_alloc(far, 20 * MIB)), at(15, alloc(far, 20 * MIB)),
         *(at(40, e) for e in free(far, 20 * MIB))],
    ]  # fmt: skip
    file = snapshot(
        segment(near, block(40 * MIB, "active_allocated")),
        segment(far, block(20 * MIB), device=1),
    )

    told = diagnose(Case(snapshot=columns({**file, "device_traces": traces})), replays=False)

    assert told.verdict.device == 0
    m = told.devices[1].moment
    assert (m.moment, m.event, m.allocated_bytes) == (Moment.FAILURE, 2, 20 * MIB)


def test_failure_names_the_line_that_asked_and_its_figures():
    toy, told = caught()
    f = told.failure

    assert (f.device, f.requested_bytes, f.free_bytes) == (0, 30 * MIB, 16 * MIB)
    assert (f.location.line, f.source, f.is_caught) == (4, "trace", True)
    assert toy.events[f.event]["action"] == "oom"
    said = render("analyze", "text", told, RenderOptions(120)).splitlines()[0]
    assert (
        said == "Out of memory on GPU 0 at train.py:4 in step: 30.00 MiB requested, 16.00 MiB free."
    )
    page = render("analyze", "github", told, RenderOptions(120))
    assert "file=train.py,line=4" in page


def test_run_without_a_failure_has_none():
    toy = ToyAllocator()
    toy.malloc(20 * MIB, line=1)

    assert diagnose(Case(snapshot=columns(toy.data())), replays=False).failure is None


@pytest.mark.parametrize(
    ("live", "moment"), [("20.00 MiB", Moment.FAILURE), ("90.00 MiB", Moment.END)]
)
def test_file_without_a_trace_is_of_the_failure_where_its_message_has_the_same_figures(
    live: str, moment: Moment
):
    toy = ToyAllocator()
    toy.malloc(20 * MIB, line=1)
    bare = columns({**toy.data(), "device_traces": [[]]})
    text = new_style("30.00 MiB", "100.00 MiB", "10.00 MiB", live, "0 bytes")

    told = diagnose(case_of(text, snapshot=bare), replays=False)

    assert told.devices[0].moment.moment is moment
    assert {h.moment for h in told.holders} == {moment}
    assert lines(told) == [(1, 20 * MIB, 1)]
