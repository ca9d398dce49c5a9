from __future__ import annotations

from analysis.training_loop import TrainingLoop
from builders import BASE, MIB, alloc, block, frame, free, segment, segment_alloc, snapshot
from stock import from_python

from fragdoctor.analysis.attribution import find_holders
from fragdoctor.analysis.device import analyze_device
from fragdoctor.model.phases import Category


def holders_of(analysis):
    """Return the holders at the end and at the peak."""
    return find_holders(analysis.trace, [analysis.timeline.peak_allocated_state], analysis.category)


def test_find_holders_peak_and_now_are_told_apart():
    at = [[frame(line=n)] for n in (1, 2)]
    big, small = BASE, BASE + 40 * MIB
    read = from_python(
        snapshot(
            segment(BASE, block(40 * MIB)),
            segment(small, block(20 * MIB, "active_allocated", frames=at[1])),
            events=[
                segment_alloc(big, 40 * MIB),
                alloc(big, 40 * MIB, frames=at[0]),
                segment_alloc(small, 20 * MIB),
                alloc(small, 20 * MIB, frames=at[1]),
                *free(big, 40 * MIB, frames=at[0]),
            ],
        )
    )

    result = analyze_device(read, 0)

    assert [(read.frame(h.frame).line, h.n_bytes, h.n_blocks) for h in holders_of(result)] == [
        (1, [0, 40 * MIB], [0, 1]),
        (2, [20 * MIB, 20 * MIB], [1, 1]),
    ]


def test_find_holders_equal_layers_are_one_module_and_a_single_one_is_named():
    made = [
        (1, "nn.Module: layers.0.mlp", 40 * MIB),
        (1, "nn.Module: layers.11.mlp", 40 * MIB),
        (1, "nn.Module: head", 60 * MIB),
        (2, "nn.Module: layers.0.conv2", 30 * MIB),
        (3, "the program's own", 20 * MIB),
    ]
    segments, events = [], []
    for i, (line, note, size) in enumerate(made):
        at, frames = BASE + 100 * i * MIB, [frame(line=line)]
        segments.append(segment(at, block(size, "active_allocated", frames=frames)))
        events.append(segment_alloc(at, size))
        events.append(alloc(at, size, frames=frames, user_metadata=note))

    result = analyze_device(read := from_python(snapshot(*segments, events=events)), 0)

    assert {read.frame(h.frame).line: h.module for h in holders_of(result)} == {
        1: "layers.*.mlp",
        2: "layers.0.conv2",
        3: "",
    }


def test_find_holders_line_that_calls_a_trainer_says_what_it_holds():
    loop = TrainingLoop()
    loop.build()
    for _ in range(4):
        loop.step()

    found = analyze_device(loop.snapshot(), 0)

    by_line = {found.trace.snapshot.frame(h.frame).line: h.categories for h in holders_of(found)}
    assert by_line[6] == (Category.OPTIMIZER_STATE,)
    assert by_line[2] == (Category.PARAMETERS,)
