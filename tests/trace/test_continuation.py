"""Continuations: a trace cut off in the middle of a step goes on as the program would have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import Program, record

from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.simulation import Outlook, OutlookBasis, OutlookState
from fragdoctor.model.snapshot import Action, Snapshot
from fragdoctor.trace import stacks
from fragdoctor.trace.continuation import Continuation, _Builder, continuation_of
from fragdoctor.trace.first_step import are_layers, n_equal_layers
from fragdoctor.trace.foresight import believed_steps, growth_of
from fragdoctor.trace.made_once import KeptOnce
from fragdoctor.trace.operations import Operations
from fragdoctor.trace.outlook import MAX_STEPS, Outlooks
from fragdoctor.trace.simulator import reproduce, simulate
from fragdoctor.trace.step_sizes import SizedSteps
from fragdoctor.trace.steps import StepKind, Steps
from fragdoctor.trace.trace import Trace
from fragdoctor.trace.whatif import FairReplay, WhatIf
from fragdoctor.units import MIB

RECORDINGS = Path(__file__).parent / "recordings"
Step = Sequence[tuple[str, int]]
"""Names with sizes; a size of 0 frees what has the name."""


def _program(steps: Sequence[Step]) -> tuple[Program, list[int]]:
    """Return a program, and the number of requests before each of its steps."""
    operations: list[tuple[str, int, int]] = []
    made: dict[str, int] = {}
    starts, n = [], 0
    for step in steps:
        starts.append(n)
        for name, size in step:
            if size:
                operations.append(("alloc", size, 0))
                made[name] = n
                n += 1
            else:
                operations.append(("free", made.pop(name), 0))
    return Program(tuple(operations)), starts


def _traced(
    snapshot: Snapshot, starts: Sequence[int], *, is_cut: bool, kinds: Sequence[int] = ()
) -> Trace:
    """Return the trace of a recording whose steps begin at these requests."""
    trace = Trace.of(snapshot, 0)
    action = trace.events.action
    requests = np.flatnonzero((action == Action.ALLOC) | (action == Action.OOM))
    trace.memo[Steps] = Steps(
        rows=requests[[s for s in starts if s < len(requests)]].astype(np.int64),
        kind=np.array(kinds or [StepKind.TRAIN] * len(starts), np.uint8)[: len(starts)],
        micro_rows=np.zeros(0, np.int64),
        method="stacks",
        is_last_complete=not is_cut,
    )
    return trace


def _plain(step: int) -> Step:
    """A step that keeps nothing: an input, an activation, a gradient."""
    del step
    return [("x", 3 * MIB), ("a", 12 * MIB), ("g", 12 * MIB), ("a", 0), ("g", 0), ("x", 0)]


def _leaking(step: int) -> Step:
    """A step that keeps a little for good."""
    return [("x", 3 * MIB), ("a", 12 * MIB), (f"kept {step}", 2 * MIB), ("a", 0), ("x", 0)]


def _overlapping(step: int) -> Step:
    """A step that frees what the one before made, as gradients are."""
    freed = [("g", 0)] if step else []
    return [("a", 12 * MIB), *freed, ("g", 8 * MIB), ("a", 0)]


def _growing(step: int) -> Step:
    """A step that replaces a cache by a larger one."""
    old = [(f"cache {step - 1}", 0)] if step else []
    return [("a", 12 * MIB), (f"cache {step}", (step + 1) * MIB), *old, ("a", 0)]


def _with_evaluation(step: int) -> Step:
    """Every third step is another one."""
    return _plain(step) if step % 3 != 2 else [("e", 20 * MIB), ("f", MIB), ("e", 0), ("f", 0)]


def _truth(make: Callable[[int], Step], n_steps: int) -> list[int]:
    """Return what is allocated at the end of each step."""
    program, starts = _program([make(i) for i in range(n_steps)])
    trace = Trace.of(record(program), 0)
    requests = np.flatnonzero(trace.events.action == Action.ALLOC)
    rows = [*requests[starts[1:]].tolist(), trace.n_events]
    # Frees of a step come before the first request of the next one.
    return [int(trace.totals.at([_before(trace, row)])[0, 0]) for row in rows]


def _before(trace: Trace, row: int) -> int:
    """Return the state before a request and the segment that was made for it."""
    while row and trace.events.action[row - 1] == Action.SEGMENT_ALLOC:
        row -= 1
    return row


def _continued(
    make: Callable[[int], Step], n_steps: int, n_requests: int, n_more: int
) -> tuple[Continuation, list[int]]:
    """Cut a program off in its last step; return what is allocated after the steps to come."""
    steps = [list(make(i)) for i in range(n_steps)]
    own, n = [], 0
    for name, size in steps[-1]:
        n += bool(size)
        if n > n_requests:
            break
        own.append((name, size))
    program, starts = _program([*steps[:-1], own])
    trace = _traced(record(program), starts, is_cut=True)
    reproduction = reproduce(trace)
    known = continuation_of(trace, Operations.of(reproduction.operations))
    assert known is not None
    outlooks = Outlooks(trace, reproduction.operations, n_more)
    config = reproduction.conditions.native()
    config.capacity_bytes = 2**50
    look = outlooks._look(reproduction.operations.play(config, known.n_past), known.native)
    assert not look["has_failed"]
    return known, look["allocated"].tolist()


@pytest.mark.parametrize("make", [_plain, _leaking, _overlapping, _growing, _with_evaluation])
@pytest.mark.parametrize("n_requests", [1, 2])
def test_continuation_is_the_rest_of_the_program(
    make: Callable[[int], Step], n_requests: int
) -> None:
    n_steps, n_more = 10, 6
    _, allocated = _continued(make, n_steps, n_requests, n_more)
    assert allocated == _truth(make, n_steps + n_more)[n_steps - 1 :]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    kept=st.integers(0, 5),
    cut=st.integers(1, 6),
)
def test_continuation_of_a_periodic_trace_is_its_rest(
    sizes: list[int], kept: int, cut: int
) -> None:
    def make(step: int) -> Step:
        made = [(f"b{i}", size * MIB) for i, size in enumerate(sizes)]
        leak = [(f"leak {step}", kept * MIB)] if kept else []
        return [*made, *leak, *((name, 0) for name, _ in made)]

    known, allocated = _continued(make, 6, min(cut, len(sizes)), 4)
    assert allocated == _truth(make, 10)[5:]
    assert known.is_exact
    assert known.period == 1


def test_other_shapes_are_scaled() -> None:
    batch = [4, 6, 5, 8, 7, 9]

    def make(step: int) -> Step:
        b = batch[step]
        return [("x", b * MIB), ("a", (4 * b + 3) * MIB), ("g", 2 * b * MIB), ("g", 0), ("a", 0),
                ("x", 0)]  # fmt: skip

    steps = [list(make(i)) for i in range(5)]
    program, starts = _program([*steps, [("x", 9 * MIB)]])
    trace = _traced(record(program), starts, is_cut=True)
    reproduction = reproduce(trace)
    known = continuation_of(trace, Operations.of(reproduction.operations))
    assert known is not None
    assert known.varies
    config = reproduction.conditions.native()
    config.capacity_bytes = 2**50
    outlooks = Outlooks(trace, reproduction.operations, 0)
    look = outlooks._look(reproduction.operations.play(config, known.n_past), known.native)
    expected = (9 + 39 + 18) * MIB
    # A cached block may be up to a MiB larger than what is asked for.
    assert expected <= look["peak_allocated"][0] <= expected + 2 * MIB


def test_sizes_follow_what_went_along_with_them_in_all_steps() -> None:
    # A prompt, which only two steps had alike, its text with the answer, and what is to come.
    size = np.array(
        [[np.nan, 132, 264], [540, 122, 244], [430, 161, 322], [580, 148, np.nan]], np.float64
    )
    steps = SizedSteps.__new__(SizedSteps)
    steps.n, steps.size = 3, size
    fitted = steps._fitted(np.array([2]), np.array([0, 1]), size[2, [2]])
    assert fitted.tolist() == [296]


# ---- outlooks ------------------------------------------------------------------------------------


def _failed(make: Callable[[int], Step], capacity_mb: int) -> tuple[Trace, int]:
    """Record a program until it fails; return its trace and the steps that were complete."""
    program, starts = _program([make(i) for i in range(60)])
    snapshot = record(program, capacity_bytes=capacity_mb * MIB)
    trace = Trace.of(snapshot, 0)
    oom = int(trace.oom_rows[0])
    action = trace.events.action[:oom]
    n_requests = int(np.count_nonzero(action == Action.ALLOC))
    n_complete = int(np.searchsorted(starts, n_requests, side="right")) - 1
    cut = Program(program.operations[: _operations_until(program, n_requests + 1)])
    snapshot = record(cut, capacity_bytes=capacity_mb * MIB)
    return _traced(snapshot, starts[: n_complete + 1], is_cut=True), n_complete


def _operations_until(program: Program, n_requests: int) -> int:
    n = 0
    for i, (name, _, _) in enumerate(program.operations):
        n += name == "alloc"
        if n == n_requests:
            return i + 1
    return len(program.operations)


def test_sizes_that_nothing_explains_ask_for_nothing_less_than_none(monkeypatch):
    original = _Builder._spread

    def unexplained(self, **known):
        self.weak = 1.5
        return original(self, **{**known, "is_exact": False})

    monkeypatch.setattr(_Builder, "_spread", unexplained)
    program, starts = _program([*(_plain(i) for i in range(4)), [("x", 3 * MIB)]])
    trace = _traced(record(program), starts, is_cut=True)

    known = continuation_of(trace, Operations.of(reproduce(trace).operations))

    assert known is not None
    assert known.lower is not None


def test_leak_is_postponed_by_as_many_steps_as_the_rest_of_the_memory_allows() -> None:
    trace, n_complete = _failed(_leaking, 40)
    results = simulate(trace, capacity_bytes=80 * MIB).results
    outlook = results[0].outlook
    assert outlook is not None
    assert outlook.state is OutlookState.FAILS
    _, more = _failed(_leaking, 80)
    assert outlook.fails_after_steps == more - n_complete
    assert outlook.growth_bytes_per_step == 2 * MIB


def test_steps_that_repeat_hold() -> None:
    def make(step: int) -> Step:
        late = [("late", 30 * MIB), ("late", 0)] if step == 7 else []
        return [*_plain(step), *late]

    trace, _ = _failed(make, 40)
    result = simulate(trace, capacity_bytes=120 * MIB).results[0]
    assert result.outlook is not None
    assert result.outlook.state is not OutlookState.FAILS


def _lengthening(step: int) -> Step:
    """A step that takes more every second time."""
    size = (8 + 2 * (step // 2)) * MIB
    return [("x", size), ("a", 4 * size), ("a", 0), ("x", 0)]


def test_steps_that_only_became_larger_do_not_become_small_again() -> None:
    trace, n_complete = _failed(_lengthening, 90)
    outlook = simulate(trace, capacity_bytes=130 * MIB).results[0].outlook
    _, more = _failed(_lengthening, 130)
    assert outlook is not None
    assert outlook.state is OutlookState.FAILS
    assert outlook.fails_after_steps is not None
    assert abs(outlook.fails_after_steps - (more - n_complete)) <= 1
    assert outlook.reason.endswith("as steps become larger")


@pytest.mark.parametrize(
    ("trains", "is_unfinished"),
    [
        ([True, True, False, False], True),
        ([True, False, True, False], False),  # one came to its end before
        ([True, True, True, True], False),
        ([False, False, False, False], False),  # evaluation is all that the program does
    ],
)
def test_evaluation_is_of_unknown_length_until_one_ended(
    trains: list[bool], is_unfinished: bool
) -> None:
    window = SimpleNamespace(counts=np.array([*trains, True]))
    steps = SimpleNamespace(w=window, n=len(trains), is_same=True)
    found = _Builder._is_first_evaluation(cast("_Builder", steps), len(trains) - 1)
    assert found is is_unfinished


def test_what_wavers_is_no_growth() -> None:
    def growth(allocated: list[int], period: int) -> int:
        known = SimpleNamespace(period=period, period_steps=period)
        return growth_of(cast("Continuation", known), allocated)

    assert growth([10, 12, 9, 11, 10, 12, 9, 14], 1) == 0
    assert growth([10, 20, 30, 40, 50, 60, 70], 1) == 10
    assert growth([10, 11, 30, 31, 50, 51, 70], 2) == 10
    assert growth([10], 1) == 0


def test_layers_are_counted_where_most_parameters_are() -> None:
    layer = [4 * MIB, 2048, MIB, 2048, 2048, MIB, 2048]
    sizes = np.array([40 * MIB, *layer * 6, 2048, 9 * MIB])
    lives = SimpleNamespace(
        start=np.arange(len(sizes)),
        free=np.full(len(sizes), 10**6),
        stack=np.zeros(len(sizes), np.int64),
        requested_bytes=sizes,
    )
    trace = cast("Trace", SimpleNamespace(lives=lives))
    assert n_equal_layers(trace, start=1000, n_done=2) == 6
    assert n_equal_layers(trace, start=1000, n_done=7) == 0


@pytest.mark.parametrize(("n_calls", "found"), [(1, True), (5, True), (6, False)])
def test_steps_that_call_a_line_once_for_each_layer_are_no_layers(
    n_calls: int, found: bool
) -> None:
    layer, n_steps = [4 * MIB, 2048, MIB, 2048], 4
    start = [*range(24), *(100 * k + i for k in range(1, 1 + n_steps) for i in range(n_calls))]
    lives = SimpleNamespace(
        start=np.array(start),
        free=np.full(len(start), 10**6),
        stack=np.array([0] * 24 + [1] * (len(start) - 24)),
        requested_bytes=np.array([*layer * 6, *[7 * MIB] * (len(start) - 24)]),
    )
    roles = SimpleNamespace(in_module=np.array([False, True]))
    steps = Steps(
        rows=np.arange(1, 1 + n_steps, dtype=np.int64) * 100,
        kind=np.full(n_steps, StepKind.EVALUATION, np.uint8),
        micro_rows=np.zeros(0, np.int64),
        method="stacks",
        is_last_complete=False,
    )
    trace = SimpleNamespace(lives=lives, stacks=SimpleNamespace(roles=roles), memo={Steps: steps})
    assert are_layers(cast("Trace", trace)) is found


@pytest.mark.parametrize(("every", "keeps"), [(1, True), (2, False), (4, False)])
def test_what_two_steps_keep_says_nothing_of_the_others(every: int, keeps: bool) -> None:
    def make(step: int) -> Step:
        kept = [(f"kept {step}", 2 * MIB)] if step in {every + 1, 2 * every + 1} else []
        return [*_plain(step)[:3], *kept, *_plain(step)[3:]] if every > 1 else _leaking(step)

    program, starts = _program([make(i) for i in range(12)])
    trace = _traced(record(program), starts, is_cut=True)
    assert bool(FairReplay(reproduce(trace)).kept_bytes_per_step()) is keeps


def test_fixed_number_of_steps_is_played() -> None:
    trace, _ = _failed(_leaking, 40)
    result = simulate(trace, capacity_bytes=400 * MIB, steps=7).results[0]
    assert result.outlook is not None
    assert (result.outlook.state, result.outlook.steps) == (OutlookState.HOLDS, 7)


def test_evaluation_that_goes_on_alone_is_played_as_many_steps_as_training() -> None:
    trace, n_complete = _failed(_leaking, 40)
    before = Steps.of(trace)
    kind = np.full(len(before), StepKind.EVALUATION, np.uint8)
    kind[0] = StepKind.TRAIN
    trace.memo[Steps] = replace(before, kind=kind)
    outlook = simulate(trace, capacity_bytes=2**40).results[0].outlook
    assert n_complete > 2
    assert outlook is not None
    assert outlook.steps == MAX_STEPS


@pytest.mark.parametrize(("share", "needs_mb"), [(1.0, 55), (0.5, 28)])
def test_bound_of_a_first_step_follows_an_edit(share: float, needs_mb: int) -> None:
    program, starts = _program([[("x", 4 * MIB), ("a", 12 * MIB), ("b", 40 * MIB)]])
    trace = _traced(record(program, capacity_bytes=40 * MIB), starts, is_cut=True)
    reproduction = reproduce(trace)
    asked = Operations.of(reproduction.operations)
    size = (asked.size * share).astype(np.uint64)
    edited = asked.with_size(size).native(reproduction.operations)
    outlooks = FairReplay(reproduction).outlooks_of(edited)
    assert outlooks.step_needs_bytes() == pytest.approx(needs_mb * MIB, abs=MIB)


def test_first_step_has_a_lower_bound_only() -> None:
    program, starts = _program([[("x", 3 * MIB), ("a", 12 * MIB), ("b", 40 * MIB)]])
    trace = _traced(record(program, capacity_bytes=40 * MIB), starts, is_cut=True)
    enough, short = (
        FairReplay(reproduce(trace)).replay(WhatIf(capacity_bytes=mb * MIB)).outlook
        for mb in (200, 50)
    )
    assert enough is not None
    assert (enough.state, enough.basis) == (OutlookState.OPEN, OutlookBasis.LOWER_BOUND)
    assert enough.reason == "its step was cut off"
    assert short is not None
    assert short.state is OutlookState.FAILS


def test_step_under_way_needs_what_is_live_at_its_highest_point() -> None:
    trace, n_complete = _failed(_leaking, 40)
    first = _traced(
        record(_program([[("x", 3 * MIB), ("b", 60 * MIB)]])[0], capacity_bytes=40 * MIB),
        [0], is_cut=True,
    )  # fmt: skip

    needs = FairReplay(reproduce(trace)).step_needs_bytes()
    exact = (2 * n_complete + 3 + 12 + 2) * MIB
    assert needs is not None
    assert exact <= needs <= exact + 2 * MIB  # with what is too small to be split off
    assert FairReplay(reproduce(first)).step_needs_bytes() == (3 + 60) * MIB


def test_recorded_part_is_as_without_looking_on() -> None:
    trace, _ = _failed(_leaking, 40)
    fair = FairReplay(reproduce(trace))
    for conf in ("expandable_segments:True", "max_split_size_mb:32", ""):
        with_future = fair.replay(WhatIf(conf=conf))
        without = fair.replay(WhatIf(conf=conf), looks_on=False)
        assert without.outlook is None
        fields = ("fits", "oom_event", "peak_reserved_bytes", "final_reserved_bytes", "retries")
        assert all(getattr(with_future, f) == getattr(without, f) for f in fields)


@pytest.mark.parametrize(
    ("capacity_mb", "finishes"), [(180, False), (190, False), (200, True), (210, True)]
)
def test_first_step_of_an_optimizer_is_finished(capacity_mb: int, finishes: bool) -> None:
    """AdamW on six matrices failed in its first step at 160 MiB; rerun, it finished from 200 on.

    The model: ``Linear(512, 2048)``, ``Linear(2048, 2048)``, ``Linear(2048, 512)`` with ReLUs.
    """
    trace = Trace.of(read_snapshot(RECORDINGS / "first_adamw.pickle.gz"), 0)
    result = FairReplay(reproduce(trace)).replay(WhatIf(capacity_bytes=capacity_mb * MIB))
    assert result.fits
    assert result.outlook is not None
    assert (result.outlook.state is OutlookState.HOLDS) == finishes
    assert result.outlook.basis is OutlookBasis.SCALED


@pytest.mark.parametrize(("capacity_mb", "is_enough"), [(250, False), (268, False), (276, True)])
def test_first_backward_pass_needs_the_gradients_of_what_it_keeps(
    capacity_mb: int, is_enough: bool
) -> None:
    """Two convolutions with batch norm and ReLU and a ``Linear``; rerun, it needs 270.1 MiB."""
    trace = Trace.of(read_snapshot(RECORDINGS / "first_backward.pickle.gz"), 0)
    result = FairReplay(reproduce(trace)).replay(WhatIf(capacity_bytes=capacity_mb * MIB))
    assert result.fits
    assert result.outlook is not None
    assert result.outlook.basis is OutlookBasis.LOWER_BOUND
    assert (result.outlook.state is OutlookState.OPEN) == is_enough
    assert is_enough or 270 <= (result.outlook.needs_bytes or 0) / MIB < 271
    assert "gradients of what is kept for the backward pass" in result.outlook.reason


def test_workspace_of_the_first_backward_pass_stays_in_the_second() -> None:
    """A GPT of six layers with AdamW that failed in the forward pass of its second step."""
    trace = Trace.of(read_snapshot(RECORDINGS / "second_step.pickle.gz"), 0)
    needs = FairReplay(reproduce(trace)).step_needs_bytes()
    assert needs is not None
    assert round(needs / MIB, 1) == 482.5  # as rerun


def test_workspace_of_the_first_layer_does_not_shift_what_others_of_its_line_made() -> None:
    """Embeddings and linear layers in a row that failed in the backward pass of a second step."""
    trace = Trace.of(read_snapshot(RECORDINGS / "second_step_sparse.pickle.gz"), 0)
    needs = FairReplay(reproduce(trace)).step_needs_bytes()
    assert needs is not None
    assert round(needs / MIB, 1) == 554.2  # as rerun


@pytest.mark.parametrize("share", [90, 97])
def test_gradients_of_a_second_network_stay_until_its_own_backward_pass(share: int) -> None:
    """A GAN with gradient penalty, three steps of the critic for one of the generator.

    It failed in the first backward pass of its second step, at shares of what it reserves. Rerun
    without a limit, 2,428.6 MiB are live at once in that step and in every later one.
    """
    name = f"second_step_critic_{share}.pickle.gz"
    trace = Trace.of(read_snapshot(RECORDINGS / name), 0)
    fair = FairReplay(reproduce(trace))
    needs = fair.step_needs_bytes()
    assert needs is not None
    assert abs(needs / MIB - 2428.6) < 2
    far = fair.replay(WhatIf(capacity_bytes=4096 * MIB)).outlook
    assert far is not None
    assert far.state is OutlookState.HOLDS


@pytest.mark.parametrize("n_kept", [0, 6])
def test_step_that_keeps_more_than_those_before_is_new(n_kept: int) -> None:
    """As where more layers of a model are trained from some step on."""
    last = 5

    def make(step: int) -> Step:
        blocks = [(f"a{i}", (12 + i) * MIB) for i in range(12)]
        freed = [(name, 0) for name, _ in blocks]
        before = [("held", 100 * MIB)] if step == last and not n_kept else []
        kept = n_kept if step == last else 0
        return [*before, *blocks, *freed[kept:], ("b", 300 * MIB), ("b", 0), *freed[:kept]]

    trace, n_complete = _failed(make, 380)
    known = continuation_of(trace, Operations.of(reproduce(trace).operations))

    assert n_complete == last
    assert known is not None
    assert known.is_new == bool(n_kept)


@pytest.mark.parametrize("varies", [True, False])
def test_failure_in_a_later_step_is_believed_from_four_steps_on(varies: bool) -> None:
    """What fails later for no reason but where blocks lie hangs on every request before."""

    def known(n_complete: int, lower: object = None) -> Continuation:
        made = SimpleNamespace(
            grows=False, rises=False, varies=varies, lower=lower, first=None, n_complete=n_complete
        )
        return cast("Continuation", made)

    outlooks = Outlooks.__new__(Outlooks)
    later = Outlook(OutlookState.FAILS, fails_after_steps=2)

    assert outlooks._is_unproven(known(3), later)
    assert not outlooks._is_unproven(known(3), replace(later, fails_after_steps=0))
    assert not outlooks._is_unproven(known(3), replace(later, growth_bytes_per_step=MIB))
    assert not outlooks._is_unproven(known(4), later)
    # Batches that are alike tell what is asked for; a little less of it was tried, then.
    assert outlooks._is_unproven(known(1, lower=object()), later) == varies


def test_one_step_that_fits_by_little_holds_but_is_fragile(monkeypatch) -> None:
    def make(step: int) -> Step:
        old = [(f"g{step - 1}", 0)] if step else []
        return [("a", 12 * MIB), (f"g{step}", 24 * MIB), *old, ("a", 0)]

    monkeypatch.setattr(Outlooks, "_kept_share", 0.0)  # what it keeps are gradients
    trace, n_complete = _failed(make, 40)
    assert n_complete == 1
    made = {
        capacity_mb: simulate(trace, capacity_bytes=capacity_mb * MIB).results[0].outlook
        for capacity_mb in (60, 90)
    }
    assert {one.state for one in made.values() if one} == {OutlookState.HOLDS}
    assert [one.is_fragile for one in made.values() if one] == [True, False]


@pytest.mark.parametrize(
    ("kept_mb", "factor"),
    [
        ([2, 2, 2, 2, 2, 2, 2], 10),
        ([4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0], 10),  # every second step, all the time
        ([9, 9, 0, 0, 0, 0, 0, 0], 2),  # it came to an end
        ([9, 9], 2),  # too few to say
    ],
)
def test_growth_in_every_part_of_a_recording_is_believed_longer(
    kept_mb: list[int], factor: int
) -> None:
    steps = [[("x", MIB), *([(f"kept {i}", n * MIB)] if n else []), ("x", 0)]
             for i, n in enumerate([5, *kept_mb, 0])]  # fmt: skip
    program, starts = _program(steps)
    trace = _traced(record(program), starts, is_cut=True)
    known = SimpleNamespace(
        varies=True, grows=False, rises=False, rows=Steps.of(trace).rows, n_complete=len(kept_mb)
    )
    assert believed_steps(trace, cast("Continuation", known)) == factor * len(kept_mb)


def test_growth_that_takes_long_to_end_a_run_lets_it_hold_as_far_as_it_was_played() -> None:
    def make(step: int) -> Step:
        return [("x", 30 * MIB), (f"kept {step}", MIB // 2), ("x", 0)]

    trace, _ = _failed(make, 36)
    outlook = simulate(trace, capacity_bytes=300 * MIB).results[0].outlook
    assert outlook is not None
    assert outlook.state is OutlookState.HOLDS
    assert outlook.steps == MAX_STEPS
    assert outlook.growth_bytes_per_step == MIB // 2
    assert "enough for about" in outlook.reason


@pytest.mark.parametrize(("left_mb", "state"), [(4, OutlookState.HOLDS), (400, OutlookState.FAILS)])
def test_growth_ends_where_each_parameter_has_what_is_made_for_it(
    monkeypatch, left_mb: int, state: OutlookState
) -> None:
    monkeypatch.setattr(Outlooks, "_kept_once", KeptOnce(2 * MIB, left_mb * MIB))
    trace, _ = _failed(_leaking, 40)
    outlook = simulate(trace, capacity_bytes=80 * MIB).results[0].outlook
    assert outlook is not None
    assert outlook.state is state
    assert not outlook.is_known


@pytest.mark.parametrize(
    ("again", "n_same", "kept_mb"),
    [
        ([1], 1, 8 + 5),  # the second step has not come further than the first request
        ([1, 2], 3, 5),  # it has left out the first block that lives on
        ([0, 1, 2], 3, 8 + 5),  # it has made that one again
    ],
)
def test_what_a_second_step_does_not_make_again_is_made_once(
    again: list[int], n_same: int, kept_mb: int
) -> None:
    roles = SimpleNamespace(role=np.array([stacks.FORWARD] * 4 + [stacks.OPTIMIZER]))
    window = SimpleNamespace(
        requests=[np.arange(5)],
        size=np.array([8, 20, 20, 5, 6]) * MIB,
        stack=np.arange(5),
        trace=SimpleNamespace(stacks=SimpleNamespace(roles=roles)),
    )
    steps = SimpleNamespace(
        w=window,
        n=1,
        found=(0, n_same, False),
        age=np.array([-1, 0, 0, -1, -1]),
        sequences=[np.arange(5), np.array(again)],
    )
    assert SizedSteps.first_kept_bytes(cast("SizedSteps", steps)) == kept_mb * MIB


@pytest.mark.parametrize(
    ("capacity_mb", "n_steps", "state"), [(60, 1, OutlookState.OPEN), (84, 2, OutlookState.FAILS)]
)
def test_what_two_equal_steps_say_fails_by_a_little_fails(
    monkeypatch, capacity_mb: int, n_steps: int, state: OutlookState
) -> None:
    def make(step: int) -> Step:
        return [("x", 3 * MIB), ("a", 12 * MIB), (f"kept {step}", 24 * MIB), ("a", 0), ("x", 0)]

    monkeypatch.setattr(Outlooks, "_is_robust", lambda *_, **__: False)
    trace, n_complete = _failed(make, capacity_mb)
    outlook = simulate(trace, capacity_bytes=(capacity_mb + 30) * MIB).results[0].outlook
    assert n_complete == n_steps
    assert outlook is not None
    assert outlook.state is state
    assert not outlook.is_fragile
