"""Names of a census on the blocks of a trace, by address and in time."""

from __future__ import annotations

import numpy as np
import pytest
from analysis.training_loop import MAIN, TrainingLoop
from builders import BASE, MIB, alloc, block, columns, frame, free, segment, segment_alloc, snapshot
from msgspec.structs import replace

from fragdoctor.analysis.device import analyze_device
from fragdoctor.analysis.owners import general, growth_of, held_twice, main_owner, named_blocks
from fragdoctor.model.case import Case
from fragdoctor.model.census import Census, HoldingKind, Owner
from fragdoctor.rules.growth.growing_line import keeper
from fragdoctor.rules.rule import Context
from fragdoctor.trace.trace import Trace


def owner(name: str, kind: HoldingKind = HoldingKind.CONTAINER, n_items: int = 1) -> Owner:
    return Owner(name, kind, n_items, "list")


def census(*held: tuple[Owner, int, int], time_us: int = 0) -> Census:
    """Return a census of (owner, address, bytes)."""
    owners = list(dict.fromkeys(o for o, _, _ in held))
    return Census(
        time_us, 0, True, tuple(owners),
        np.zeros(len(held), np.int32),
        np.array([a for _, a, _ in held], np.uint64),
        np.array([n for _, _, n in held], np.int64),
        np.array([owners.index(o) for o, _, _ in held], np.int32),
    )  # fmt: skip


def two_blocks() -> Trace:
    """Return a trace in which the first block's address is used twice, at 10 and 30 us."""
    stack = [frame("rl.py", 25, "store")]
    blocks = [block(MIB, "active_allocated", frames=stack), block(MIB, "active_allocated")]
    events = [
        segment_alloc(BASE, 2 * MIB, time_us=1),
        alloc(BASE, MIB, time_us=10),
        *free(BASE, MIB, time_us=20),
        alloc(BASE, MIB, frames=stack, time_us=30),
        alloc(BASE + MIB, MIB, time_us=40),
    ]
    return Trace.of(columns(snapshot(segment(BASE, *blocks), events=events)), 0)


def test_block_is_found_by_an_address_within_it():
    trace = two_blocks()
    named = named_blocks(trace, [census((owner("buffer"), BASE + MIB + 512, 100))])

    assert named is not None
    (row,) = np.flatnonzero(named.of_row >= 0)
    assert trace.lives.address[row] == BASE + MIB


def test_earlier_census_names_the_block_that_lived_then():
    trace = two_blocks()
    early = census((owner("old"), BASE, 1), time_us=15)
    late = census((owner("new"), BASE, 1), time_us=50)
    named = named_blocks(trace, [early, late])

    assert named is not None
    by_start = sorted(np.flatnonzero(named.of_row >= 0), key=lambda r: trace.lives.start[r])
    assert [named.owners[named.of_row[r]].name for r in by_start] == ["old", "new"]


def test_equal_layers_are_one_owner():
    trace = two_blocks()
    found = census(
        (owner("net.layers.0.cache", n_items=3), BASE, 1),
        (owner("net.layers.1.cache", n_items=4), BASE + MIB, 1),
    )
    named = named_blocks(trace, [found])

    assert named is not None
    assert [(o.name, o.n_items) for o in named.owners] == [("net.layers.*.cache", 7)]


def test_census_that_was_cut_gives_the_rest_of_a_stack_to_its_owner():
    stack, other = [frame("rl.py", 25, "store")], [frame("rl.py", 30, "step")]
    stacks = [stack] * 40 + [other]
    blocks = [block(MIB, "active_allocated", frames=s) for s in stacks]
    events = [segment_alloc(BASE, 41 * MIB)]
    events += [alloc(BASE + i * MIB, MIB, frames=s) for i, s in enumerate(stacks)]
    trace = Trace.of(columns(snapshot(segment(BASE, *blocks), events=events)), 0)
    buffer = owner("buffer", n_items=40)
    sampled = census(*((buffer, BASE + i * MIB, MIB) for i in range(0, 40, 2)))

    whole = named_blocks(trace, [sampled])
    cut = named_blocks(trace, [replace(sampled, is_complete=False)])

    assert whole is not None
    assert cut is not None
    assert (int((whole.of_row >= 0).sum()), int((cut.of_row >= 0).sum())) == (20, 40)


