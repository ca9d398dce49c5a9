"""The table of modules: every byte in one row, equal layers in one row."""

from __future__ import annotations

import numpy as np
import pytest
from builders import BASE, MIB, alloc, block, columns, segment, segment_alloc, snapshot

from fragdoctor.analysis.modules import MAX_DEPTH, MAX_MODULES, ModulePaths, module_table
from fragdoctor.analysis.owners import module_parts
from fragdoctor.model.census import Census, HoldingKind, Owner
from fragdoctor.model.marks import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    module_note,
    read_module_note,
)
from fragdoctor.model.modules import FURTHER, ITSELF, KINDS, OUTSIDE, ModuleMemory, rows_of
from fragdoctor.trace.trace import Trace

UNSORTED = np.zeros(0, np.uint8)
"""Categories of blocks, of which none is known."""


def trace_of(*blocks: tuple[str, int]) -> Trace:
    """Return a trace that allocates (note, bytes) one after another."""
    places = np.cumsum([0, *(n for _, n in blocks)]).tolist()
    held = [block(n, "active_allocated") for _, n in blocks]
    events = [segment_alloc(BASE, places[-1])]
    for (note, n), at in zip(blocks, places, strict=False):
        events.append(alloc(BASE + at, n) | {"user_metadata": note})
    return Trace.of(columns(snapshot(segment(BASE, *held), events=events)), 0)


def table(trace: Trace) -> dict[str, ModuleMemory]:
    found = module_table(trace, trace.n_events, ModulePaths.of(trace), UNSORTED)
    return {".".join(path): module for path, module in rows_of(found)}


@pytest.mark.parametrize("held", ["", PARAMETERS, GRADIENTS, OPTIMIZER])
def test_notes_are_read_as_they_are_written(held: str) -> None:
    assert read_module_note(module_note("GPT.layers.0", held)) == ("GPT.layers.0", held)
    assert read_module_note("epoch 3") is None


def test_what_is_read_off_a_module_is_in_its_column_and_the_rest_is_other() -> None:
    found = table(
        trace_of(
            (module_note("GPT.a", PARAMETERS), MIB),
            (module_note("GPT.a", GRADIENTS), 2 * MIB),
            (module_note("GPT.b", OPTIMIZER), 4 * MIB),
            (module_note("GPT.b"), 8 * MIB),
            ("", 16 * MIB),
            ("epoch 3", 32 * MIB),
        )
    )

    assert found["GPT.a"].parameters_bytes == MIB
    assert found["GPT.a"].gradients_bytes == 2 * MIB
    assert found["GPT.b"].optimizer_state_bytes == 4 * MIB
    assert found["GPT.b"].other_bytes == 8 * MIB
    assert found["GPT"].total_bytes == 15 * MIB
    assert found[OUTSIDE].total_bytes == found[OUTSIDE].other_bytes == 48 * MIB
    assert list(found) == ["GPT", "GPT.a", "GPT.b", OUTSIDE]


def test_a_module_with_others_inside_has_its_own_in_a_row() -> None:
    found = table(
        trace_of(
            (module_note("GPT"), MIB), (module_note("GPT.a"), MIB), (module_note("GPT.b"), MIB)
        )
    )

    assert found[f"GPT.{ITSELF}"].total_bytes == MIB
    assert found["GPT"].total_bytes == 3 * MIB


def test_neighbours_are_one_row_if_they_asked_for_the_same() -> None:
    sizes = {0: MIB, 1: MIB, 2: 2 * MIB, 4: MIB, 5: MIB, 6: MIB, 10: MIB}
    found = table(trace_of(*((module_note(f"GPT.layers.{i}.mlp"), n) for i, n in sizes.items())))

    assert list(found) == [
        "GPT.layers", "GPT.layers.0-1.mlp", "GPT.layers.2.mlp", "GPT.layers.4-6.mlp",
        "GPT.layers.10.mlp",
    ]  # fmt: skip
    assert found["GPT.layers.4-6.mlp"].n_modules == 3
    assert found["GPT.layers.4-6.mlp"].total_bytes == 3 * MIB


def test_layers_with_other_parts_inside_are_not_equal() -> None:
    found = table(
        trace_of(
            (module_note("GPT.0.a"), MIB), (module_note("GPT.0.b"), 2 * MIB),
            (module_note("GPT.1.a"), 2 * MIB), (module_note("GPT.1.b"), MIB),
        )
    )  # fmt: skip

    assert found["GPT.0"].n_modules == found["GPT.1"].n_modules == 1


def test_nothing_is_said_where_no_module_is_noted() -> None:
    assert table(trace_of(("", MIB), ("epoch 3", MIB))) == {}


def test_hostile_paths_stay_within_bounds() -> None:
    deep = module_note("x." * 5000)
    found = table(trace_of((deep, MIB), *((module_note(f"m{i}"), 512) for i in range(5000))))

    assert max(path.count(".") for path in found if FURTHER not in path) < 5001
    assert len(found) <= MAX_MODULES + MAX_DEPTH + 2
    tops = module_table(*_args(deep))
    assert sum(m.total_bytes for m in tops) == MIB
    assert found[FURTHER].total_bytes == (5001 - MAX_MODULES) * 512


def _args(note: str):
    trace = trace_of((note, MIB))
    return trace, trace.n_events, ModulePaths.of(trace), UNSORTED


def test_census_says_whose_parameters_are() -> None:
    trace = trace_of(("", MIB), (module_note("GPT.a"), MIB))
    owners = (Owner("model", HoldingKind.PARAMETERS), Owner("cache", HoldingKind.TENSOR))
    census = Census(
        0, 0, True, owners,
        np.zeros(2, np.int32),
        np.array([BASE, BASE + MIB], np.uint64),
        np.full(2, MIB, np.int64),
        np.arange(2, dtype=np.int32),
        ("GPT.b",), np.zeros(2, np.int32),
    )  # fmt: skip

    paths = module_parts(trace, ModulePaths.of(trace), [census])
    found = {m.name: m for m in module_table(trace, trace.n_events, paths, UNSORTED)[0].children}

    assert found["b"].parameters_bytes == MIB
    assert found["a"].other_bytes == MIB
    for kind in KINDS[1:-1]:
        assert not getattr(found["a"], kind)
