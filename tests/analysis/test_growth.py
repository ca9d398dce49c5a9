"""Programs whose steps are known: which lines grow."""

from __future__ import annotations

from collections import deque

import pytest
from analysis.recordings import recording, recordings
from builders import MIB, frame
from stock import from_python
from toy_allocator import ToyAllocator

from fragdoctor.analysis.device import analyze_device

MODULE = frame("/v/site-packages/torch/nn/modules/module.py", 1, "_call_impl")
MAIN = frame(line=100, name="main")


class Program:
    """A training loop in miniature; every allocation names its line."""

    def __init__(self, outer=(MAIN,)):
        self.outer = outer
        self.outers = {}  # of each line
        self.toy = ToyAllocator()

    def new(self, size, line):
        block = self.toy.malloc(size, line=line)
        self.toy.events[-1]["frames"] = [frame(line=line), *self.outer]
        self.outers[line] = self.outer
        return block

    def step(self, i, sizes=(3 * MIB, 5 * MIB, 2 * MIB)):
        """Allocate on lines 10, 11, 12 and free it all."""
        blocks = [self.new(size, 10 + j) for j, size in enumerate(sizes)]
        for block in blocks:
            self.toy.free(block)

    def growing_lines(self, first_event=0):
        data = self.toy.data(first_event)
        for segment in data["segments"]:
            for block in segment["blocks"]:
                if block["frames"]:
                    block["frames"] += self.outers[block["frames"][0]["line"]]
        read = from_python(data)
        return {read.frame(g.frame).line if g.frame >= 0 else None: g for g in self._run(read)}

    def _run(self, read):
        self.result = analyze_device(read, 0)
        return self.result.growth


def test_find_growth_kept_every_step_is_found_with_its_slope():
    p = Program()
    parameters = [p.new(4 * MIB, 1) for _ in range(3)]
    for i in range(12):
        p.step(i)
        p.new(MIB, 20)

    found = p.growing_lines()

    assert parameters
    assert list(found) == [20]
    assert (found[20].slope_bytes, found[20].n_steps, found[20].n_survivors) == (MIB, 12, 12)
    assert p.result.n_steps == 12


def test_find_growth_begins_after_what_the_first_step_makes_for_good_on_the_same_line():
    p = Program()
    for i in range(12):
        p.step(i)
        p.new(64 * MIB if i == 0 else MIB, 20)

    found = p.growing_lines()[20]

    assert (found.slope_bytes, found.n_steps, found.survivor_bytes) == (MIB, 11, 11 * MIB)


def test_find_growth_of_a_few_bytes_beside_what_is_made_once_is_none():
    p = Program()
    for i in range(21):
        p.step(i)
        p.new(64 * MIB if i == 0 else 512, 20)

    assert p.growing_lines() == {}


@pytest.mark.parametrize("every", [2, 3])
def test_find_growth_kept_every_few_steps_is_found(every):
    p = Program()
    for i in range(24):
        p.step(i)
        if i % every == 0:
            p.new(MIB, 20)

    assert list(p.growing_lines()) == [20]


def test_find_growth_leak_that_starts_late_is_found():
    p = Program()
    for i in range(30):
        p.step(i)
        if i >= 20:
            p.new(MIB, 20)

    assert list(p.growing_lines()) == [20]


@pytest.mark.parametrize("begins", [0.7, 0.8])
@pytest.mark.parametrize("every", [1, 2])
def test_find_growth_leak_in_the_last_steps_of_many_is_found(begins, every):
    p = Program()
    for i in range(60):
        p.step(i)
        if i >= 60 * begins and i % every == 0:
            p.new(MIB, 20)

    assert list(p.growing_lines()) == [20]


@pytest.mark.parametrize("n_last", [1, 4, 7])
def test_find_growth_results_of_an_epoch_that_are_let_go_of_are_none(n_last):
    """Whatever is kept of the epoch under way, and though its batches are larger."""
    p, kept = Program(), []
    for i in range(40 + n_last):
        if i % 8 == 0:
            for block in kept:
                p.toy.free(block)
            kept = []
        p.step(i)
        kept.append(p.new((1 + (i >= 40)) * MIB, 20))

    assert p.growing_lines() == {}


