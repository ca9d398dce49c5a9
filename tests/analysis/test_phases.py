"""Phases and categories against programs whose truth is known from their code."""

from __future__ import annotations

from typing import Any

import pytest
from analysis.recordings import recording
from analysis.training_loop import (
    ACTIVATION,
    INIT_STATE,
    INPUT,
    LINEAR,
    PARAMETERS,
    RECOMPUTE,
    TEMPORARY,
    TORCH,
    UPDATE,
    USER,
    TrainingLoop,
)
from builders import MIB, frame, oom

from fragdoctor.analysis.result import PhaseAnalysis
from fragdoctor.model.finding import Confidence
from fragdoctor.model.phases import Category, CategoryShare, TrainingPhase

MODEL = sum(PARAMETERS)
LETTERS = "sfbo+"


def passes_of(found: PhaseAnalysis) -> str:
    return "".join(LETTERS[i] for i in found.labels.tolist())


def by_category(sums: Any) -> dict[int, CategoryShare]:
    return {s.category: s for s in sums}


def most_of(found: PhaseAnalysis, category: int) -> CategoryShare | None:
    """Return the largest sum of a category over the peaks of all phases."""
    sums = [s for x in found.report.phases for s in x.held if s.category == category]
    return max(sums, key=lambda s: s.n_bytes, default=None)


def peak_of(found: PhaseAnalysis, phase: TrainingPhase) -> dict[int, CategoryShare]:
    """Return what the worst pass of a phase holds at its peak."""
    return by_category(next(x for x in found.report.phases if x.phase == phase).held)


def trained(n_steps: int = 3, **options: Any) -> TrainingLoop:
    loop = TrainingLoop(**options)
    loop.build()
    for _ in range(n_steps):
        loop.step()
    return loop


def test_find_phases_steps_are_found_in_order():
    found = trained(3).phases()

    assert found.report.method == "stacks"
    assert passes_of(found) == "s" + "fbo" * 3
    assert [(x.phase, x.n_passes) for x in found.report.phases] == [
        (TrainingPhase.SETUP, 1),
        (TrainingPhase.FORWARD, 3),
        (TrainingPhase.BACKWARD, 3),
        (TrainingPhase.OPTIMIZER, 3),
    ]


@pytest.mark.parametrize("context", ["all", "alloc"])
@pytest.mark.parametrize("n_steps", [1, 2, 5])
def test_find_phases_categories_have_the_bytes_of_the_program(n_steps, context):
    found = trained(n_steps, context=context).phases()

    for category, wanted in (
        (Category.PARAMETERS, MODEL),
        (Category.GRADIENTS, MODEL),
        (Category.OPTIMIZER_STATE, 2 * MODEL),
    ):
        most = most_of(found, category)
        assert most is not None
        assert most.n_bytes == wanted
        assert most.confidence is Confidence.LIKELY
    held = peak_of(found, TrainingPhase.BACKWARD)
    assert held[Category.ACTIVATIONS].n_bytes == 2 * ACTIVATION
    assert held[Category.INPUTS].n_bytes == INPUT
    rest = {s.category: s.n_bytes for s in found.report.at_rest}
    assert rest == {Category.PARAMETERS: MODEL, Category.OPTIMIZER_STATE: 2 * MODEL}
    assert found.report.rest_bytes == 3 * MODEL


def test_find_phases_peak_is_in_the_phase_that_holds_it():
    found = trained().phases()

    assert found.report.peak_phase == TrainingPhase.BACKWARD
    assert found.report.peak_bytes == max(x.worst_peak_bytes for x in found.report.phases)


def test_find_phases_optimizer_peak_is_seen_where_the_step_needs_most():
    loop = TrainingLoop()
    loop.build()
    for _ in range(3):
        loop.step()
        loop.free(loop.new(200 * MIB, UPDATE), UPDATE)

    found = loop.phases()

    assert found.report.peak_phase == TrainingPhase.OPTIMIZER
    assert by_category(found.report.at_peak)[Category.TEMPORARIES].n_bytes == 200 * MIB


def test_find_phases_gradients_kept_over_steps_are_gradients():
    loop = TrainingLoop()
    loop.build()
    for _ in range(4):
        _, *activations = loop.forward()
        loop.backward(activations)
        loop.optimizer()  # zero_grad(set_to_none=False): they stay where they are

    found = loop.phases()

    assert by_category(found.report.at_rest)[Category.GRADIENTS].n_bytes == MODEL


def test_find_phases_accumulated_gradients_survive_further_passes():
    loop = TrainingLoop()
    loop.build()
    for _ in range(3):
        for _ in range(4):
            batch, *activations = loop.forward()
            loop.backward(activations)
            loop.free(batch, USER)
        loop.optimizer()
        loop.zero_grad()

    found = loop.phases()

    assert passes_of(found) == "s" + "fbfbfbfbo" * 3
    assert most_of(found, Category.GRADIENTS).n_bytes == MODEL
    assert most_of(found, Category.KEPT) is None


