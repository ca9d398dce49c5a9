"""Training loops that keep memory: what is found to grow, through which line, and what is not."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from analysis.training_loop import (
    ACTIVATION,
    APPLY,
    BATCH,
    CALL,
    ENGINE,
    HIDDEN,
    MAIN,
    OUTPUT,
    RESULT,
    SEED,
    TORCH,
    TrainingLoop,
)
from builders import MIB, frame
from stock import from_python

from fragdoctor.analysis.device import analyze_device
from fragdoctor.analysis.growing_buffers import find_growing_buffers
from fragdoctor.analysis.result import KeptKind, KeptMemory, KeptPattern
from fragdoctor.analysis.training_run import TrainingRequests
from fragdoctor.future.passes import is_training_forward
from fragdoctor.trace.trace import Trace

TRAIN = (frame("train.py", 4, "main"), MAIN)
LAYERS = [
    (
        frame(f"{TORCH}/nn/functional.py", 1, "linear"),
        CALL,
        frame("model.py", line, "forward"),
        CALL,
        *TRAIN,
    )
    for line in (7, 8, 9)
]
LOSS = (frame(f"{TORCH}/nn/functional.py", 3, "cross_entropy"), *TRAIN)
HOOK = (frame("probe.py", 5, "store"), CALL, frame("model.py", 7, "forward"), CALL, *TRAIN)
EVALUATE = (frame("train.py", 20, "validate"), MAIN)
CAT = (frame("bank.py", 9, "push"), *TRAIN)
DECODE = (frame("generate.py", 30, "decode"), MAIN)
CACHE = (frame("model.py", 31, "forward"), CALL, *DECODE)


def kept_of(loop: TrainingLoop) -> tuple[KeptMemory | None, tuple[str, int] | None]:
    """Return what is kept, and the file and line through which it is made."""
    snapshot = loop.snapshot()
    kept = analyze_device(snapshot, 0).kept
    if kept is None or kept.frame < 0:
        return kept, None
    found = snapshot.frame(kept.frame)
    return kept, (found.filename, found.line)


def trained() -> TrainingLoop:
    loop = TrainingLoop()
    loop.build()
    return loop


def test_find_kept_graphs_are_traced_to_the_line_that_their_stacks_share():
    loop = trained()
    for _ in range(8):
        for stack in LAYERS:
            loop.new(ACTIVATION, stack)
        loop.new(MIB, LOSS)
        loop.step()

    kept, place = kept_of(loop)

    assert kept is not None
    assert kept.pattern is KeptPattern.GRAPH
    assert place == ("train.py", 4)
    assert {k.kind: k.n_per_step for k in kept.kinds} == {
        KeptKind.ACTIVATION: 3,
        KeptKind.LOSS: 1,
    }
    assert kept.slope_bytes == 3 * ACTIVATION + MIB


def test_find_kept_what_an_exception_lets_go_of_after_the_failure_was_kept():
    loop, graphs = trained(), []
    for _ in range(8):
        graphs += [(loop.new(ACTIVATION, stack), stack) for stack in LAYERS]
        loop.step()
    loop.toy.refuse(100 * MIB, MIB)
    whole, place = kept_of(loop)
    for block, stack in graphs:  # as the file is written where the exception was handled
        loop.free(block, stack)

    kept, place_after = kept_of(loop)

    assert whole is not None
    assert kept is not None
    assert (kept.survivor_bytes, kept.n_steps) == (whole.survivor_bytes, whole.n_steps)
    assert place_after == place


def test_find_kept_losses_without_a_backward_pass_are_those_of_an_evaluation():
    loop = trained()
    for _ in range(3):
        loop.step()
    for _ in range(12):  # total += loss, with gradients on
        for stack in HIDDEN:
            loop.free(loop.new(2 * MIB, stack), stack)
            loop.new(ACTIVATION, stack)
        loop.new(MIB, (LOSS[0], *EVALUATE))

    kept, _ = kept_of(loop)

    assert kept is not None
    assert kept.pattern is KeptPattern.EVALUATION
    assert KeptKind.LOSS in {k.kind for k in kept.kinds}


def test_find_kept_little_of_a_cut_trace_counts_with_what_was_kept_before_it():
    loop, ends = trained(), []
    for _ in range(100):
        loop.step()
        loop.new(MIB, HOOK)
        ends.append(len(loop.toy.events))
    data = loop.recording()
    data["device_traces"][0] = data["device_traces"][0][ends[-6] :]

    analysis = analyze_device(from_python(data), 0)

    assert analysis.kept is not None
    assert analysis.kept.slope_bytes == MIB
    assert 20 * analysis.kept.survivor_bytes < analysis.active_bytes


def test_find_kept_graphs_of_every_third_step_are_found_though_those_free_nothing():
    loop = trained()
    for i in range(22):
        if i % 3 == 1:  # an exception that is put aside with its traceback
            loop.new(2 * MIB, BATCH)
            for stack in LAYERS:
                loop.new(ACTIVATION, stack)
        else:
            loop.step()

    kept, _ = kept_of(loop)

    assert kept is not None
    assert kept.pattern is KeptPattern.GRAPH
    assert kept.n_steps >= 6


def test_find_kept_a_full_window_is_none():
    loop, window = trained(), deque()
    for _ in range(20):
        loop.step()
        window.append(loop.new(4 * MIB, CAT))
        if len(window) > 4:
            loop.free(window.popleft(), CAT)

    assert kept_of(loop)[0] is None


def grown(loop: TrainingLoop, i: int, old, part: int = 5 * MIB, stack=CAT):
    """Return a buffer that is longer by a part, made before the old one goes."""
    new = loop.new((i + 1) * part, stack)
    if old is not None:
        loop.free(old, stack)
    return new


def test_find_kept_buffer_that_grows_through_training_is_endless():
    loop, bank = trained(), None
    for i in range(12):
        loop.step()
        bank = grown(loop, i, bank)

    kept, place = kept_of(loop)

    assert kept is not None
    assert kept.pattern is KeptPattern.BUFFER
    assert place == ("bank.py", 9)
    assert kept.slope_bytes == 5 * MIB
    assert kept.survivor_bytes == 60 * MIB


def test_find_kept_state_of_a_recurrent_cell_is_a_graph_of_few_lines():
    loop = trained()
    for _ in range(8):
        for _ in range(4):
            passes = loop.new(ACTIVATION, LAYERS[0])
            for stack in LAYERS[1:]:
                loop.new(ACTIVATION, stack)
            loop.free(passes, TRAIN)
        loop.step()

    kept, _ = kept_of(loop)

    assert kept is not None
    assert kept.pattern is KeptPattern.GRAPH


@pytest.mark.parametrize("by_model", [True, False])
def test_find_kept_buffer_that_grows_without_training_is_a_cache_if_the_model_grows_it(by_model):
    loop, cache = trained(), None
    for i in range(40):
        for block in loop.forward():
            loop.free(block, ENGINE)
        cache = grown(loop, i, cache, stack=CACHE if by_model else CAT)

    assert (kept_of(loop)[0] is None) == by_model


def test_find_kept_two_buffers_that_grow_side_by_side_are_endless():
    loop, bank, labels = trained(), None, None
    for i in range(12):
        loop.step()
        bank = grown(loop, i, bank)
        new = loop.new((i + 1) * 5 * MIB, EVALUATE)
        if labels is not None:
            loop.free(labels, EVALUATE)
        labels = new

    kept, _ = kept_of(loop)

    assert kept is not None
    assert kept.pattern is KeptPattern.BUFFER


def test_find_kept_batch_variable_of_ever_larger_inputs_is_none():
    """The batch is overwritten by the next one, which is larger, as is all that is made of it."""
    loop, batch = trained(), None
    for i in range(12):
        batch = grown(loop, i, batch)
        work = [loop.new((i + 1) * 5 * MIB, stack) for stack in LAYERS]
        for block in work:
            loop.free(block, ENGINE)
        loop.step()

    assert kept_of(loop)[0] is None


@pytest.mark.parametrize("is_copied", [True, False])
def test_find_growing_buffers_are_there_until_their_successors_are_made(is_copied):
    """Activations of ever longer inputs are not."""
    n = 12
    made, freed = 10 * np.arange(n), 10 * np.arange(1, n + 1) + (1 if is_copied else -1)
    size, stack = (np.arange(n) + 1) * 5 * MIB, np.zeros(n, np.int32)

    found = find_growing_buffers(TrainingRequests(made, freed, size, stack))

    assert len(found) == is_copied


def test_find_kept_longer_inputs_in_each_step_are_none():
    loop = trained()
    for i in range(12):
        loop.free(loop.new((i + 1) * 5 * MIB, LAYERS[0]), ENGINE)
        loop.step()

    assert kept_of(loop)[0] is None


def test_find_kept_results_of_the_evaluation_under_way_are_gathered():
    loop = trained()
    for _ in range(3):
        loop.step()
    loop.evaluate(9)

    found = analyze_device(loop.snapshot(), 0)

    assert found.kept is None
    assert found.gathered is not None
    assert found.gathered.slope_bytes == RESULT


def test_find_kept_results_that_an_evaluation_joins_batch_by_batch_are_gathered():
    loop = trained()
    for _ in range(3):
        loop.step()
    joined = None
    for i in range(9):
        hidden = [loop.new(ACTIVATION, stack) for stack in HIDDEN]
        longer = loop.new((i + 1) * RESULT, OUTPUT)
        for block in (*hidden, *([joined] if joined else [])):
            loop.free(block, OUTPUT)
        joined = longer

    found = analyze_device(loop.snapshot(), 0)

    assert found.kept is None
    assert found.gathered is not None
    assert (found.gathered.pattern, found.gathered.slope_bytes) == (KeptPattern.BUFFER, RESULT)


def test_find_kept_results_of_several_evaluations_are_a_leak():
    loop = trained()
    for _ in range(3):
        for _ in range(2):
            loop.step()
        loop.evaluate(4)

    found = analyze_device(loop.snapshot(), 0)

    assert found.gathered is None
    assert found.kept is not None
    assert found.kept.survivor_bytes >= 8 * RESULT


def request(loop: TrainingLoop) -> None:
    """Serve a request, which keeps what four layers make: other lines' results are passing."""
    ids = loop.new(MIB, DECODE)
    for line in range(20, 30):
        stack = (frame("model.py", line, "forward"), CALL, *DECODE)
        loop.free(loop.new(ACTIVATION, stack), stack)
    for _ in range(4):
        loop.new(ACTIVATION, CACHE)
    loop.free(ids, DECODE)


