"""Find the steps of a program in its trace: nothing marks them, but its stacks return.

A step is one pass of the outermost loop that allocates. Seen from the outside in, a stack is a path
in the program's call tree; a loop shows as a node of that tree which is entered, left for another
node and entered again. The outermost such node that is entered often enough is the loop's body.
Loops inside a module's ``forward``, an optimizer or elsewhere in torch are not steps: a pass over
the layers of one forward looks the same otherwise. Decorators of torch (``no_grad``) are looked
through.

Where no stack is recorded the sizes stand in: the rarest size that returns at even distances.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from fragdoctor.model.hooks import tell
from fragdoctor.model.snapshot import I32, I64, U8, Bools, Snapshot, StackTable
from fragdoctor.trace.code_owners import TORCH
from fragdoctor.trace.trace import Trace

MIN_STEPS: Final = 4
ENOUGH_STEPS: Final = 8
# Passes that a loop may miss at the end of the trace.
MAX_SILENCE: Final = 3
# Levels of the call tree looked at below the first branching.
MAX_LEVELS: Final = 12
MAX_STACK_FRAMES: Final = 4_000_000

_TRANSPARENT = re.compile(
    r"[/\\]torch[/\\](?:utils[/\\]_contextlib|amp[/\\]autocast_mode|cuda[/\\]amp[/\\]autocast_mode"
    r"|_dynamo[/\\](?:eval_frame|external_utils)|autograd[/\\]grad_mode|_compile"
    r"|multiprocessing[/\\]spawn|distributed[/\\]\w+"
    r"|distributed[/\\]elastic[/\\].*)\.py$"
)


@dataclass(frozen=True, slots=True)
class Steps:
    """Rows at which steps begin, ascending; step i lasts to the next one or the end."""

    rows: I64
    method: str

    def __len__(self) -> int:
        return len(self.rows)


def find_steps(trace: Trace) -> Steps:
    """Return the steps of a device's trace; none where no loop shows."""
    tell("Analysing: the steps of the program")
    lives = trace.lives
    born = slice(lives.n_initial, lives.n_regular)
    rows, stack = lives.start[born].astype(np.int64), lives.stack[born]
    paths = trace.stacks.python
    has_stack = np.append(np.diff(paths.offsets) > 0, False)[stack]
    if np.count_nonzero(has_stack) * 10 >= len(rows) and has_stack.any():
        barrier = _barriers(trace.snapshot, trace.stacks.classes)
        found = _steps_by_stack(paths, barrier, rows[has_stack], stack[has_stack], trace.n_events)
        return Steps(found, "stacks")
    return Steps(_steps_by_size(rows, lives.requested_bytes[born], trace.n_events), "sizes")


def _steps_by_stack(
    stacks: StackTable, barrier: Bools, rows: I64, stack: I32, n_events: int
) -> I64:
    """Return the rows where the body of the outermost loop is entered."""
    none = np.zeros(0, np.int64)
    used, at = np.unique(stack, return_inverse=True)
    at = at.reshape(-1)
    offsets, frames = stacks.offsets, stacks.frames
    lengths = np.diff(offsets)[used]
    if int(lengths.sum()) > MAX_STACK_FRAMES:
        return none
    # Runs of one stack are one visit; only their first rows matter.
    fresh = np.append(True, at[1:] != at[:-1])
    at, rows = at[fresh], rows[fresh]
    node = np.zeros(len(used), np.int64)
    is_open = np.ones(len(used), np.bool_)
    n_levels = 0
    for depth in range(int(lengths.max())):
        # A stack that ends here, or entered torch, stays one closed node from then on.
        was_open = is_open
        goes_on = is_open & (depth < lengths)
        frame = np.where(goes_on, frames[np.maximum(offsets[used + 1] - 1 - depth, 0)], -1)
        is_open = goes_on & ~barrier[frame]
        child = np.where(was_open, frame + 1, 0)
        _, node = np.unique(node * (len(barrier) + 2) + child, return_inverse=True)
        node = node.reshape(-1)
        if not was_open.any() or n_levels >= MAX_LEVELS:
            break
        if int(node.max()) == 0:
            continue
        n_levels += 1
        best = _best_node(node[at], was_open[at], rows, n_events)
        if best is not None:
            return best
    return none


def _best_node(node: I64, is_new: Bools, rows: I64, n_events: int) -> I64 | None:
    """Return the entries of the loop body among the nodes of one level, if there is a loop.

    Of a loop within a loop in the same function the outer one counts: the node with the fewest
    entries, of those that are spread over most of the loop. A loop of a handful of passes gives
    way to an inner one with more, as epochs do to steps.
    """
    enters = np.append(True, node[1:] != node[:-1]) & is_new
    entered, at = node[enters], rows[enters]
    if not len(entered):
        return None
    visits = np.bincount(entered)
    loops = np.flatnonzero(visits >= MIN_STEPS)
    if not len(loops):
        return None
    first, last = np.zeros(len(visits), np.int64), np.zeros(len(visits), np.int64)
    last[entered] = at
    first[entered[::-1]] = at[::-1]
    span = last - first
    loops = loops[span[loops] * 2 >= span[loops].max()]
    # What is entered at the beginning only (a cache being filled) is no loop of the whole.
    pace = span[loops] / (visits[loops] - 1)
    loops = loops[n_events - last[loops] <= MAX_SILENCE * pace]
    if not len(loops):
        return None
    many = loops[visits[loops] >= ENOUGH_STEPS]
    loops = many if len(many) else loops
    # A program that stopped within a step has entered its first nodes once more than the others.
    fewest = loops[visits[loops] <= visits[loops].min() + 1]
    chosen = fewest[np.argmin(first[fewest])]
    entries: I64 = at[entered == chosen]
    return entries


def _barriers(snapshot: Snapshot, classes: U8) -> Bools:
    """Return for each frame whether loops inside of it are none of the user's steps."""
    is_torch = classes == TORCH
    names = np.unique(snapshot.frames.filename[is_torch])
    transparent = [i for i in names.tolist() if _TRANSPARENT.search(snapshot.strings[i][:1000])]
    result: Bools = is_torch & ~np.isin(snapshot.frames.filename, transparent)
    return result


def _steps_by_size(rows: I64, size: I64, n_events: int) -> I64:
    """Return the rows of the allocations of the rarest size that returns at even distances."""
    none = np.zeros(0, np.int64)
    if not len(rows):
        return none
    kinds, member, count = np.unique(size, return_inverse=True, return_counts=True)
    order = np.argsort(member.reshape(-1), kind="stable")
    ends = np.cumsum(count)
    candidates = np.flatnonzero(count >= MIN_STEPS)
    del kinds
    best, best_rows = None, none
    for c in candidates[np.argsort(count[candidates], kind="stable")][:200].tolist():
        at = rows[order[ends[c] - count[c] : ends[c]]]
        gaps = np.diff(at)
        spread = float(gaps.std() / max(1.0, gaps.mean()))
        covered = (at[-1] - at[0] + gaps.mean()) / max(1, n_events)
        if covered < 0.5 or spread > 0.35 or gaps.mean() < 4:
            continue
        if best is None or count[c] < best:
            best, best_rows = int(count[c]), at
    return best_rows