def test_find_phases_recomputed_activations_are_no_backward_temporaries():
    loop = TrainingLoop()
    loop.build()
    for _ in range(3):
        batch, *activations = loop.forward()
        again = loop.new(50 * MIB, RECOMPUTE)
        loop.backward(activations)
        loop.free(again, ())
        loop.zero_grad()
        loop.free(batch, USER)

    found = loop.phases()

    held = peak_of(found, TrainingPhase.BACKWARD)
    assert held[Category.ACTIVATIONS].n_bytes >= 50 * MIB
    assert "f" not in passes_of(found).replace("fb", "")


def test_find_phases_cache_that_outlives_its_step_is_kept_and_not_sure():
    loop = TrainingLoop()
    loop.build()
    for _ in range(4):
        loop.step()
        loop.new(7 * MIB, LINEAR)

    kept = by_category(loop.phases().report.at_rest)[Category.KEPT]

    assert kept.n_bytes >= 14 * MIB
    assert kept.confidence is Confidence.POSSIBLE


def test_find_phases_workspace_as_large_as_a_parameter_is_no_gradient():
    loop = TrainingLoop()
    loop.build()
    for i in range(3):
        batch, *activations = loop.forward()
        if i == 0:
            loop.new(PARAMETERS[0], ())
        loop.backward(activations)
        loop.optimizer()
        loop.zero_grad()
        loop.free(batch, USER)

    found = loop.phases()

    assert most_of(found, Category.GRADIENTS).n_bytes == MODEL
    assert by_category(found.report.at_rest)[Category.KEPT].n_bytes == PARAMETERS[0]


def test_find_phases_closure_inside_the_step_is_not_the_step():
    step = INIT_STATE[1]
    closure = frame("train.py", 30, "closure")
    loop = TrainingLoop()
    loop.build()
    for _ in range(3):
        inside = (frame(f"{TORCH}/nn/functional.py", 1, "loss"), closure, step, *USER)
        made = loop.new(ACTIVATION, inside)
        loop.backward([made, loop.new(ACTIVATION, LINEAR)])
        loop.optimizer()
        loop.zero_grad()

    assert passes_of(loop.phases()).count("fbo") == 3


def test_find_phases_failure_in_forward_leaves_activations_unsure():
    loop = TrainingLoop()
    loop.build()
    loop.forward()
    loop.toy.events.append(oom(64 * MIB, 0))

    found = loop.phases()

    assert passes_of(found) == "sf"
    assert found.report.reason
    held = by_category(found.report.at_peak)
    assert held[Category.ACTIVATIONS].n_bytes == 2 * ACTIVATION
    assert held[Category.ACTIVATIONS].confidence is Confidence.POSSIBLE
    assert held[Category.PARAMETERS].n_bytes == MODEL


def test_find_phases_unwinding_after_a_failure_in_forward_makes_no_temporaries():
    loop = trained(2)
    held = loop.forward()
    loop.toy.events.append(oom(64 * MIB, 0))
    for block in held:
        loop.free(block, USER)

    found = loop.phases()

    at_peak = peak_of(found, TrainingPhase.FORWARD)
    assert at_peak[Category.ACTIVATIONS].n_bytes == 2 * ACTIVATION
    assert at_peak[Category.TEMPORARIES].n_blocks == 1  # the scratch of the moment


def test_find_phases_unwinding_after_a_failure_in_the_first_step_leaves_optimizer_state():
    loop = TrainingLoop()
    loop.build()
    batch, *activations = loop.forward()
    loop.backward(activations)
    state = [loop.new(size, INIT_STATE) for size in PARAMETERS]
    loop.toy.events.append(oom(64 * MIB, 0))
    for block in (batch, *loop.gradients, *state, *loop.parameters):
        loop.free(block, USER)

    found = loop.phases()

    at_peak = peak_of(found, TrainingPhase.OPTIMIZER)
    assert at_peak[Category.OPTIMIZER_STATE].n_bytes == MODEL
    assert at_peak[Category.PARAMETERS].n_bytes == MODEL


def test_find_phases_model_that_goes_at_the_end_is_there_between_steps():
    loop = trained(3)
    for block in (*loop.state, *loop.parameters):
        loop.free(block, USER)

    between = by_category(loop.phases().report.at_rest)

    assert between[Category.PARAMETERS].n_bytes == MODEL
    assert between[Category.OPTIMIZER_STATE].n_bytes == 2 * MODEL
    assert Category.GRADIENTS not in between
    assert Category.TEMPORARIES not in between


def test_find_phases_weights_of_inference_that_go_at_the_end_are_no_temporaries():
    loop = TrainingLoop()
    loop.build()
    for _ in range(4):
        for block in loop.forward():
            loop.free(block, USER)
    for block in loop.parameters:
        loop.free(block, USER)

    held = by_category(loop.phases().report.at_peak)

    assert held[Category.PARAMETERS].n_bytes == MODEL