def test_find_kept_results_of_requests_are_no_graph():
    loop = trained()
    for _ in range(12):
        request(loop)

    kept = kept_of(loop)[0]

    assert kept is not None
    assert kept.pattern is KeptPattern.RESULTS  # nothing for no_grad


def test_find_kept_states_that_a_fused_layer_returns_are_no_graph():
    """One line stands for the whole layer, so the lines do not tell; most of what it makes goes."""
    loop = trained()
    for _ in range(12):
        ids = loop.new(MIB, DECODE)
        for i in range(40):
            block = loop.new(ACTIVATION, CACHE)
            if i % 10:
                loop.free(block, CACHE)
        loop.free(ids, DECODE)

    kept = kept_of(loop)[0]

    assert kept is not None
    assert kept.pattern is KeptPattern.RESULTS


@pytest.mark.parametrize("keeps", [True, False])
def test_student_trains_though_its_teacher_keeps_nothing(keeps):
    loop = TrainingLoop()
    loop.build()
    teacher, student = ((*LAYERS[0][:-2], frame("train.py", n, "main"), MAIN) for n in (3, 4))
    for _ in range(60):
        loop.free(loop.new(ACTIVATION, teacher), teacher)
    for _ in range(20):
        block = loop.new(ACTIVATION, student)
        if not keeps:
            loop.free(block, student)
    loop.refuse(ACTIVATION, student)
    trace = Trace.of(loop.snapshot(), 0)

    assert is_training_forward(trace, int(trace.oom_rows[-1])) is keeps


