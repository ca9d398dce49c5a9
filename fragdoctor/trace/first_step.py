"""What a first step must still ask for, where no complete step says how it goes on.

Equal layers tell the cost of a layer, and the model's parameters how many there are; where layers
differ, its norms tell how far a pass has come; what an optimizer made for the first of them says
what it makes for the others. All of this is a lower bound. A forward pass that keeps what it makes
is followed by a backward pass; what that takes is not known: as much as experience says, and no
less than the gradient of what was asked for last. The end of a forward pass is known: a cross
entropy needs three tensors of the size of its logits at one moment of its backward pass.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from fragdoctor.frozen import frozen
from fragdoctor.model.arrays import distinct, is_among
from fragdoctor.model.snapshot import I32, I64
from fragdoctor.trace import operations, stacks
from fragdoctor.trace.norm_layers import ModelLayers, bytes_to_come, logits_to_come
from fragdoctor.trace.operations import WORKSPACE_BYTES, Allocations, Operations, OpKind
from fragdoctor.trace.optimizer_rest import missing_sizes
from fragdoctor.trace.passes import (
    KEPT_OF_OLDER,
    MIN_KEPT,
    RECENT,
    is_training_forward,
    made_between,
    trained_until,
)
from fragdoctor.trace.steps import StepKind, Steps
from fragdoctor.trace.trace import Trace
from fragdoctor.units import format_size, plural

MIN_UNIT: Final = 3
"""Lines of a layer that allocate, at least."""

MAX_TRIED: Final = 200
"""Earlier requests of one line that may be the same place of the layer before."""

BACKWARD_SHARE: Final = 0.2
"""Share of what is live, and of the request, that the rest of a run takes on top that failed in its
first forward pass.

For the rest of the forward pass, gradients and optimizer state. Of 53 recorded ones of the programs
in ``benchmarks/outlook_programs`` that were looked at, 16 took less; of 175 what-ifs 85 fail by it,
and one of these programs passed.
"""

LIKELY: Final = 1.2
"""What a program needs as a rule that failed in its first forward pass, as a multiple of what is
known."""

UPDATE_TAKES: Final = 2
"""What an optimizer's first step needs besides the parameters, as a multiple of them: a gradient
and a state for each. Adam makes two states and its temporaries, SGD with momentum one."""

CROSS_ENTROPY: Final = re.compile("^cross_entropy$")

STATE_SHARE: Final = 0.1
"""Share of what a first step needs up to which one state of each parameter counts on top of it.

