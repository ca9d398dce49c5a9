"""Layers of a training run: how a forward pass is cut into calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fragdoctor.analysis.training_run import (
    NO_ROW,
    TrainingRequests,
    _calls,
    _candidates,
    find_layers,
)
from fragdoctor.model.snapshot import StackTable


def plain_stacks(n: int) -> Any:
    """Return n stacks of one frame each, none of them a call of a module."""
    return SimpleNamespace(
        python=StackTable(np.arange(n + 1), np.zeros(n, np.int32)),
        calls_module=np.zeros(1, np.bool_),
    )


@pytest.mark.parametrize(("freed_in", "n_layers"), [(0, 12), (3, 0)])
def test_what_outlives_the_next_passes_is_not_kept_for_the_backward_pass(
    freed_in: int, n_layers: int
) -> None:
    """Four calls in each of four passes of 20 events; a list may keep what they make."""
    passes = [(20 * i, 20 * i + 12) for i in range(4)]
    row = np.concatenate([np.arange(low, high) for low, high in passes])
    is_result = row % 20 % 3 < 2
    later = row - row % 20 + 20 * freed_in + 15
    freed = np.where(is_result, np.where(later < 80, later, NO_ROW), row + 1)
    stack = (row % 20 % 3).astype(np.int32)

    requests = TrainingRequests(row, freed, np.full(len(row), 1024), stack)
    found = find_layers(requests, passes[:3], plain_stacks(3))

    assert (0 if found is None else len(found.first_row)) == n_layers


@pytest.mark.parametrize("seed", ["0", "2", "4"])
def test_layers_of_two_shapes_are_cut_alike_in_every_process(seed: str, root: Path) -> None:
    """Half of eight calls have one shape, half the other: the last is not of the first's."""
    script = (
        "import numpy as np\n"
        "from fragdoctor.analysis.training_run import _candidates\n"
        "stack = np.array([1, 3, 2, 1, 4, 2] * 4, np.int32)\n"
        "print([len(calls) for calls in _candidates(stack)])\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": seed},
        check=True,
    )

    assert done.stdout == "[4, 7]\n"


def test_layers_are_cut_by_what_divides_all_their_stacks() -> None:
    """No stack occurs once in each of three calls."""
    stack = np.array([1, 2, 1, 2, 2] * 3, np.int32)

    assert [(0, 5), (5, 10), (10, 15)] in list(_candidates(stack))


def test_layers_are_found_without_modules() -> None:
    """Functions of the program are called in a loop, between an embedding and a head."""
    stack = np.array([0, 1, 2, 3, 1, 2, 3, 1, 2, 3, 4], np.int32)
    kept = np.array([9, 4, 4, 1, 4, 4, 1, 4, 4, 1, 9], np.int64)

    assert _calls(stack, kept, plain_stacks(5)) == ([(1, 4), (4, 7), (7, 10)], set())