def test_no_census_names_nothing():
    assert named_blocks(two_blocks(), []) is None


def test_general_name_keeps_words():
    assert general("a.b2[3]['x1'].4.c") == "a.b2[*]['x1'].*.c"


def test_container_grows_from_the_one_item_that_it_had():
    before = census((owner("agent.buffer[0]", HoldingKind.TENSOR), 1, MIB))
    after = owner("agent.buffer", n_items=9)

    growth = growth_of(after, [before, census((after, 1, 9 * MIB))])

    assert growth is not None
    assert (growth.n_bytes, growth.n_items_before) == (8 * MIB, 1)


def test_parameters_do_not_grow():
    model = owner("model", HoldingKind.PARAMETERS)

    assert growth_of(model, [census((model, 1, 1)), census((model, 1, 9))]) is None


@pytest.mark.parametrize(("first", "second"), [("0", "1"), ("'run0'", "'run1'")])
def test_container_holds_what_its_items_hold(first, second):
    trace = two_blocks()
    state = owner(f"trials[{first}].optimizer.state", HoldingKind.OPTIMIZER)
    weights = owner(f"trials[{second}].model", HoldingKind.PARAMETERS)
    named = named_blocks(trace, [census((state, BASE, MIB), (weights, BASE + MIB, MIB))])
    assert named is not None
    rows = np.flatnonzero(named.of_row >= 0)

    held = main_owner(named, rows, trace.lives.size_bytes[rows])

    assert held is not None
    assert (held.name, held.kind, held.n_items) == ("trials", HoldingKind.CONTAINER, 0)


@pytest.mark.parametrize(
    ("graph_bytes", "kind"), [(3, HoldingKind.GRAPH), (1, HoldingKind.CONTAINER)]
)
def test_graph_behind_a_container_holds_if_it_is_most_of_it(graph_bytes, kind):
    trace = two_blocks()
    items, graph = owner("log"), owner("log[0]", HoldingKind.GRAPH)
    named = named_blocks(trace, [census((items, BASE, MIB), (graph, BASE + MIB, MIB))])
    assert named is not None
    rows = np.flatnonzero(named.of_row >= 0)

    held = main_owner(named, rows, np.where(named.of_row[rows] == 0, 2, graph_bytes))

    assert held is not None
    assert held.kind is kind


def test_graph_is_that_of_the_step_under_way_and_does_not_grow():
    graph = owner("loss", HoldingKind.GRAPH)

    assert growth_of(graph, [census((graph, 1, 1)), census((graph, 1, 9))]) is None


def test_weights_held_twice_are_found_by_their_sizes():
    model, copy = owner("model", HoldingKind.PARAMETERS), owner("checkpoint")
    both = census((model, 1, 5), (model, 2, 7), (copy, 3, 7), (copy, 4, 5))

    assert held_twice([both], 1) == (model, copy, 12)


def test_gradients_have_the_sizes_of_weights_for_a_reason():
    model, gradients = owner("m", HoldingKind.PARAMETERS), owner("m", HoldingKind.GRADIENTS)

    assert held_twice([census((model, 1, 5), (gradients, 2, 5))], 1) is None


@pytest.mark.parametrize("names", [("images", "texts"), ("texts", "images")])
def test_keeper_holds_what_the_named_line_makes_where_two_names_hold_as_much(names):
    """Two towers fill a list each: the line of one is not named with the list of the other."""
    stacks = {n: (frame("towers.py", i, "fill"), MAIN) for i, n in enumerate(("images", "texts"))}
    loop, held = TrainingLoop(), []
    loop.build()
    for _ in range(8):
        held += [(n, loop.new(8 * MIB, stack)) for n, stack in stacks.items()]
        loop.step()
    owners = {n: owner(n, n_items=8) for n in names}
    found = sorted(
        ((owners[n], b.address, 8 * MIB) for n, b in held), key=lambda f: names.index(f[0].name)
    )
    snapshot, counted = loop.snapshot(), census(*found, time_us=10**6)
    analysis = analyze_device(snapshot, 0)
    assert analysis.kept is not None
    context = Context(Case(snapshot=snapshot, censuses=(counted,)), 0, analysis)
    line = snapshot.frame(analysis.kept.frame).line

    kept_by = keeper(context, analysis.kept)

    assert kept_by is not None
    assert stacks[kept_by.name][0]["line"] == line
