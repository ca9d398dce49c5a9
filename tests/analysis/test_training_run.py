"""Layers of a training run: how a forward pass is cut into calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fragdoctor.analysis.training_run import NO_ROW, TrainingRequests, find_layers


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

    found = find_layers(TrainingRequests(row, freed, np.full(len(row), 1024), stack), passes[:3])

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