def test_find_phases_inference_has_no_activations():
    loop = TrainingLoop()
    loop.build()
    cache = [loop.new(TEMPORARY, LINEAR)]
    for i in range(20):
        cache.append(loop.new(TEMPORARY + (i + 1) * 4096, LINEAR))
        loop.free(cache.pop(0), LINEAR)

    found = loop.phases()

    held = by_category(found.report.at_peak)
    assert set(held) <= {Category.PARAMETERS, Category.TEMPORARIES, Category.UNKNOWN}
    assert "backward" in found.report.reason


def test_find_phases_inference_counts_no_passes_and_is_sure_of_no_temporaries():
    loop = TrainingLoop()
    loop.build()
    for _ in range(4):
        for block in loop.forward():
            loop.free(block, LINEAR)

    found = loop.phases()

    forward = next(x for x in found.report.phases if x.phase == TrainingPhase.FORWARD)
    assert forward.n_passes is None
    held = by_category(forward.held)
    assert held[Category.TEMPORARIES].n_bytes > 0
    assert held[Category.TEMPORARIES].confidence is Confidence.POSSIBLE
    assert held[Category.PARAMETERS].confidence is Confidence.LIKELY


def test_find_phases_without_stacks_or_annotations_nothing_is_told():
    found = trained(context="none").phases()

    assert found.report.method == "none"
    assert found.report.reason
    assert not found.report.phases
    assert not found.report.at_peak


def gpt_parameters(layers: int, dim: int, vocab: int = 8192, ctx: int = 4096) -> int:
    """Return the blocks of the parameters of the recordings' GPT, each a multiple of 512 bytes."""
    block = [3 * dim * dim, 3 * dim, dim * dim, dim, 4 * dim * dim, 4 * dim, 4 * dim * dim, dim]
    shapes = [vocab * dim, ctx * dim, vocab * dim, dim, dim]
    shapes += layers * (block + 4 * [dim])
    return sum(-(-4 * n // 512) * 512 for n in shapes)


# (recording, parameters, their number, times of optimizer state)
TRAINED = [
    ("optimizer_spike", gpt_parameters(8, 1024), 101, 2),
    ("frag_gpt_varlen_expandable", gpt_parameters(6, 512), 77, 2),
    ("expandable_segments", gpt_parameters(4, 512), 53, 2),
    ("multistream_record_stream", gpt_parameters(2, 256), 29, 2),
    ("annotations", gpt_parameters(2, 128), 29, 2),
    ("context_alloc", gpt_parameters(2, 128), 29, 2),
    ("stacks_all", gpt_parameters(2, 128), 29, 2),
    ("skip_actions", gpt_parameters(2, 128), 29, 2),
    ("late_start", gpt_parameters(2, 128), 29, 2),
    ("ring_overflow", gpt_parameters(2, 128), 29, 2),
]


@pytest.mark.shared
@pytest.mark.parametrize(("name", "n_bytes", "n_blocks", "times"), TRAINED)
def test_find_phases_recorded_model_has_its_exact_bytes(shared, name, n_bytes, n_blocks, times):
    _, (analysis, *_) = recording(shared / "snapshots" / name)
    found = analysis.phases
    assert found is not None

    for category, factor in (
        (Category.PARAMETERS, 1),
        (Category.OPTIMIZER_STATE, times),
        (Category.GRADIENTS, 1),
    ):
        most = most_of(found, category)
        assert most is not None
        assert (category, most.n_blocks) == (category, factor * n_blocks)
        assert (category, most.n_bytes) == (category, factor * n_bytes)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("optimizer_spike", TrainingPhase.OPTIMIZER),
        ("optimizer_spike_oom", TrainingPhase.OPTIMIZER),
        ("healthy_gpt", TrainingPhase.BACKWARD),
        ("capacity_oom", TrainingPhase.FORWARD),
        ("eval_without_no_grad", TrainingPhase.FORWARD),
    ],
)
def test_find_phases_recorded_peak_is_in_its_phase(shared, name, phase):
    _, (analysis, *_) = recording(shared / "snapshots" / name)

    assert analysis.phases.report.peak_phase == phase


@pytest.mark.shared
def test_find_phases_checkpointing_makes_activations_smaller(shared):
    held = [
        by_category(recording(shared / "snapshots" / name)[1][0].phases.report.at_peak)[
            Category.ACTIVATIONS
        ]
        for name in ("checkpoint_on", "checkpoint_off")
    ]

    assert 3 * held[0].n_bytes < held[1].n_bytes


@pytest.mark.shared
def test_find_phases_every_recording_sums_to_its_peak(shared):
    for folder in sorted((shared / "snapshots").iterdir()):
        if not folder.is_dir():
            continue
        for analysis in recording(folder)[1]:
            found = analysis.phases
            if found is None or not found.report.phases:
                continue
            assert sum(s.n_bytes for s in found.report.at_peak) == found.report.peak_bytes
            assert found.report.peak_bytes == analysis.timeline.peak_allocated_bytes
            assert found.first[0] == 0
            assert found.first[-1] == analysis.n_events
