"""Steps: on programs that are really run, with their real stacks, and on recordings."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from analysis.training_loop import (
    ACTIVATION,
    CALL,
    ENGINE,
    INPUT,
    PARAMETERS,
    SEED,
    TEMPORARY,
    TORCH,
    TrainingLoop,
)
from builders import frame, oom
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_allocator import Block

from fragdoctor.future.steps import StepKind, Steps
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.snapshot import Action
from fragdoctor.trace.trace import Trace

RECORDINGS = Path(__file__).parent / "recordings"
ADAM = frame(f"{TORCH}/optim/adam.py", 2, "step")
INIT = frame(f"{TORCH}/nn/modules/module.py", 9, "_apply")
BACKWARD = frame(f"{TORCH}/_tensor.py", 1, "backward")
LINEAR = frame(f"{TORCH}/nn/functional.py", 1, "linear")


class Run(TrainingLoop):
    """A program that is really run; its stacks are those of Python, with torch's on top."""

    def __init__(self, program: Callable[[Run], None], *, context: str = "all") -> None:
        super().__init__(context=context)
        self.marks: list[tuple[int, StepKind]] = []
        program(self)

    def here(self, *inner: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """Return the stack of the program, up to where it was started."""
        frames = list(inner)
        caller: FrameType | None = sys._getframe(2)
        while caller is not None and caller.f_code is not Run.__init__.__code__:
            code = caller.f_code
            frames.append(frame(Path(code.co_filename).name, caller.f_lineno, code.co_name))
            caller = caller.f_back
        return tuple(frames)

    def mark(self, kind: StepKind = StepKind.TRAIN) -> None:
        """Say that a step begins here."""
        self.marks.append((len(self.toy.events), kind))

    def model(self) -> None:
        self.parameters = [self.new(size, self.here(INIT)) for size in PARAMETERS]

    def data(self) -> Block:
        return self.new(INPUT, self.here())

    def called(self) -> list[Block]:
        """Call the model; return its activations."""
        held = []
        for _ in PARAMETERS:
            scratch = self.new(TEMPORARY, self.here(LINEAR, CALL))
            held.append(self.new(ACTIVATION, self.here(LINEAR, CALL)))
            self.free(scratch, self.here(LINEAR, CALL))
        return held

    def go_back(self, activations: list[Block]) -> None:
        seed = self.new(512, self.here(BACKWARD))
        fresh = []
        for size, activation in zip(PARAMETERS, activations, strict=True):
            fresh.append(self.new(size, ENGINE))
            self.free(activation, ENGINE)
        if self.gradients:
            self.drop(fresh, *ENGINE)
        else:
            self.gradients = fresh
        self.free(seed, self.here(BACKWARD))

    def update(self) -> None:
        self.drop([self.new(size, self.here(ADAM)) for size in PARAMETERS], ADAM)
        self.drop(self.gradients, ADAM)
        self.gradients = []

    def fail(self, stack: tuple[dict[str, Any], ...]) -> None:
        self.event_stacks[len(self.toy.events)] = self.stack_id(stack)
        self.toy.events.append(oom(10**9, 0))

    def drop(self, blocks: list[Block], *inner: dict[str, Any]) -> None:
        for block in blocks:
            self.free(block, self.here(*inner))

    def steps(self) -> Steps:
        return Steps.of(self.trace)

    @cached_property
    def trace(self) -> Trace:
        return Trace.of(self.snapshot(), 0)

    def true_rows(self, kind: StepKind) -> list[int]:
        """Return the first allocation of each step that was marked."""
        allocs = np.flatnonzero(self.trace.events.action == Action.ALLOC)
        at = np.searchsorted(allocs, [row for row, k in self.marks if k == kind])
        return allocs[at[at < len(allocs)]].tolist()


@dataclass(frozen=True)
class Plan:
    """How often the loops of a program turn."""

    n_epochs: int = 1
    n_steps: int = 4
    n_passes: int = 1
    n_evaluations: int = 0
    every: int = 1


plans = st.builds(
    Plan,
    n_epochs=st.integers(1, 3),
    n_steps=st.integers(3, 5),
    n_passes=st.integers(1, 3),
    n_evaluations=st.integers(0, 4),
    every=st.sampled_from([1, 4]),
)


def flat(run: Run, plan: Plan) -> None:
    """Train in one function."""
    run.model()
    for _ in range(plan.n_epochs):
        for step in range(plan.n_steps):
            run.mark()
            for _ in range(plan.n_passes):
                batch = run.data()
                held = run.called()
                run.go_back(held)
                run.drop([batch])
            run.update()
            if plan.n_evaluations and step % plan.every == 0:
                run.mark(StepKind.EVALUATION)
                for _ in range(plan.n_evaluations):
                    batch = run.data()
                    run.drop([batch, *run.called()])


def in_functions(run: Run, plan: Plan) -> None:
    """Train by functions that call each other, as a trainer does."""

    def one_pass() -> None:
        batch = run.data()
        run.go_back(run.called())
        run.drop([batch])

    def one_step() -> None:
        for _ in range(plan.n_passes):
            one_pass()
        run.update()

    def evaluate() -> None:
        if plan.n_evaluations:
            run.mark(StepKind.EVALUATION)
        for _ in range(plan.n_evaluations):
            batch = run.data()
            run.drop([batch, *run.called()])

    def epoch() -> None:
        for _ in range(plan.n_steps):
            run.mark()
            one_step()
        evaluate()

    run.model()
    for _ in range(plan.n_epochs):
        epoch()


@given(plan=plans, program=st.sampled_from([flat, in_functions]))
def test_steps_of_a_training_program(plan: Plan, program: Callable[[Run, Plan], None]) -> None:
    run = Run(lambda r: program(r, plan))

    steps = run.steps()

    training, evaluation = (run.true_rows(k) for k in (StepKind.TRAIN, StepKind.EVALUATION))
    is_part_of_each = program is flat and plan.every == 1 and bool(evaluation)
    if is_part_of_each:  # every step comes to the evaluation
        training, evaluation = [training[0], *evaluation], []
    assert steps.of_kind(StepKind.TRAIN).tolist() == training
    assert steps.of_kind(StepKind.EVALUATION).tolist() == evaluation
    assert steps.is_last_complete == (not is_part_of_each)


@settings(max_examples=40)
@given(n_steps=st.integers(2, 4), n_events=st.integers(1, 160))
def test_steps_of_a_trace_that_was_cut_are_those_that_began(n_steps: int, n_events: int) -> None:
    run = Run(lambda r: flat(r, Plan(n_steps=n_steps)))
    whole = run.true_rows(StepKind.TRAIN)
    run.toy.events = run.toy.events[:n_events]

    found = Steps.of(Trace.of(run.snapshot(), 0)).of_kind(StepKind.TRAIN).tolist()

    # The last one may not show yet, or not yet say what it is.
    assert set(found) <= set(whole)
    begun = [row for row in whole if row < min(n_events, len(run.toy.events))]
    assert len(found) >= len(begun) - 1


def test_two_networks_that_take_turns_are_one_step() -> None:
    def program(run: Run) -> None:
        run.model()
        for _ in range(6):
            run.mark()
            run.drop([run.data()])
            run.go_back(run.called())
            run.update()
            run.go_back(run.called())
            run.update()

    run = Run(program)

    assert run.steps().rows.tolist() == run.true_rows(StepKind.TRAIN)


def test_a_loop_between_two_networks_begins_no_step() -> None:
    def program(run: Run) -> None:
        run.model()
        for _ in range(6):
            run.mark()
            run.drop([run.data()])
            run.go_back(run.called())
            run.update()
            for _ in range(3):
                batch = run.data()
                held = run.called()
                run.drop([batch, *held])
            run.go_back(run.called())
            run.update()

    run = Run(program)

    assert run.steps().rows.tolist() == run.true_rows(StepKind.TRAIN)


@pytest.mark.parametrize("ends", ["second forward pass", "second backward pass"])
def test_a_second_network_that_fails_in_the_first_step_is_no_evaluation(ends: str) -> None:
    def program(run: Run) -> None:
        run.model()
        run.drop([run.data()])
        run.go_back(run.called())
        run.update()
        held = []
        for _ in range(3):
            run.data()
            held += run.called()
        if ends == "second backward pass":
            run.new(ACTIVATION, ENGINE)
        run.fail(run.here(LINEAR, CALL) if ends == "second forward pass" else ENGINE)

    run = Run(program)

    assert set(run.steps().kind.tolist()) == {StepKind.TRAIN}


def test_copying_a_model_is_no_loop_of_steps() -> None:
    def program(run: Run) -> None:
        run.model()
        for _ in range(8):
            run.data()
            run.data()
        run.mark()
        run.called()
        run.fail(run.here(LINEAR, CALL))

    run = Run(program)

    assert len(run.steps()) == 1


def test_rollouts_before_updates_are_evaluation() -> None:
    def program(run: Run) -> None:
        run.model()
        for _ in range(4):
            run.mark(StepKind.EVALUATION)
            for _ in range(6):
                run.drop([run.data(), *run.called()])
            for _ in range(3):
                run.mark()
                run.go_back(run.called())
                run.update()

    run = Run(program)

    for kind in (StepKind.TRAIN, StepKind.EVALUATION):
        assert run.steps().of_kind(kind).tolist() == run.true_rows(kind)


def test_a_step_on_one_line_is_one_step() -> None:
    def program(run: Run) -> None:
        run.model()
        for _ in range(5):
            run.mark()
            run.drop([run.data(), *run.called(), run.data()])  # before and after the call
            run.go_back(run.called())
            run.update()

    run = Run(program)

    assert run.steps().rows.tolist() == run.true_rows(StepKind.TRAIN)


def test_a_batch_without_an_update_is_part_of_the_step_that_ends_with_the_next_one() -> None:
    def program(run: Run) -> None:
        run.model()
        for i in range(9):
            if i % 3 != 2:
                run.mark()
            batch = run.data()
            held = run.called()
            if i % 3 == 1:
                run.drop([batch, *held])
                continue
            run.go_back(held)
            run.drop([batch])
            run.update()

    run = Run(program)

    assert run.steps().of_kind(StepKind.TRAIN).tolist() == run.true_rows(StepKind.TRAIN)


def test_loops_of_inference_are_evaluation() -> None:
    def program(run: Run) -> None:
        run.model()
        for _ in range(7):
            run.mark(StepKind.EVALUATION)
            batch = run.data()
            run.drop([batch, *run.called()])

    run = Run(program)

    assert run.steps().rows.tolist() == run.true_rows(StepKind.EVALUATION)
    assert set(run.steps().kind.tolist()) == {StepKind.EVALUATION}


@pytest.mark.parametrize("keeps_graph", [True, False])
def test_backward_passes_that_keep_the_graph_are_inner_steps(keeps_graph: bool) -> None:
    """Without an optimizer, a pass that frees what it used may end a step (``create_graph``)."""
    loop = TrainingLoop()
    loop.build()
    for _ in range(6):
        _, *activations = loop.forward()
        if not keeps_graph:
            loop.backward(activations)
            loop.zero_grad()
            continue
        for _ in activations:
            loop.new(ACTIVATION, ENGINE)
        loop.free(loop.new(512, SEED), SEED)

    assert (len(Steps.of(Trace.of(loop.snapshot(), 0))) > 2) is not keeps_graph


@pytest.mark.parametrize("n_rounds", [2, 3])
def test_few_rounds_are_enough_if_no_place_comes_more_often(n_rounds: int) -> None:
    def program(run: Run) -> None:
        run.model()
        for _ in range(n_rounds):
            run.mark(StepKind.EVALUATION)
            batch = run.data()
            run.drop([batch, *run.called()])

    run = Run(program)

    assert run.steps().rows.tolist() == run.true_rows(StepKind.EVALUATION)


def test_two_networks_of_a_first_forward_pass_are_no_rounds() -> None:
    """They keep what they take for the backward pass, which a round without one lets go."""

    def program(run: Run) -> None:
        run.model()
        for _ in range(2):
            run.data()
            run.called()
        run.fail(run.here(LINEAR, CALL))

    assert Run(program).steps().kind.tolist() == [StepKind.TRAIN]


def test_two_visits_to_a_place_are_no_rounds_without_a_model() -> None:
    def program(run: Run) -> None:
        for _ in range(2):
            run.data()
            run.new(TEMPORARY, run.here())

    assert not len(Run(program).steps())


def layered(run: Run, *, n_layers: int = 3) -> None:
    """Call a model with equal layers, one of which repeats an operation; nothing else."""
    calls = [run.here(LINEAR, CALL, frame("model.py", line, "forward"), CALL) for line in (1, 2)]
    for stack in (calls[0], *[calls[1]] * n_layers):
        run.new(ACTIVATION, stack)


def test_equal_layers_behind_a_stem_are_no_calls_of_their_own() -> None:
    def program(run: Run) -> None:
        layered(run, n_layers=30)

    assert not len(Run(program).steps())


def test_a_loop_that_copies_a_model_before_it_is_called_is_none() -> None:
    def program(run: Run) -> None:
        run.model()
        for _ in range(30):
            run.drop([run.new(TEMPORARY, run.here())])
            run.new(INPUT, run.here())
        run.called()

    assert not len(Run(program).steps())


def test_without_stacks_annotated_optimizer_steps_end_steps() -> None:
    run = Run(lambda r: flat(r, Plan()), context="none")
    first, last = np.array(run.true_rows(StepKind.TRAIN)), len(run.toy.events)
    annotations = [
        {
            "name": "Optimizer.step#Adam.step",
            "stage": stage,
            "device": 0,
            "time_us": 1000 + int(row),
        }
        for end in (*first[1:], last)
        for stage, row in (("START", end - 8), ("END", end))
    ]

    steps = Steps.of(Trace.of(run.snapshot(annotations), 0))

    assert steps.rows[1:].tolist() == first[1:].tolist()


def test_a_device_without_marks_has_the_steps_of_the_others() -> None:
    run = Run(lambda r: flat(r, Plan()), context="none")
    ends = [*run.true_rows(StepKind.TRAIN)[1:], len(run.toy.events)]
    annotations = [
        {"name": "Optimizer.step#Adam.step", "stage": "END", "device": 1, "time_us": 1000 + row}
        for row in ends
    ]

    steps = Steps.of(Trace.of(run.snapshot(annotations), 0))

    assert len(steps) == len(ends)


def test_annotated_ends_whose_beginnings_are_lost_still_end_steps() -> None:
    run = Run(lambda r: flat(r, Plan()), context="none")
    first = run.true_rows(StepKind.TRAIN)[1:]
    annotations = [
        {"name": "Optimizer.step#Adam.step", "stage": "END", "device": 0, "time_us": 1000 + row}
        for row in first
    ]

    steps = Steps.of(Trace.of(run.snapshot(annotations), 0))

    assert steps.is_last_complete
    assert steps.rows[1:].tolist() == first[:-1]  # nothing shows after the last


def test_a_program_without_a_loop_has_no_steps() -> None:
    steps = Run(lambda r: r.model()).steps()

    assert not len(steps)


# ---- recordings --------------------------------------------------------------------------------


def _recorded() -> list[tuple[str, dict[str, Any]]]:
    truth = json.loads((RECORDINGS / "steps.json").read_text(encoding="utf-8"))
    return sorted(truth.items())


@pytest.mark.parametrize(("name", "truth"), _recorded())
def test_steps_of_recorded_programs(name: str, truth: dict[str, Any]) -> None:
    trace = Trace.of(read_snapshot(RECORDINGS / f"steps_{name}.pickle.gz"), 0)

    steps = Steps.of(trace)

    allocs = np.flatnonzero(trace.events.action == Action.ALLOC)
    for kind in (StepKind.TRAIN, StepKind.EVALUATION):
        assert len(steps.of_kind(kind)) == truth[f"n_{kind.name.lower()}"]
    starts = np.array(truth["train_starts"])
    allocs = np.flatnonzero(trace.events.action == Action.ALLOC)
    got = np.searchsorted(allocs, steps.of_kind(StepKind.TRAIN))
    # What follows an update, a loss that is printed say, belongs to the next step.
    last = truth["n_train"] - len(starts) + 1 + np.arange(len(starts))
    assert (np.searchsorted(got, starts, side="right") == last).all()


SHARED = {
    "annotations": 2,
    "capacity_oom": 1,
    "checkpoint_off": 2,
    "checkpoint_on": 2,
    "context_alloc": 2,
    "convnet_varsize": 10,
    "empty_cache_calls": 0,
    "eval_without_no_grad": 2,  # and evaluation until it fails
    "expandable_retries": 10,
    "expandable_segments": 6,
    "frag_gpt_long_truncated": 5,  # of 35, the last of them unfinished
    "frag_gpt_varlen": 7,
    "frag_gpt_varlen_expandable": 10,
    "frag_gpt_varlen_gc": 7,
    "gc_threshold": 12,
    "gc_threshold_oom": 10,
    "healthy_gpt": 4,
    "kvcache_cat": 54,
    "kvcache_cat_expandable": 55,
    "kvcache_prealloc": 40,
    "late_start": 2,
    "leak_features": 17,
    "leak_losses": 12,
    "mem_pool": 0,
    "microbench_40mb": 0,
    "multistream_record_stream": 8,
    "no_context": 2,
    "optimizer_spike": 3,
    "optimizer_spike_oom": 1,
    "retries_without_oom": 12,
    "ring_overflow": 0,  # holds the end of the last one only
    "skip_actions": 2,
    "stacks_all": 2,
    "two_devices": 3,
}
"""Iterations of each program's loop that begin in its recording."""


@pytest.mark.shared
@pytest.mark.parametrize(("name", "n_steps"), SHARED.items())
def test_steps_of_shared_recordings(shared: Path, name: str, n_steps: int) -> None:
    snapshot = read_snapshot(shared / "snapshots" / name / "snapshot.pickle")

    assert len(Steps.of(Trace.of(snapshot, 0)).main_rows) == n_steps
