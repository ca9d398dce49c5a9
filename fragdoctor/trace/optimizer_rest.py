"""What is left of an optimizer's first step, told from the gradients and what was made for some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from fragdoctor.model.arrays import distinct, is_among
from fragdoctor.model.snapshot import I64, Bools
from fragdoctor.trace import stacks
from fragdoctor.trace.step_alignment import StepWindow

TRAINED: Final = 0.9
"""Share of a model that has gradients when nothing else of it is trained in the same step."""


@dataclass(frozen=True)
class OptimizerRest:
    """The rest of an optimizer's step; positions are of the window.

    Attributes:
        gradients: positions at which gradients were made that live.
        made: positions at which the optimizer allocated.
        is_state: of these, what is state; the rest goes by the end of the step.
        request_is_state: whether the failing request was for state.
        state: sizes of state that is still to be made after it.
        passing: sizes of what is needed besides, and goes by the end of the step.
        possible: sizes of what may be needed as well as that.
        is_all_trained: nothing else of the model is waiting for its gradients.
    """

    gradients: I64
    made: I64
    is_state: Bools
    request_is_state: bool
    state: list[int]
    passing: list[int]
    possible: list[int]
    is_all_trained: bool

    @classmethod
    def of(cls, w: StepWindow, age: I64, request: np.void, stack: int) -> OptimizerRest | None:
        """Return what is missing of the step in a window; None where that cannot be told.

        Args:
            w: of which the first step counts as complete up to the failing request.
            age: of each operation, as in ``AlignedSteps``.
            request: the operation that failed.
            stack: its stack.
        """
        roles, lives = w.trace.stacks.roles, w.trace.lives
        at, size = w.requests[0], int(request["size"])
        role = roles.role[w.stack[at]]
        older = lives.start < w.rows[0]
        gradients = at[(age[at] < 0) & np.isin(role, (stacks.BACKWARD, stacks.SILENT))]
        # Others that live are workspaces.
        gradients = gradients[is_among(w.size[gradients], lives.requested_bytes[older])]
        made = at[role == stacks.OPTIMIZER]
        is_state = _is_state(w, made, age[made] >= 0, stack)
        if is_state is None or not len(gradients):
            return None
        asks_state = bool(roles.makes_state[stack]) or stack in w.stack[made[is_state]]
        begun = made[w.stack[made] == stack]
        if asks_state and not len(begun):
            return None  # in the first parameter's: there may be more for each
        state: list[int] = []
        passing: list[int] = []
        possible: list[int] = []
        for line in distinct(w.stack[made[is_state]]).tolist():
            state += missing_sizes(w.size[gradients], w.size[made[w.stack[made] == line]])
        if asks_state and size in state:
            state.remove(size)
        if asks_state and is_state.all():  # what follows is not known: at most a list, as a rule
            possible = w.size[gradients].tolist()
        elif not asks_state:
            # A list with something for each parameter, in the order of the state.
            order = w.size[made[is_state & (w.stack[made] == w.stack[made[:1]])]]
            so_far = np.append(w.size[begun], size)
            is_list = bool(roles.makes_lists[stack])
            is_known = is_list and len(order) == len(gradients)
            if is_known and np.array_equal(order[: len(so_far)], so_far):
                passing = order[len(so_far) :].tolist()
            elif (is_list or len(begun) > 1) and (age[begun] < 0).all():
                possible = missing_sizes(w.size[gradients], so_far)
        model = older & roles.makes_model[lives.stack]
        n_model = int(lives.requested_bytes[model].sum())
        return cls(
            gradients=gradients,
            made=made,
            is_state=is_state,
            request_is_state=asks_state,
            state=state,
            passing=passing,
            possible=possible,
            is_all_trained=int(w.size[gradients].sum()) >= TRAINED * n_model,
        )


def _is_state(w: StepWindow, made: I64, is_lost: Bools, stack: int) -> Bools | None:
    """Return which allocations of an optimizer are state; None where it cannot be told.

    PyTorch's optimizers make it in functions for that purpose. In others it is what never went
    while something else did.
    """
    makes_state = w.trace.stacks.roles.makes_state
    line = w.stack[made]
    result: Bools = makes_state[line]
    if result.any() or makes_state[stack] or not is_lost.any():
        return result
    lines, count = np.unique(line, return_counts=True)
    if stack not in lines or np.isin(line[~is_lost], lines[count < 2]).any():
        return None
    lasting: Bools = ~np.isin(line, line[is_lost])
    return lasting


def missing_sizes(gradients: I64, made: I64) -> list[int]:
    """Return the sizes of what a line has still to make, one for each gradient."""
    sizes, n_gradients = np.unique(gradients, return_counts=True)
    n_made = np.array([np.count_nonzero(made == size) for size in sizes.tolist()], np.int64)
    result: list[int] = np.repeat(sizes, np.maximum(n_gradients - n_made, 0)).tolist()
    return result
