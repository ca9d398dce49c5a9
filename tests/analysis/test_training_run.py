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

from fragdoctor.analysis.training_run import _calls, _candidates
from fragdoctor.model.snapshot import StackTable


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
    stacks: Any = SimpleNamespace(
        python=StackTable(np.arange(6), np.zeros(5, np.int32)), calls_module=np.zeros(1, np.bool_)
    )

    assert _calls(stack, kept, stacks) == ([(1, 4), (4, 7), (7, 10)], set())