Not every optimizer keeps one, as SGD without momentum or Adafactor, yet a program needs more than
what is known of its first step. Of 56 what-ifs of 36 programs that had less than this left, and
less than one state, none passed, nor any of the 8 with such an optimizer; of 12 with more left 3
did.
"""

ADAPTERS: Final = re.compile(r"[/\\\\]peft[/\\\\]|lora|adapter", re.IGNORECASE)
"""Files of layers beside which most of a model is frozen."""

AT_LOSS: Final = 3
"""Tensors of the size of its logits that a cross entropy needs at one moment of its backward
pass."""

COPY: Final = 0.4
"""Share of the logits that a copy of them in half precision has, at least."""

SMALL: Final = 64 * 1024
"""Tensors below this are statistics, masks and indices as a rule."""

MAX_PARAMETERS: Final = 64
"""Parameters of a layer, at most."""


@frozen
class LowerBound:
    """What the step under way needs at least.

    Attributes:
        live_bytes: memory that must be live at one moment to come.
        more_bytes: of it, what was not live when the request failed.
        expected_bytes: what comes on top as a rule, with a backward pass to come; 0 without one.
        request_bytes: the request that failed.
        parts: what that is, in words; the failing request alone is no news.
        state_bytes: what an optimizer that keeps one state of each parameter holds from the second
            step on; 0 where it is not known how far the first one has come.
        next_bytes: what the second step needs with that; 0 without.
        trains: a backward pass is under way or to come.
    """

    live_bytes: int
    more_bytes: int
    expected_bytes: int
    request_bytes: int
    parts: tuple[str, ...]
    state_bytes: int
    next_bytes: int
    trains: bool

    @property
    def needed_bytes(self) -> int:
        """What the step needs, with what comes as a rule."""
        return self.live_bytes + self.expected_bytes

    @property
    def likely_bytes(self) -> int:
        """What the run needs as a rule: more than that, if a backward pass is to come."""
        if self.state_bytes:
            return max(self.next_bytes + self.state_bytes, self.needed_bytes)
        return int(LIKELY * self.needed_bytes) if self.expected_bytes else self.live_bytes

    def of_edit(self, trace: Trace, edited: Operations) -> LowerBound:
        """Return the bound of an edited program.

        What is still to come changes with what its step had made until the request failed: a
        smaller batch asks for less in every layer, a checkpointed layer keeps less of it, a fused
        optimizer does without the request that failed.
        """
        lives, failed = trace.lives, int(trace.oom_rows[-1])
        size = np.where(lives.free > failed, lives.requested_bytes, 0).astype(np.int64)
        before = int(size[lives.start < _start(trace)].sum())
        made = int(size[lives.start < failed].sum()) - before
        of = Allocations(edited)
        left = int(of.size[(of.dies == operations.NEVER) & (of.born >= 0)].sum())
        left += int(size[: lives.n_initial].sum())
        share = min(max((left - before) / made, 0.0), 1.0) if made > 0 else 1.0
        asked = edited.size[edited.kind == OpKind.FAILED].astype(np.int64)
        request = int(asked[-1]) if len(asked) else 0
        more = int(share * (self.more_bytes - self.request_bytes)) + request
        further = self.next_bytes - self.live_bytes + self.more_bytes
        return LowerBound(
            live_bytes=left + more,
            more_bytes=more,
            expected_bytes=int(share * self.expected_bytes),
            request_bytes=request,
            parts=(),
            state_bytes=self.state_bytes,
            next_bytes=left + int(share * further) if self.next_bytes else 0,
            trains=self.trains,
        )

    @property
    def text(self) -> str:
        """What is still to come, in words; "" where only the failing request is known."""
        found = []
        if self.more_bytes != self.request_bytes:
            of = f" ({' and '.join(self.parts)})" if self.parts else ""
            found.append(f"at least {format_size(self.more_bytes)} more{of}")
        if self.expected_bytes:
            found.append(f"about {format_size(self.expected_bytes)} more to its end")
        if self.state_bytes:
            found.append(f"{format_size(self.state_bytes)} for an optimizer's state")
        return ", then ".join(found)


def lower_bound_of(trace: Trace) -> LowerBound | None:
    """Return what the step that failed at the end of a trace needs at least; None without one."""
    if not trace.ends_in_failure or not len(trace.oom_rows):
        return None
    failed, lives = int(trace.oom_rows[-1]), trace.lives
    live = int(trace.totals.at([failed])[0, 0])
    request = int(trace.events.size_bytes[failed])
    start = _start(trace)
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
    trained = max(start, trained_until(trace, failed))
    is_forward = is_training_forward(trace, trained, failed)
    backward = _backward_needs(trace, start, failed, is_forward=is_forward)
    if backward + layers - live > more:
        more = backward + layers - live
        parts = [*parts[1:], "gradients of what is kept for the backward pass"]
    expected, known = 0, more if backward else 0
    parameters = _trained_bytes(trace, start, failed) if is_forward or backward else 0
    if is_forward:
        made = made_between(trace, trained, failed)
        model = ModelLayers.of(trace, start, failed)
        before = int(lives.size_bytes[(lives.start < start) & (lives.free > failed)].sum())
        update = before + UPDATE_TAKES * parameters
        rest = bytes_to_come(trace, model, failed, made)
        experience = int((1 + BACKWARD_SHARE) * (live + (request if layers else more)))
        expected = max(more + max(request, rest), experience - live, update - live)
        loss = _loss_needs(trace, model, failed, made)
        if not loss:
            head = AT_LOSS * logits_to_come(trace, model, made)
            expected = max(expected, max(more, request + rest) + head)
        if loss > more:
            more = loss
            parts = ["a cross entropy and its gradients"]
        expected = max(expected - more, 0)
        known = max(more, request + rest) if loss or layers or rest else 0
    state = parameters if known else 0
    return LowerBound(
        live_bytes=live + more,
        more_bytes=more,
        expected_bytes=expected,
        request_bytes=request,
        parts=tuple(parts),
        state_bytes=state,
        next_bytes=live + known + min(state, int(STATE_SHARE * (live + known))) if state else 0,
        trains=bool(expected or backward) or trained > start,
    )


def _start(trace: Trace) -> int:
    """Return the row at which the step under way began."""
    steps = Steps.of(trace)
    return int(steps.rows[-1]) if len(steps) else 0


def _backward_needs(trace: Trace, start: int, failed: int, *, is_forward: bool) -> int:
    """Return what must be live at one moment of the backward pass; 0 where none is to come.

    What a module made and keeps has a gradient of its size, and when that is made everything that
    was kept before is still there; of a function that keeps the shape, the gradients of both sides
    are. cuBLAS asks for a workspace once more, since a backward pass has a thread of its own.
    """
    lives, roles = trace.lives, trace.stacks.roles
    role = int(roles.role[trace.events.stack[failed]])
    if not is_forward and role not in (stacks.BACKWARD, stacks.SILENT):
        return 0
    made = made_between(trace, start, failed)
    size, stack = lives.size_bytes[made].astype(np.int64), lives.stack[made]
    live, of = lives.free[made] > failed, roles.role[stack]
    workspace = _workspaces(trace, made)
    kept = live & (of == stacks.FORWARD) & ~np.isin(made, workspace)
    passes = live & ~kept & np.isin(of, (stacks.BACKWARD, stacks.SILENT))
    passes &= ~is_among(lives.requested_bytes[made], lives.requested_bytes[lives.start < start])
    passes &= ~is_among(size, WORKSPACE_BYTES)
    others = int(trace.totals.at([failed])[0, 0]) - int(size[kept | passes].sum())
    needs = others + np.cumsum(np.where(kept, size, 0)) + size
    in_model = (of == stacks.FORWARD) & (roles.in_module | ~roles.by_user)[stack]
    in_model &= ~np.isin(made, workspace)
    large = np.flatnonzero(in_model & (size > SMALL))
    keeps_shape = (np.diff(size[large]) == 0) & (np.diff(stack[large]) != 0)
    keeps_shape &= ~roles.by_user[stack[large[1:]]]
    needs[large[1:][keeps_shape]] += size[large[1:][keeps_shape]]
    again = _products(trace, stack, lives.stack[workspace])[-1:]
    if len(again) and not is_among(size[live & (of != stacks.FORWARD)], WORKSPACE_BYTES).any():
        needs[: int(again[0]) + 1] += int(lives.size_bytes[workspace[0]])
    has_gradient = kept & in_model
    if is_forward:  # the last ones may be on their way only
        has_gradient[len(made) - min(RECENT, (len(made) + 1) // 2) :] = False
    return int(needs[has_gradient].max(initial=0))


def _loss_needs(trace: Trace, model: ModelLayers, failed: int, made: I64) -> int:
    """Return what a cross entropy needs above what is live; 0 where none is under way or to come.

    It keeps the logarithms of its probabilities, and its backward pass makes a gradient of those
    and, while that is there, one of the logits. The logits themselves, and copies of them in
    another precision, may be gone by then. The request is for logits where it has as many
    elements for each of its input as the vocabulary, whose embedding is among the parameters.
    """
    lives, request = trace.lives, int(trace.events.size_bytes[failed])
    recent = made[-RECENT:]
    if not trace.stacks.calls(CROSS_ENTROPY)[trace.events.stack[failed]]:
        inputs = lives.requested_bytes[recent].astype(np.int64)
        if not model.makes_logits(inputs, request):
            return 0
    size = lives.size_bytes[recent][lives.free[recent] > failed]
    return AT_LOSS * request - int(size[size > request * COPY].sum())


def _trained_bytes(trace: Trace, start: int, failed: int) -> int:
    """Return the size of the model's parameters; 0 where only a part of them may be trained."""
    lives, roles = trace.lives, trace.stacks.roles
    made = made_between(trace, start, failed)
    made = made[roles.in_module[lives.stack[made]]]
    first = made[: max(len(made) // 4, MIN_KEPT)]
    n_kept = int(np.count_nonzero(lives.free[first] > failed))
    if n_kept <= KEPT_OF_OLDER * len(first):
        return 0  # the first layers keep nothing for a backward pass
    if trace.stacks.runs_in(ADAPTERS)[lives.stack[made]].any():
        return 0
    older = (lives.start < start) & (lives.free > failed)
    return int(lives.size_bytes[older & roles.makes_model[lives.stack]].sum())


def _workspaces(trace: Trace, made: I64) -> I64:
    """Return the workspaces of cuBLAS among blocks: made for a product right after its result."""
    lives = trace.lives
    is_one = is_among(lives.requested_bytes[made], WORKSPACE_BYTES)
    is_one[1:] &= lives.stack[made[1:]] == lives.stack[made[:-1]]
    is_one[:1] = False
    found: I64 = made[is_one][:1]
    return found


def _optimizer_states(trace: Trace, start: int, failed: int) -> int:
    """Return the bytes of optimizer state that are still to be made; 0 in another phase.

    Parameters whose gradients are live have state of their size, as many of it as those that were
    served first, and of what the failing request is for.
    """
    roles, lives, events = trace.stacks.roles, trace.lives, trace.events
    stack = int(events.stack[failed])
    if not roles.makes_state[stack]:
        return 0
    born = np.flatnonzero((lives.start >= start) & (lives.start < failed) & (lives.free > failed))
    of = lives.stack[born]
    is_gradient = np.isin(roles.role[of], (stacks.BACKWARD, stacks.SILENT))
    is_gradient &= is_among(lives.requested_bytes[born], lives.requested_bytes[lives.start < start])
    gradients = lives.requested_bytes[born[is_gradient]].astype(np.int64)
    lines = distinct(np.append(of[roles.makes_state[of]], stack)).tolist()
    made = (lives.requested_bytes[born[of == line]].astype(np.int64) for line in lines)
    return sum(sum(missing_sizes(gradients, one)) for one in made)


def _products(trace: Trace, stack: I32, known: I32) -> I64:
    """Return the positions at which the function of a known product of matrices allocates."""
    table = trace.stacks.python
    has_frame = np.append(np.diff(table.offsets) > 0, False)
    inner = np.full(len(has_frame), -1, np.int64)
    inner[has_frame] = table.frames[table.offsets[:-1][has_frame[:-1]]]
    found: I64 = np.flatnonzero(has_frame[stack] & np.isin(inner[stack], inner[known]))
    return found


def _layers_to_come(trace: Trace, start: int, failed: int) -> tuple[int, int, int]:
    """Return the bytes that the layers to come keep, how many these are, and of how many."""
    events, lives = trace.events, trace.lives
    if trace.stacks.roles.role[events.stack[failed]] != stacks.FORWARD:
        return 0, 0, 0
    made = made_between(trace, start, failed)
    sequence = np.append(lives.stack[made], events.stack[failed]).astype(np.int64)
    unit, n_repeated = _unit(sequence)
    if not unit:
        return 0, 0, 0
    n_done, is_within = divmod(n_repeated + unit, unit)
    n_layers = n_equal_layers(trace, start, n_done)
    n_left = n_layers - n_done - int(is_within > 0)
    before = sequence[: len(sequence) - n_repeated - unit]
    if n_left < 0 or _most_called(before) >= n_layers:
        return 0, 0, 0  # another part has run as often: what repeats now is not the layers
    kept = lives.size_bytes[made] * (lives.free[made] > failed)
    kept[np.isin(made, _workspaces(trace, made))] = 0
    last = len(made) - is_within
    each = [int(kept[last - k * unit : last - (k - 1) * unit].sum()) for k in (1, 2)[:n_done]]
    one = min(each)  # the last one may hold what goes with the next
    # The rest of this one, less what goes with it and with the next; where it would be less than
    # nothing, the last layer at least comes to where this one is.
    rest = max(2 * one - each[0] - int(kept[last:].sum()), 0) if is_within else 0
    more = one * n_left + rest
    return (more, n_left + int(rest > 0), n_layers) if more else (0, 0, 0)


def _most_called(stack: I64) -> int:
    """Return how often the busiest stack was called: what it allocates in a row is one call."""
    calls = stack[np.append(True, stack[1:] != stack[:-1])[: len(stack)]]
    return int(np.bincount(calls[calls >= 0]).max(initial=0))


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
        if n_equal >= unit and len(distinct(sequence[-unit:])) >= MIN_UNIT:
            return unit, n_equal
    return 0, 0


def n_equal_layers(trace: Trace, start: int, n_done: int) -> int:
    """Return how many equal layers the model has: those that hold most of its parameters."""
    lives = trace.lives
    before = np.flatnonzero((lives.start < start) & (lives.free >= start) & (lives.stack >= 0))
    sizes = lives.requested_bytes[before][np.argsort(lives.start[before], kind="stable")]
    found: list[tuple[int, int, int]] = []
    for period in range(2, min(MAX_PARAMETERS, len(sizes) // 2) + 1):
        equal = sizes[period:] == sizes[:-period]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], equal, [False]))))
        for low, high in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if len(distinct(sizes[low : low + period])) > 1:
                covered = int(sizes[low : high + period].sum())
                found.append((covered, -period, (high - low) // period + 1))
    return max((x for x in found if x[2] >= max(n_done, 2)), default=(0, 0, 0))[2]


def are_layers(trace: Trace) -> bool:
    """Return whether what was taken for steps are no more than the equal layers of a model.

    So they are where there are no more of them than of these, and none calls one line as often as
    a pass through all layers does.
    """
    steps = Steps.of(trace)
    if not len(steps) or (steps.kind == StepKind.TRAIN).any():
        return False
    n_layers = n_equal_layers(trace, int(steps.rows[0]), len(steps))
    if len(steps) > n_layers:
        return False
    lives = trace.lives
    made = np.flatnonzero(
        (lives.start >= steps.rows[0]) & trace.stacks.roles.in_module[lives.stack]
    )
    step, stack = steps.at(lives.start[made].astype(np.int64)), lives.stack[made].astype(np.int64)
    _, n_calls = np.unique(step * (int(stack.max(initial=0)) + 1) + stack, return_counts=True)
    return bool(n_calls.max(initial=0) < n_layers)
