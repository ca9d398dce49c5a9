"""A training run as its passes and equal layers: what a change to the program would act on.

A model with L equal layers runs the same function L times in a row. Within one forward pass, a
stack that occurs k times at regular distances, seen from the function that a module runs inward,
marks k calls. There may be several candidates: a loop inside a layer marks more calls than the loop
over layers. The candidate whose calls keep the most for the backward pass, beyond the inputs that
they must keep, is taken, and then others beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from fragdoctor.analysis.result import PhaseAnalysis
from fragdoctor.future.passes import KEPT_SHARE, kept_of, last_phase
from fragdoctor.model.arrays import MOST, distinct, median
from fragdoctor.model.phases import Category, TrainingPhase
from fragdoctor.model.snapshot import I32, I64
from fragdoctor.trace.stacks import LOSS, StackRoles, Stacks
from fragdoctor.trace.trace import Trace

MIN_LAYERS: Final = 2
NO_ROW: Final = np.iinfo(np.int64).max


class LayerCalls(Struct, frozen=True):
    """The calls of equal layers, one row each, in order.

    Attributes:
        first_row, end_row: events of a call's first allocation, and just after its last.
        forward_end_row: where the call's forward pass ends.
        functions: frames of the functions that are called, if modules are seen to call them.
        kept_share: share of what these forward passes keep that is made in the calls.
    """

    first_row: I64
    end_row: I64
    forward_end_row: I64
    functions: I64
    kept_share: float


class TrainingRequests(Struct, frozen=True):
    """The requests of a trace in order, one row each.

    Attributes:
        row: the device's event that made the request.
        freed_row: event that freed the block; ``NO_ROW`` if it is live or the request failed.
        size_bytes: requested size.
        stack: id of the request's stack, or -1.
    """

    row: I64
    freed_row: I64
    size_bytes: I64
    stack: I32


def find_layers(
    requests: TrainingRequests, forward: Sequence[tuple[int, int]], stacks: Stacks
) -> LayerCalls | None:
    """Return the calls of equal layers, or None if no forward pass repeats anything.

    ``forward`` has the rows at which each forward pass begins and ends.
    """
    first, end, forward_end = [], [], []
    n_bytes = np.zeros(2, np.int64)  # in the calls, and in all
    functions: set[int] = set()
    seen: dict[bytes, tuple[list[tuple[int, int]], set[int]]] = {}
    # What still lives when the second next pass ends, no backward pass waits for.
    until = [*(end_row for _, end_row in forward[2:]), NO_ROW, NO_ROW]
    for (low_row, end_row), until_row in zip(forward, until, strict=False):
        low, high = np.searchsorted(requests.row, (low_row, end_row)).tolist()
        stack = requests.stack[low:high]
        freed_row = requests.freed_row[low:high]
        is_kept = (freed_row >= end_row) & (freed_row <= until_row)
        kept = np.where(is_kept, requests.size_bytes[low:high], 0)
        # Steps of a steady program are equal: what was found in one step holds for all.
        key = stack.tobytes()
        if key not in seen:
            seen[key] = _calls(stack, kept, stacks)
        calls, called = seen[key]
        functions |= called
        for begin, stop in calls:
            first.append(int(requests.row[low + begin]))
            end.append(int(requests.row[low + stop - 1]) + 1)
            forward_end.append(end_row)
        if calls:
            n_bytes += sum(int(kept[begin:stop].sum()) for begin, stop in calls), int(kept.sum())
    if not first:
        return None
    return LayerCalls(
        np.array(first, np.int64),
        np.array(end, np.int64),
        np.array(forward_end, np.int64),
        functions=np.array(sorted(functions), np.int64),
        kept_share=float(n_bytes[0] / max(n_bytes[1], 1)),
    )


def _calls(stack: I32, kept: I64, stacks: Stacks) -> tuple[list[tuple[int, int]], set[int]]:
    """Return the calls of one forward pass as ranges of its allocations, and frames in them.

    They are calls of modules where the stacks show any. A model may have layers of several kinds,
    such as those of an encoder and of a decoder.
    """
    found: list[tuple[int, int]] = []
    functions: set[int] = set()
    views = _of_modules(stack, stacks)
    while best := _best([view for view, _ in views], kept, are_functions=True):
        which, calls = best
        found += calls
        for low, high in calls:
            functions.update(distinct(views[which][1][low:high]).tolist())
            for view, _ in views:
                view[low:high] = -1
    if not found and (best := _best([stack], kept, are_functions=False)):
        found = best[1]
    return sorted(found), functions


def _best(
    views: Sequence[I32], kept: I64, *, are_functions: bool
) -> tuple[int, list[tuple[int, int]]] | None:
    """Return the calls that would save most if each kept its input and ran again, and their view.

    The largest call is not saved: it is complete again while the backward pass goes through it.
    """
    most, best = 0, None
    for which, view in enumerate(views):
        for calls in _candidates(view):
            if any((view[low:high] < 0).any() for low, high in calls):
                continue
            low, high = calls[0][0], calls[-1][1]
            entered = int(np.flatnonzero(np.append(True, view[:low] < 0))[-1])
            # What is only called in a loop comes after something that is not repeated.
            before, repeated = view[entered:low].tolist(), view[low:high].tolist()
            if are_functions and not {*before} <= {*repeated}:
                continue
            inside = [kept[low:high] for low, high in calls]
            whole = [int(each.sum()) for each in inside]
            results = sum(int(each[each > 0][-1:].sum()) for each in inside)
            saved = sum(whole) - results - max(whole)
            if saved > most:
                most, best = saved, (which, calls)
    return best


def _of_modules(stack: I32, stacks: Stacks) -> list[tuple[I32, I32]]:
    """Return numbers for the stacks of a pass, and frames, for each function that modules run.

    Numbers are equal where the function does the same, whichever line of the model called it, and
    -1 outside of it. Calls from elsewhere in the program, such as those of an evaluation that goes
    before, are apart. The frames are those of the function itself.
    """
    ids, member = np.unique(stack, return_inverse=True)
    frames, offsets = stacks.python.frames, stacks.python.offsets
    views: dict[tuple[int, int, int], I32] = {}
    numbers: dict[bytes, int] = {}
    for at in np.flatnonzero(ids >= 0).tolist():
        first, end = offsets[ids[at] : ids[at] + 2].tolist()
        is_call = stacks.calls_module[frames[first:end]]
        for i in (np.flatnonzero(is_call[1:] & ~is_call[:-1]) + first).tolist():
            key = int(stacks.places[ids[at]]), end - i, int(stacks.functions[frames[i]])
            view = views.setdefault(key, np.full((2, len(ids)), -1, np.int32))
            inner = frames[first : i + 1].tobytes()
            view[:, at] = numbers.setdefault(inner, len(numbers)), frames[i]
    member = member.reshape(-1)
    return [(view[0][member], view[1][member]) for view in views.values()]


def _candidates(stack: I32) -> Iterator[list[tuple[int, int]]]:
    """Yield the ways to cut a pass into calls: k calls if a stack occurs k times.

    Each may occur several times in a call, so what divides all of their numbers is tried as well.
    """
    ids, member, count = np.unique(stack, return_inverse=True, return_counts=True)
    place = np.argsort(member.reshape(-1), kind="stable")
    places = np.split(place, np.cumsum(count)[:-1])
    counts = count[(count >= MIN_LAYERS) & (ids >= 0)]
    divisor = np.gcd.reduce(counts) if len(counts) else 0
    for k in distinct(np.append(counts, divisor if divisor >= MIN_LAYERS else counts[:1])).tolist():
        # A line may allocate several times in each call.
        repeated = [np.sort(places[i]) for i in np.flatnonzero((count % k == 0) & (ids >= 0))]
        calls = _cut(repeated, k, len(stack))
        if calls is None:
            continue
        shapes = [np.sort(stack[low:high]).tobytes() for low, high in calls]
        # If shapes are equally frequent, take the first: a set's order would vary by process.
        common, n_alike = Counter(shapes).most_common(1)[0]
        if n_alike < MOST * k:
            continue
        if calls[-1][1] == len(stack) and shapes[-1] != common:
            calls.pop()  # the trace ends in the middle of this call
        if len(calls) >= MIN_LAYERS:
            yield calls


def _cut(repeated: Sequence[I64], k: int, n: int) -> list[tuple[int, int]] | None:
    """Return k calls as ranges of the pass, or None if the repetitions are not regular.

    ``repeated`` has the positions, in a pass of n requests, of each stack that occurs a multiple of
    k times.
    """
    opening = None
    for at in repeated:
        every = len(at) // k
        starts = at[::every]
        gaps = np.diff(starts)
        is_regular = (gaps >= MOST * median(gaps)).all()  # calls are about equally long
        # Everything that a call makes at this stack comes before the next call.
        is_compact = (at[every - 1 :: every][:-1] < starts[1:]).all()
        if is_regular and is_compact and (opening is None or starts[0] < opening[0]):
            opening = starts
    if opening is None:
        return None
    length = int(median(np.diff(opening)))
    bounds = np.append(opening, min(n, int(opening[-1]) + length))
    last = np.zeros(k, np.int64)
    for at in repeated:
        inside = np.diff(np.searchsorted(at, bounds))
        if (inside[:-1] == len(at) // k).all():
            ends = at[np.searchsorted(at, bounds[1:]) - 1]
            np.maximum(last, np.where(inside > 0, ends, 0), out=last)
    return [(int(low), int(high) + 1) for low, high in zip(opening, last, strict=True)]


class TrainingRun(Struct, frozen=True):
    """The passes of a training run, as ranges of the device's events; ends are exclusive.

    Attributes:
        forward, backward, optimizer: (first, end) of each pass, ascending.
        layers: calls of equal layers, or None if nothing repeats.
        state_row, temporary_row: requests of the optimizer for its states, and for the temporaries
            of its step, ascending.
        gradient_row, loss_row: requests for gradients, and those that a loss makes, ascending.
        loss_span: for each forward pass, (first, end) of the events between its last layer and the
            moment at which the backward pass reaches that layer.
        is_checkpointed: whether layers already run, or will run, again in the backward pass.
        n_whole_steps: steps that were recorded to their end; the last pass may be cut off.
    """

    forward: tuple[I64, I64]
    backward: tuple[I64, I64]
    optimizer: tuple[I64, I64]
    layers: LayerCalls | None
    state_row: I64
    temporary_row: I64
    gradient_row: I64
    loss_row: I64
    loss_span: tuple[I64, I64]
    is_checkpointed: bool
    n_whole_steps: int

    @property
    def steps(self) -> tuple[I64, I64]:
        """(first, end) of each forward and backward pass together, ascending."""
        first = np.sort(np.concatenate((self.forward[0], self.backward[0])))
        return first, np.sort(np.concatenate((self.forward[1], self.backward[1])))


def training_run(
    trace: Trace, phases: PhaseAnalysis | None, requests: TrainingRequests
) -> TrainingRun | None:
    """Return the passes of a device's trace, or None if the program does not train.

    A forward pass that no backward pass follows counts as training if layers are checkpointed, or
    equal ones keep more than their results: autograd is waiting for the backward pass.
    """
    if phases is None or not len(phases.labels) or only_infers(trace, phases):
        return None
    forward = _spans(phases, TrainingPhase.FORWARD)
    passes = list(zip(forward[0].tolist(), forward[1].tolist(), strict=True))
    layers = find_layers(requests, passes, trace.stacks)
    roles, stack = trace.stacks.roles, requests.stack
    is_checkpointed = bool((roles.recomputes | roles.checkpoints)[stack].any())
    trains = phases.is_training.any() or layers is not None or is_checkpointed
    if not len(forward[0]) or not trains:
        return None
    is_loss = trace.stacks.calls(LOSS)
    backward = _spans(phases, TrainingPhase.BACKWARD)
    optimizer = _spans(phases, TrainingPhase.OPTIMIZER)
    state, temporary = _of_optimizer(roles, requests, optimizer)
    last = last_phase(phases.labels)
    return TrainingRun(
        forward=forward,
        backward=backward,
        optimizer=optimizer,
        layers=layers,
        state_row=state,
        temporary_row=temporary,
        gradient_row=_gradients(trace, phases),
        loss_row=requests.row[is_loss[stack]],
        loss_span=_loss_spans(requests, forward, backward, layers),
        is_checkpointed=is_checkpointed,
        n_whole_steps=int(np.count_nonzero(phases.labels[:-1] == last)),
    )


def only_infers(trace: Trace, phases: PhaseAnalysis) -> bool:
    """Return whether only forward passes were recorded, and they keep too little to train."""
    is_forward = phases.labels == TrainingPhase.FORWARD
    if phases.is_training.any() or not is_forward.any():
        return False
    first, end = int(phases.first[:-1][is_forward][0]), int(phases.first[-1])
    roles, events = trace.stacks.roles, trace.events
    if (
        roles.checkpoints[events.stack[first:]].any()
        or not roles.in_module[events.stack[first:]].any()
    ):
        return False
    return kept_of(trace, first, end)[0] <= KEPT_SHARE


def _spans(phases: PhaseAnalysis, label: TrainingPhase) -> tuple[I64, I64]:
    chosen = phases.labels == label
    return phases.first[:-1][chosen], phases.first[1:][chosen]


def _of_optimizer(
    roles: StackRoles, requests: TrainingRequests, optimizer: tuple[I64, I64]
) -> tuple[I64, I64]:
    """Return the requests of the optimizer for states, and those for temporaries.

    If the trace ends during an optimizer pass, a block that is still live is a state if its stack
    made states in an earlier pass. In the first pass, it is a state if its stack has a function in
    which PyTorch's optimizers make states.
    """
    first, end = optimizer
    if not len(first):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    made = np.searchsorted(first, requests.row, side="right") - 1
    is_inside = (made >= 0) & (requests.row < end[np.maximum(made, 0)])
    is_temporary = is_inside & (requests.freed_row < end[np.maximum(made, 0)])
    is_state = is_inside & ~is_temporary
    is_open = is_state & (made == len(first) - 1) & (requests.freed_row == NO_ROW)
    is_open &= requests.row[-1] < end[-1]  # what a whole pass leaves is a state
    if len(first) > 1:
        makers = distinct(requests.stack[is_state & (made < len(first) - 1)])
        is_left = is_open & ~np.isin(requests.stack, makers)
    else:
        is_left = is_open & ~roles.makes_state[requests.stack]
    # A state outlives the next pass; a block freed before that pass ends is something else.
    next_end = np.append(end[1:], NO_ROW)[np.maximum(made, 0)]
    stays = (requests.freed_row >= next_end) | (requests.freed_row == NO_ROW)
    return requests.row[is_state & ~is_left & stays], requests.row[is_temporary | is_left]


def _gradients(trace: Trace, phases: PhaseAnalysis) -> I64:
    """Return the events that request gradients, ascending."""
    if not len(phases.category):
        return np.zeros(0, np.int64)
    made = trace.lives.start[phases.category == Category.GRADIENTS]
    return np.sort(made[made >= 0]).astype(np.int64)


def _loss_spans(
    requests: TrainingRequests,
    forward: tuple[I64, I64],
    backward: tuple[I64, I64],
    layers: LayerCalls | None,
) -> tuple[I64, I64]:
    """Return where each loss begins and ends: from the last layer until its backward pass."""
    first, end = forward[0].copy(), forward[1].copy()
    follows = np.searchsorted(backward[0], forward[1])
    has_backward = follows < len(backward[0])
    end[has_backward] = backward[1][follows[has_backward]]
    if layers is None:
        return first, end
    last_of = np.searchsorted(layers.forward_end_row, forward[1], side="right") - 1
    has_layers = (last_of >= 0) & (layers.forward_end_row[last_of] == forward[1])
    for i in np.flatnonzero(has_layers).tolist():
        last = int(last_of[i])
        first[i] = layers.end_row[last]
        low, high = np.searchsorted(
            requests.row, (layers.first_row[last], layers.end_row[last])
        ).tolist()
        freed = requests.freed_row[low:high]
        # What the layer keeps, except its output, is freed once the backward pass gets there.
        freed = freed[freed >= forward[1][i]][:-1]
        end[i] = int(freed.min(initial=end[i]))
    return first, end
