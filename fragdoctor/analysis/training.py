"""A training run as its passes and layers: what a change of the program would act on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fragdoctor.analysis.layers import NO_ROW, LayerCalls, Requests, find_layers
from fragdoctor.analysis.result import PhaseAnalysis
from fragdoctor.model.phases import TrainingPhase
from fragdoctor.model.snapshot import I64
from fragdoctor.trace.passes import last_phase
from fragdoctor.trace.stacks import LOSS, StackRoles
from fragdoctor.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """The passes of a training run, as events of the device from the first to behind the last.

    Attributes:
        forward, backward, optimizer: (first, end) of each pass, ascending.
        layers: calls of equal layers; None where nothing repeats.
        state_row, temporary_row: requests of the optimizer for its states, and for what its step
            needs for a moment, ascending.
        loss_row: requests that a loss makes, ascending.
        loss_span: per forward pass (first, end) of the events between its last layer and the
            moment at which the backward pass reaches that layer.
        is_checkpointed: layers are run again in the backward pass already.
        n_whole_steps: steps that were recorded to their end; the last pass may be cut off.
    """

    forward: tuple[I64, I64]
    backward: tuple[I64, I64]
    optimizer: tuple[I64, I64]
    layers: LayerCalls | None
    state_row: I64
    temporary_row: I64
    loss_row: I64
    loss_span: tuple[I64, I64]
    is_checkpointed: bool
    n_whole_steps: int

    @property
    def steps(self) -> tuple[I64, I64]:
        """(first, end) of each forward and backward pass together, ascending."""
        first = np.sort(np.concatenate((self.forward[0], self.backward[0])))
        return first, np.sort(np.concatenate((self.forward[1], self.backward[1])))

    @property
    def begin_row(self) -> int:
        """Event at which the first step begins."""
        return int(self.steps[0][0])


def training_run(
    trace: Trace, phases: PhaseAnalysis | None, requests: Requests
) -> TrainingRun | None:
    """Return the passes of a device's trace; None of a program that does not train.

    A forward pass without any backward pass behind it trains if equal layers keep more than their
    results: autograd waits for it.

    Args:
        trace: of the device, for the stacks.
        phases: of the device.
        requests: all allocations of the device.
    """
    if phases is None or not len(phases.labels):
        return None
    trains = bool(np.isin(phases.labels, (TrainingPhase.BACKWARD, TrainingPhase.OPTIMIZER)).any())
    # Without stacks nothing separates forward from backward.
    forward = _spans(
        phases,
        TrainingPhase.FORWARD
        if (phases.labels == TrainingPhase.FORWARD).any()
        else TrainingPhase.FORWARD_BACKWARD,
    )
    layers = find_layers(requests, list(zip(forward[0].tolist(), forward[1].tolist(), strict=True)))
    if not len(forward[0]) or (not trains and layers is None):
        return None
    is_loss = trace.stacks.calls(LOSS)
    backward = _spans(phases, TrainingPhase.BACKWARD)
    optimizer = _spans(phases, TrainingPhase.OPTIMIZER)
    state, temporary = _of_optimizer(trace.stacks.roles, requests, optimizer)
    last = last_phase(phases.labels)
    return TrainingRun(
        forward=forward,
        backward=backward,
        optimizer=optimizer,
        layers=layers,
        state_row=state,
        temporary_row=temporary,
        loss_row=requests.row[is_loss[requests.stack]],
        loss_span=_loss_spans(requests, forward, backward, layers),
        is_checkpointed=bool(trace.stacks.roles.recomputes[requests.stack].any()),
        n_whole_steps=int(np.count_nonzero(phases.labels[:-1] == last)),
    )


def _spans(phases: PhaseAnalysis, label: TrainingPhase) -> tuple[I64, I64]:
    chosen = phases.labels == label
    return phases.first[:-1][chosen], phases.first[1:][chosen]


def _of_optimizer(
    roles: StackRoles, requests: Requests, optimizer: tuple[I64, I64]
) -> tuple[I64, I64]:
    """Return the requests of the optimizer for states, and those for temporaries.

    What is still live in a pass that the end of the trace cuts off is a state if its line made
    states in a pass before; in the first pass, by the functions in which PyTorch's optimizers do.
    """
    first, end = optimizer
    if not len(first):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    made = np.searchsorted(first, requests.row, side="right") - 1
    is_inside = (made >= 0) & (requests.row < end[np.maximum(made, 0)])
    is_temporary = is_inside & (requests.freed_row < end[np.maximum(made, 0)])
    is_state = is_inside & ~is_temporary
    is_open = is_state & (made == len(first) - 1) & (requests.freed_row == NO_ROW)
    if len(first) > 1:
        makers = np.unique(requests.stack[is_state & (made < len(first) - 1)])
        is_left = is_open & ~np.isin(requests.stack, makers)
    else:
        is_left = is_open & ~roles.makes_state[requests.stack]
    # A state outlives the next pass: what goes with it is something else that the pass made.
    next_end = np.append(end[1:], NO_ROW)[np.maximum(made, 0)]
    stays = (requests.freed_row >= next_end) | (requests.freed_row == NO_ROW)
    return requests.row[is_state & ~is_left & stays], requests.row[is_temporary | is_left]


def _loss_spans(
    requests: Requests,
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
        # What the layer keeps, its output apart, is freed when the backward pass is there.
        freed = freed[freed >= forward[1][i]][:-1]
        end[i] = int(freed.min(initial=end[i]))
    return first, end
