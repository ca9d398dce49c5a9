"""Lines of the program whose tensors take the most at the peak and are stored, not computed.

What a model, an optimizer or the backward pass creates has its own treatments. What the user's own
lines create outside of them, such as a replay buffer or stored rollouts, can be on the host. So can
what is left of several calls of a model: results that the program gathers, or a cache of each.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor.analysis.modules import ModulePaths
from fragdoctor.future.simulator import trace_of
from fragdoctor.model.finding import Location
from fragdoctor.model.snapshot import U8, Snapshot
from fragdoctor.trace.stacks import USER

_MODULE: Final = "torch/nn/modules/module.py"
_COMPUTING: Final = ("torch/optim/", "torch/autograd/")
MIN_CALLS: Final = 3
"""Calls of a module of which the same must be left: fewer may be two inputs of one update."""
MIN_SHARE: Final = 0.05
"""Share of the peak that a line must hold to be tried: it is the most that the try can save."""
MAX_LINES: Final = 3


def held_lines(snapshot: Snapshot) -> dict[Location, bool]:
    """Return the lines that hold most at the peak of allocated memory, the largest first.

    Of each, return whether it gathers: several that it made since a module was first called are
    left. Smaller batches leave what is gathered as it is, since there are more of them.
    """
    trace = trace_of(snapshot)
    lives = trace.lives
    peak = int(trace.totals.allocated_bytes.argmax())
    rows = lives.allocated_at(peak)
    modules = ModulePaths.of(trace).of_row
    first = lives.start[modules >= 0].min(initial=peak)
    made = np.stack([lives.stack[rows], modules[rows], lives.start[rows] > first])
    kinds, of_kind, counts = np.unique(made, axis=1, return_inverse=True, return_counts=True)
    sums = np.bincount(of_kind.ravel(), lives.size_bytes[rows], len(counts))
    held: dict[int, int] = {}
    gathering: set[int] = set()
    for (stack, module, is_late), n_left, n_bytes in zip(
        kinds.T.tolist(), counts, sums, strict=True
    ):
        line = _line_of(snapshot, trace.stacks.classes, stack, is_called=module >= 0)
        if line >= 0 and (module < 0 or n_left >= MIN_CALLS):
            held[line] = held.get(line, 0) + int(n_bytes)
            if is_late and n_left >= MIN_CALLS:
                gathering.add(line)
    least = MIN_SHARE * trace.totals.peak_allocated_bytes
    most = sorted(held.items(), key=lambda one: -one[1])[:MAX_LINES]
    frames = {line: snapshot.frame(line) for line, n in most if n >= least}
    return {
        Location(frame.filename, frame.line, frame.function): line in gathering
        for line, frame in frames.items()
    }


def _line_of(snapshot: Snapshot, classes: U8, stack: int, *, is_called: bool) -> int:
    """Return the user's line of a stack, outside of the model if it was called; -1 if none."""
    low, high = snapshot.stacks.offsets[stack : stack + 2].tolist() if stack >= 0 else (0, 0)
    frames = snapshot.stacks.frames[low:high].tolist()
    files = [snapshot.frame(frame).filename for frame in frames]
    if any(part in file for file in files for part in _COMPUTING):
        return -1
    inside = [at for at, file in enumerate(files) if _MODULE in file]
    if inside and not is_called:
        return -1
    outside = frames[inside[-1] + 1 :] if inside else frames
    return next((frame for frame in outside if classes[frame] == USER), -1)
