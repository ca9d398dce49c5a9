"""Lines of the program whose tensors take the most at the peak and are stored, not computed.

What a model, an optimizer or the backward pass creates has its own treatments. What the user's own
lines create outside of them, such as a replay buffer or stored rollouts, can be on the host.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor.analysis.modules import ModulePaths
from fragdoctor.future.simulator import trace_of
from fragdoctor.model.finding import Location
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.trace.stacks import USER

_COMPUTING: Final = ("torch/nn/modules/module.py", "torch/optim/", "torch/autograd/")
MIN_SHARE: Final = 0.05
"""Share of the peak that a line must hold to be tried: it is the most that the try can save."""
MAX_LINES: Final = 3


def held_lines(snapshot: Snapshot) -> list[Location]:
    """Return the lines that hold most at the peak of allocated memory, the largest first."""
    trace = trace_of(snapshot)
    lives = trace.lives
    peak = int(trace.totals.allocated_bytes.argmax())
    rows = lives.allocated_at(peak)
    rows = rows[ModulePaths.of(trace).of_row[rows] < 0]  # a module's memory belongs to the model
    classes = trace.stacks.classes
    stacks = lives.stack[rows]
    lines = trace.stacks.lines_of(stacks)
    is_held = {
        stack: not any(
            part in frame.filename for frame in snapshot.stack(stack) for part in _COMPUTING
        )
        for stack in np.unique(stacks).tolist()
    }
    held: dict[int, int] = {}
    sizes = lives.size_bytes[rows].tolist()
    for stack, line, n in zip(stacks.tolist(), lines.tolist(), sizes, strict=True):
        if line >= 0 and classes[line] == USER and is_held[stack]:
            held[line] = held.get(line, 0) + n
    least = MIN_SHARE * trace.totals.peak_allocated_bytes
    most = sorted(held.items(), key=lambda one: -one[1])[:MAX_LINES]
    frames = [snapshot.frame(line) for line, n in most if n >= least]
    return [Location(frame.filename, frame.line, frame.function) for frame in frames]
