"""A run that failed in its first step goes on as another recording of the program does."""

from __future__ import annotations

import numpy as np
import pytest
import training_runs as runs
from builders import columns, frame, oom
from msgspec.structs import replace
from toy_allocator import ToyAllocator

from fragdoctor.errors import SimulationError
from fragdoctor.future.other_run import OtherRun
from fragdoctor.future.simulator import simulate, trace_of
from fragdoctor.future.whatif import FairReplay, WhatIf
from fragdoctor.model.marks import PROGRAM
from fragdoctor.model.simulation import Outlook, OutlookBasis, OutlookState
from fragdoctor.model.snapshot import Annotation, Snapshot
from fragdoctor.trace.reproduction import reproduce
from fragdoctor.units import MIB


def model() -> ToyAllocator:
    """A model that is built by several lines, as models are."""
    toy = ToyAllocator()
    for _ in range(runs.N_PARAMETERS):
        toy.malloc(runs.PARAMETER_BYTES, line=runs.MODEL)
    return toy


def cut(batch: int, n_layers: int = runs.N_LAYERS, line: int = runs.FORWARD) -> Snapshot:
    """Return a run that fails in the first forward pass, after some layers."""
    toy = model()
    for _ in range(n_layers):
        toy.malloc(runs.ACTIVATION_BYTES * batch, line=line)
    data = toy.data()
    stack = data["device_traces"][0][-1]["frames"]
    failed = [frame(stack[0]["filename"], runs.LOSS, stack[0]["name"]), *stack[1:]]
    data["device_traces"][0].append(oom(2 * runs.ACTIVATION_BYTES * batch, 0, frames=failed))
    return columns(data)


def looked_on(failed: Snapshot, other: Snapshot, capacity_bytes: int) -> tuple[OtherRun, Outlook]:
    reproduction = reproduce(trace_of(failed))
    run = OtherRun(reproduction.trace, reproduction.operations, trace_of(other))
    result = FairReplay(reproduction, other=run).replay(WhatIf(capacity_bytes=capacity_bytes))
    assert result.outlook is not None
    return run, result.outlook


def test_first_step_is_finished_and_repeated_by_a_healthy_run() -> None:
    peak = runs.true_peak(4)

    run, enough = looked_on(cut(4), runs.recorded(4, n_steps=6), peak + 60 * MIB)
    _, short = looked_on(cut(4), runs.recorded(4, n_steps=6), peak - 20 * MIB)

    assert run.is_same
    assert (enough.state, enough.basis) == (OutlookState.HOLDS, OutlookBasis.COMPLETE)
    assert (enough.steps or 0) >= 2
    assert (short.state, short.fails_after_steps) == (OutlookState.FAILS, 0)
    assert "requests were matched by line and order, with the same sizes" in run.note
    # The step that was cut off is the first; optimizer state is there from its end on.
    first = runs.recorded(4, n_steps=1)
    highest = trace_of(first).totals.envelope("allocated_bytes", np.zeros(1, np.int64))[1][0]
    assert run.step_needs_bytes() == highest


def test_leak_of_the_other_run_ends_this_one() -> None:
    other = runs.recorded(4, n_steps=6, leak=8 * MIB)

    _, found = looked_on(cut(4), other, runs.true_peak(4) + 50 * MIB)

    assert found.state is OutlookState.FAILS
    assert 1 <= (found.fails_after_steps or 0) <= 7


def test_nothing_comes_after_a_recording_of_the_whole_program() -> None:
    other = runs.recorded(4, n_steps=6, leak=8 * MIB)
    end = Annotation(0, int(other.events.time_us[-1]) + 1, PROGRAM, "END")
    capacity_bytes = runs.true_peak(4, n_steps=6, leak=8 * MIB) + 80 * MIB

    _, found = looked_on(cut(4), replace(other, annotations=(end,)), capacity_bytes)
    _, guessed = looked_on(cut(4), other, capacity_bytes)

    assert (found.state, found.reason, found.growth_bytes_per_step) == (OutlookState.HOLDS, "", 0)
    assert guessed.state is not OutlookState.HOLDS


def test_another_batch_is_scaled_line_by_line() -> None:
    peak = runs.true_peak(6)

    run, enough = looked_on(cut(6), runs.recorded(2, n_steps=6), peak + 60 * MIB)
    _, short = looked_on(cut(6), runs.recorded(2, n_steps=6), peak - 20 * MIB)

    assert not run.is_same
    assert run.step_needs_bytes() is None
    assert (enough.state, enough.likely) == (OutlookState.OPEN, OutlookState.HOLDS)
    assert enough.basis is OutlookBasis.SCALED
    assert (short.state, short.likely) == (OutlookState.OPEN, OutlookState.FAILS)
    assert short.fails_after_steps == 0
    assert "with sizes scaled line by line" in run.note


BATCHES = (2, 5, 3, 6, 4, 90, 2, 99, 3)