@pytest.mark.parametrize(
    ("kept_stack", "place"),
    [
        (HOOK, ("probe.py", 5)),
        (LAYERS[1], ("model.py", 8)),
        (LAYERS[2], ("train.py", 4)),  # the last one is what the call returns
    ],
)
def test_find_kept_what_a_model_keeps_itself_is_no_result_of_its_caller(kept_stack, place):
    loop = trained()
    for _ in range(8):
        for stack in (LAYERS[0], HOOK, *LAYERS[1:]):
            block = loop.new(ACTIVATION, stack)
            if stack != kept_stack:
                loop.free(block, ENGINE)
        loop.step()

    kept, found = kept_of(loop)

    assert kept is not None
    assert kept.pattern is KeptPattern.RESULTS
    assert found == place


AVERAGE = (frame("average.py", 5, "update"), *TRAIN)


def test_find_kept_copies_of_weights_are_told_by_their_sizes():
    sizes = [(i + 3) * MIB for i in range(4)]
    loop = trained()
    for size in sizes * 8:
        loop.new(size, APPLY)
    for _ in range(8):
        for size in sizes * 2:
            loop.new(size, AVERAGE)
        loop.step()

    kept, _ = kept_of(loop)

    assert kept is not None
    assert kept.pattern is KeptPattern.COPIES


def test_find_kept_models_are_not_called_gradients_by_their_largest_part():
    loop = trained()
    for _ in range(8):
        for size in (3 * MIB, 4 * MIB):
            loop.new(size, APPLY)
            loop.new(size, SEED)
            loop.new(MIB, SEED)
        loop.step()

    kept, found = kept_of(loop)

    assert kept is not None
    assert kept.pattern is KeptPattern.MODELS
    assert found == ("train.py", 2)


def test_find_kept_what_every_second_step_keeps_is_found():
    loop = trained()
    for i in range(11):
        loop.step()
        if i % 2:
            loop.new(20 * MIB, CAT)

    kept, _ = kept_of(loop)

    assert kept is not None
    assert kept.n_steps == 5
