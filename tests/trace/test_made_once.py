"""What each parameter gets once: it is kept, but ends with the parameters."""

from __future__ import annotations

import numpy as np
import pytest
from analysis.training_loop import CALL, TORCH, TrainingLoop
from builders import frame

from fragdoctor.trace.made_once import KeptOnce
from fragdoctor.trace.trace import Trace

MIB = 2**20
LAYER = [2 * MIB, 3 * MIB]
N_LAYERS = 8
INIT = frame(f"{TORCH}/nn/modules/module.py", 9, "_apply")
COPY = frame("train.py", 7, "update_average")
N_STEPS = 5


@pytest.mark.parametrize("n_sizes", [0, 1, 2])
def test_copies_of_weights_end_with_the_weights(n_sizes: int) -> None:
    run = TrainingLoop(context="all")
    for size in LAYER * N_LAYERS:
        run.new(size, (INIT,))
    rows = []
    for step in range(N_STEPS + 1):
        rows.append(len(run.toy.events))
        run.free(run.new(9 * MIB, (CALL,)), (CALL,))
        for size in LAYER[:n_sizes]:
            run.new(size, (COPY,))
        if n_sizes < len(LAYER):  # something else grows
            run.new((7 + step) * MIB, (COPY,))

    kept = KeptOnce.of(Trace.of(run.snapshot(), 0), np.array(rows))

    if n_sizes < len(LAYER):
        assert kept is None
        return
    assert kept is not None
    assert kept.bytes_per_step == sum(LAYER)
    assert not kept.ends_within(3, 0)
    assert kept.ends_within(N_LAYERS, 0)
    assert not kept.ends_within(N_LAYERS, 100 * MIB)
