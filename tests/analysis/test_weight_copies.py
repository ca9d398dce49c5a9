"""Weights held twice: a copy, a model before its successor, and what is neither."""

from __future__ import annotations

from analysis.training_loop import APPLY, MAIN, TORCH, TrainingLoop
from builders import MIB, frame

from fragdoctor.analysis.device import analyze_device
from fragdoctor.analysis.weight_copies import WeightCopies, find_weight_copies

SIZES = (4 * MIB, 6 * MIB, 1 * MIB, 3 * MIB)
DEEPCOPY = (frame("train.py", 30, "main"), MAIN)
CRITIC = (frame(f"{TORCH}/nn/modules/module.py", 9, "_apply"), frame("train.py", 31, "main"), MAIN)


def copies_of(loop: TrainingLoop) -> WeightCopies | None:
    a = analyze_device(loop.snapshot(), 0)
    return find_weight_copies(a.trace, a.phases, a.n_events)


def line_of(loop: TrainingLoop, copies: WeightCopies) -> int:
    stack = loop.snapshot().stack(copies.stack)
    return next(f.line for f in stack if f.filename == "train.py")


def model(stack=APPLY, sizes=SIZES) -> TrainingLoop:
    loop = TrainingLoop()
    for size in sizes:
        loop.new(size, stack)
    return loop


def test_copies_of_the_weights_are_what_another_line_made_in_their_sizes():
    loop = model()
    for size in SIZES:
        loop.new(size, DEEPCOPY)
    loop.forward()

    copies = copies_of(loop)

    assert copies is not None
    assert (copies.n_bytes, copies.freed_row) == (sum(SIZES), None)
    assert line_of(loop, copies) == 30


def test_copies_may_hold_the_model_several_times_and_small_blocks_besides():
    loop = model()
    for size in SIZES:  # what torch.load puts on the GPU: a weight, Adam's state, the step's number
        for block in (size, size, size, 512):
            loop.new(block, DEEPCOPY)
    loop.forward()

    copies = copies_of(loop)

    assert copies is not None
    assert (copies.n_bytes, line_of(loop, copies)) == (3 * sum(SIZES) + 4 * 512, 30)


def test_copy_that_was_cut_off_begins_like_the_model():
    sizes = (*SIZES, 2 * MIB, 7 * MIB)
    loop, other = model(sizes=sizes), model(sizes=sizes)
    for size in sizes[:4]:
        loop.new(size, DEEPCOPY)
        other.new(size, DEEPCOPY)
    other.new(MIB, DEEPCOPY[1:])  # work went on: these are tensors of the program's own

    copies = copies_of(loop)

    assert copies is not None
    assert (len(copies.rows), line_of(loop, copies)) == (4, 30)
    assert copies_of(other) is None


def test_copies_are_none_of_a_network_and_its_mirror():
    loop = model()
    for size in (6 * MIB, 4 * MIB, 2 * MIB, 512):  # the large ones are alike
        loop.new(size, CRITIC)

    assert copies_of(loop) is None


def test_copies_are_none_where_one_line_builds_equal_layers():
    assert copies_of(model(sizes=SIZES * 2)) is None


def test_old_model_is_what_the_line_built_before_work_was_done():
    loop = model()
    for block in loop.forward():
        loop.free(block, (MAIN,))
    state = loop.new(8 * MIB, DEEPCOPY)
    for size in SIZES:
        loop.new(size, APPLY)

    copies = copies_of(loop)

    assert copies is not None
    assert copies.n_bytes == sum(SIZES) + state.size  # what was made for it goes with it
    assert copies.freed_row is not None
