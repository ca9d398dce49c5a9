"""What a first step must still ask for, where no complete step says how it goes on.

Equal layers tell the cost of a layer, and the model's parameters how many there are. An optimizer
that makes its state in the first step makes it for every parameter. What else is to come (the
backward pass, temporaries) is not known, so that all of this is a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from fragdoctor.model.snapshot import I64
from fragdoctor.trace import stacks
from fragdoctor.trace.steps import Steps
from fragdoctor.trace.trace import Trace
from fragdoctor.units import format_size, plural

MIN_UNIT: Final = 3
"""Lines of a layer that allocate, at least."""

MAX_TRIED: Final = 200
"""Earlier requests of one line that may be the same place of the layer before."""

MAX_PARAMETERS: Final = 64
"""Parameters of a layer, at most."""


@dataclass(frozen=True, slots=True)
class LowerBound:
    """What the step under way needs at least.

    Attributes:
        live_bytes: memory that must be live at one moment to come.
        more_bytes: of it, what was not live when the request failed.
        request_bytes: the request that failed.
        parts: what that is, in words; the failing request alone is no news.
    """

    live_bytes: int
    more_bytes: int
    request_bytes: int
    parts: tuple[str, ...]

    @property
    def text(self) -> str:
        """What is still to come, in words; "" where only the failing request is known."""
        if len(self.parts) == 1 and self.more_bytes == self.request_bytes:
            return ""
        return f"at least {format_size(self.more_bytes)} more: {' and '.join(self.parts)}"


def lower_bound_of(trace: Trace) -> LowerBound | None:
    """Return what the step that failed at the end of a trace needs at least; None without one."""
    if not trace.ends_in_failure or not len(trace.oom_rows):
        return None
    failed = int(trace.oom_rows[-1])
    live = int(trace.totals.at([failed])[0, 0])
    request = int(trace.events.size_bytes[failed])
    steps = Steps.of(trace)
    start = int(steps.rows[-1]) if len(steps) else 0
    parts = [f"the request of {format_size(request)}"]
    more = request
    states = _optimizer_states(trace, start, failed)
    layers, n_left, n_layers = _layers_to_come(trace, start, failed)
    if states > request:
        more = states
        parts = [f"optimizer state of {format_size(states)}"]
    elif layers:
        more += layers
        parts.append(f"{format_size(layers)} in {n_left} of {plural(n_layers, 'equal layer')}")
    return LowerBound(live + more, more, request, tuple(parts))


def _optimizer_states(trace: Trace, start: int, failed: int) -> int:
    """Return the bytes of optimizer state that are still to be made; 0 in another phase.

    Parameters whose gradients are live have state of their size, as many of it as those that were
    served first.
    """
    roles, lives, events = trace.stacks.roles, trace.lives, trace.events
    if not roles.makes_state[events.stack[failed]]:
        return 0
    born = np.flatnonzero((lives.start >= start) & (lives.start < failed) & (lives.free > failed))
    is_state = roles.makes_state[lives.stack[born]]
    is_gradient = np.isin(roles.role[lives.stack[born]], (stacks.BACKWARD, stacks.SILENT))
    sizes, at = np.unique(lives.size_bytes[born], return_inverse=True)
    n_states = np.bincount(at.reshape(-1)[is_state], minlength=len(sizes))
    n_gradients = np.bincount(at.reshape(-1)[is_gradient], minlength=len(sizes))
    has = n_gradients > 0
    each = int((n_states[has] // n_gradients[has]).max(initial=0))
    if not each:
        return 0
    missing = np.maximum(each * n_gradients - n_states, 0)[has]
    return int((missing * sizes[has]).sum())


def _layers_to_come(trace: Trace, start: int, failed: int) -> tuple[int, int, int]:
    """Return the bytes that the layers to come keep, how many these are, and of how many."""
    events, lives = trace.events, trace.lives
    if trace.stacks.roles.role[events.stack[failed]] != stacks.FORWARD:
        return 0, 0, 0
    made = lives.n_initial + np.flatnonzero(
        (lives.start[lives.n_initial : lives.n_regular] >= start)
        & (lives.start[lives.n_initial : lives.n_regular] < failed)
    )
    sequence = np.append(lives.stack[made], events.stack[failed]).astype(np.int64)
    unit, n_repeated = _unit(sequence)
    if not unit:
        return 0, 0, 0
    n_done, is_within = divmod(n_repeated + unit, unit)
    n_layers = _n_layers(trace, start, n_done)
    n_left = n_layers - n_done - int(is_within > 0)
    if n_left <= 0:
        return 0, 0, 0
    one = made[len(made) - is_within - unit : len(made) - is_within]
    kept = int(lives.size_bytes[one][lives.free[one] > failed].sum())
    return kept * n_left, n_left, n_layers


def _unit(sequence: I64) -> tuple[int, int]:
    """Return the length of the unit that repeats at the end, and how many requests repeat it.

    (0, 0) where nothing repeats.
    """
    n = len(sequence)
    places = np.flatnonzero(sequence[:-1] == sequence[-1])[::-1][:MAX_TRIED]
    for place in places.tolist():
        unit = n - 1 - place
        if unit < MIN_UNIT or n < 2 * unit:
            continue
        equal = sequence[unit:] == sequence[:-unit]
        differs = np.flatnonzero(~equal[::-1])
        n_equal = int(differs[0]) if len(differs) else len(equal)
        if n_equal >= unit and len(np.unique(sequence[-unit:])) >= MIN_UNIT:
            return unit, n_equal
    return 0, 0


def _n_layers(trace: Trace, start: int, n_done: int) -> int:
    """Return how many equal layers the model has: the fewest that are as many as were seen."""
    lives = trace.lives
    before = np.flatnonzero((lives.start < start) & (lives.free >= start) & (lives.stack >= 0))
    sizes = lives.requested_bytes[before][np.argsort(lives.start[before], kind="stable")]
    found: list[int] = []
    for period in range(2, min(MAX_PARAMETERS, len(sizes) // 2) + 1):
        equal = sizes[period:] == sizes[:-period]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], equal, [False]))))
        for low, high in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if len(np.unique(sizes[low : low + period])) > 1:
                found.append((high - low) // period + 1)
    return min((n for n in found if n >= max(n_done, 2)), default=0)