def varying(batches: tuple[int, ...], toy: ToyAllocator) -> None:
    """Train with a batch of another size in each step."""
    for batch in batches:
        kept = [toy.malloc(runs.ACTIVATION_BYTES * batch, line=runs.FORWARD) for _ in range(4)]
        kept += [toy.malloc(runs.PARAMETER_BYTES, line=runs.BACKWARD) for _ in range(3)]
        for block in reversed(kept):
            toy.free(block)


@pytest.mark.parametrize("n_lost", [20, 36, 47])
def test_run_that_lost_its_start_is_found_in_the_other_one(n_lost: int) -> None:
    whole, toy = model(), model()
    varying(BATCHES, whole)
    varying(BATCHES[:5], toy)
    for _ in range(2):  # of the four layers of the sixth step
        toy.malloc(runs.ACTIVATION_BYTES * BATCHES[5], line=runs.FORWARD)
    data = toy.data()
    events = data["device_traces"][0]
    events.append(oom(runs.ACTIVATION_BYTES * BATCHES[5], 0, frames=events[-1]["frames"]))
    data["device_traces"][0] = events[n_lost:]
    other = columns(whole.data())
    end = Annotation(0, int(other.events.time_us[-1]) + 1, PROGRAM, "END")
    other = replace(other, annotations=(end,))
    peak = max(allocated for allocated, _, _ in whole.states)

    run, enough = looked_on(columns(data), other, peak + 60 * MIB)
    _, short = looked_on(columns(data), other, peak - 4 * MIB)

    assert run.is_same
    assert (enough.state, enough.steps) == (OutlookState.HOLDS, 3)
    assert (short.state, short.fails_after_steps) == (OutlookState.FAILS, 2)  # the batch of 99


def test_recording_that_ends_earlier_leaves_the_run_to_its_own_steps() -> None:
    failed = runs.recorded(4, n_steps=7)
    peak = runs.true_peak(4, n_steps=5)

    run, found = looked_on(failed, runs.recorded(4, n_steps=4), peak + 60 * MIB)

    assert not run.goes_further
    assert found.basis is OutlookBasis.REPEATED
    assert "holds 4 whole steps, no more than this one" in run.note


def test_own_steps_that_decide_are_not_overruled_by_a_guess() -> None:
    peak = runs.true_peak(4, n_steps=5)

    same, leaks = looked_on(
        runs.recorded(4, n_steps=5), runs.recorded(4, n_steps=9, leak=40 * MIB), peak + 90 * MIB
    )
    other, found = looked_on(
        runs.recorded(4, n_steps=5), runs.recorded(2, n_steps=9, leak=80 * MIB), peak + 90 * MIB
    )

    assert same.goes_further
    assert same.is_same
    assert leaks.state is OutlookState.FAILS
    assert other.goes_further
    assert not other.is_same
    assert (found.state, found.basis) == (OutlookState.HOLDS, OutlookBasis.REPEATED)


def test_only_so_many_steps_are_looked_on_over() -> None:
    other = runs.recorded(4, n_steps=6, leak=8 * MIB)
    capacity = runs.true_peak(4) + 50 * MIB

    results = [
        simulate(cut(4), capacity_bytes=capacity, steps=n, continue_with=other).results[0].outlook
        for n in (0, 1, None)
    ]

    first, second, whole = results
    assert first is not None
    assert second is not None
    assert whole is not None
    assert (first.state, first.steps) == (OutlookState.HOLDS, 0)
    assert (second.state, second.steps) == (OutlookState.HOLDS, 1)
    assert whole.state is OutlookState.FAILS


def test_smallest_capacity_is_that_of_the_steps_of_the_other_run() -> None:
    failed, other = cut(4), runs.recorded(4, n_steps=6)
    peak = runs.true_peak(4)

    alone = simulate(failed, smallest_capacity=True)
    whole = simulate(failed, smallest_capacity=True, continue_with=other)
    smallest = whole.results[0].smallest_capacity_bytes or 0
    states = [
        found.state
        for capacity in (smallest, smallest - 2 * MIB)
        if (found := looked_on(failed, other, capacity)[1])
    ]

    assert (alone.results[0].smallest_capacity_bytes or 0) < peak <= smallest
    assert states == [OutlookState.HOLDS, OutlookState.FAILS]
    assert any("other recording says how the run goes on" in note for note in whole.notes)


def test_recording_of_another_program_is_refused_in_a_sentence() -> None:
    with pytest.raises(SimulationError, match="do not belong together") as caught:
        looked_on(cut(4, line=77), runs.recorded(4, n_steps=6), 2**40)
    assert "fragdoctor rehearse" in caught.value.hint


def test_recording_without_a_whole_step_is_refused_in_a_sentence() -> None:
    with pytest.raises(SimulationError, match="holds no whole step"):
        looked_on(cut(4), cut(4), 2**40)


def test_sites_number_their_requests_in_order() -> None:
    from fragdoctor.model.arrays import occurrence

    assert occurrence(np.array([1, 0, 1, -1, 1, 0])).tolist() == [0, 0, 1, 0, 2, 1]
    assert not len(occurrence(np.zeros(0, np.int64)))