@pytest.mark.parametrize(("bound", "first_step"), [(6, 0), (18, 0), (30, 0), (6, 16), (14, 16)])
def test_find_growth_memory_that_fills_up_to_a_bound_is_none(bound, first_step):
    """Also where the recording begins when it has filled up, and shows it filled anew."""
    p, window, first_event = Program(), deque(), 0
    for i in range(40):
        if i == first_step:
            first_event = len(p.toy.events)
        p.step(i)
        window.append(p.new(MIB, 20))
        if len(window) > bound:
            p.toy.free(window.popleft())

    assert p.growing_lines(first_event) == {}


def test_find_growth_after_a_cut_ring_buffer_is_found():
    p = Program()
    for i in range(30):
        p.step(i)
        p.new(MIB, 20)

    assert list(p.growing_lines(first_event=len(p.toy.events) // 2)) == [20]


def test_find_growth_first_step_only_is_none():
    p = Program()
    for i in range(12):
        p.step(i)
        if i == 0:
            for _ in range(8):
                p.new(MIB, 20)

    assert p.growing_lines() == {}


def test_find_growth_cache_that_saturates_is_none():
    p = Program()
    for i in range(60):
        p.step(i)
        if i < 8:
            p.new(MIB, 20)

    assert p.growing_lines() == {}


def test_find_growth_replaced_by_larger_is_none():
    p = Program()
    old = p.new(MIB, 20)
    for i in range(30):
        p.step(i)
        new = p.new(MIB + i * 8192, 20)
        p.toy.free(old)
        old = new

    assert p.growing_lines() == {}


def test_find_growth_as_many_blocks_of_ever_larger_sizes_is_none():
    """As keys and values are, one of each layer: each outlives several steps of the program."""
    p = Program()
    live = deque()
    for i in range(40):
        p.step(i)
        live.append(p.new((i + 1) * MIB, 30))
        if len(live) > 4:
            p.toy.free(live.popleft())

    assert not p.growing_lines()


def test_find_growth_let_go_of_in_the_end_is_none():
    """What is left of the line that grew is a workspace of its first step."""
    p = Program()
    kept = []
    for i in range(12):
        p.step(i)
        kept.append(p.new((32 if i == 0 else 1) * MIB, 30))
    for block in kept[1:]:
        p.toy.free(block)

    assert not p.growing_lines()


def test_find_growth_loop_that_only_keeps_is_none():
    p = Program()
    for _ in range(50):
        for line in (10, 11, 12):
            p.new(MIB, line)

    assert p.growing_lines() == {}


def test_find_growth_sawtooth_is_none():
    p = Program()
    for _ in range(6):
        kept = []
        for i in range(6):
            p.step(i)
            kept.append(p.new(MIB, 20))
        for block in kept:
            p.toy.free(block)
    for i in range(2):
        p.step(i)
        p.new(MIB, 20)

    assert p.growing_lines() == {}


def test_find_growth_layers_of_one_forward_are_none():
    """A pass over layers inside a module is no step, though it keeps its activations."""
    p = Program(outer=(MODULE, frame(line=5, name="step"), MAIN))
    for _ in range(40):
        for line in (10, 11, 12):
            block = p.new(MIB, line)
            if line != 12:
                p.toy.free(block)

    assert p.growing_lines() == {}


OPTIMIZER = (frame("/v/site-packages/torch/optim/adam.py", 2, "step"), MAIN)


def _states(p: Program, n: int, size: int = 4 * MIB) -> None:
    """Let the optimizer make n states."""
    p.outer = OPTIMIZER
    for _ in range(n):
        p.new(size, 30)
    p.outer = (MAIN,)


def test_find_growth_optimizers_made_anew_and_kept_are_found():
    p = Program()
    parameters = [p.new(4 * MIB, 1) for _ in range(3)]
    for i in range(12):
        p.step(i)
        _states(p, 2 * len(parameters))

    assert list(p.growing_lines()) == [30]


LEAKS = {"leak_losses", "leak_features", "eval_without_no_grad"}


@pytest.mark.shared
def test_find_growth_recordings_only_the_leaks_grow(shared, has_all_recordings):
    there = {folder.name for folder in recordings(shared)}
    growing = {f.name for f in recordings(shared) for a in recording(f)[1] if a.growth}

    assert growing == LEAKS & there
    assert growing == LEAKS or not has_all_recordings
