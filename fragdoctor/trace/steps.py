"""The steps of a program: nothing marks them in a trace, but its stacks return.

A step is one iteration of the program's outer loop. Seen from the outside in, a stack is a path in
the program's call tree, and a loop shows where the program comes back to a line without having left
the function (``call_tree.h``). In training what lies between two backward passes decides: if the
code that both have in common turned back meanwhile, a new step has begun; if it only went on (the
other network of a GAN), the step goes on. Passes without an optimizer step after them belong to the
same step (gradient accumulation). A loop around a loop of updates that begins with passes of its own
(rollouts, then updates) is the step; epochs are not. Loops over forward passes between, before and
after the training steps are evaluation. Without training the outermost loop that does most of the
work is taken, without stacks the rarest size that returns at even distances.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

import numpy as np

from fragdoctor.model.hooks import tell
from fragdoctor.model.snapshot import I32, I64, U8, Action, Bools
from fragdoctor.trace import stacks
from fragdoctor.trace.call_tree import CallTree
from fragdoctor.trace.lives import NEVER
from fragdoctor.trace.passes import RoleRuns, find_runs
from fragdoctor.trace.trace import Trace

MIN_STEPS: Final = 4
ENOUGH_STEPS: Final = 8
MAX_SPREAD: Final = 1.0
"""Deviation of the work of iterations, relative to its mean, up to which a loop is one of steps."""

MAX_UNEVEN: Final = 4
"""A group of passes is no longer than so many usual ones: else its end was not seen."""


class StepKind(IntEnum):
    """What a step is for; OTHER is none of the two, or nothing tells."""

    TRAIN = 0
    EVALUATION = 1
    OTHER = 2


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a device's trace, in order.

    Attributes:
        rows: row at which each begins; it lasts to the next one or the end.
        kind: ``uint8``, a ``StepKind`` each.
        micro_rows: rows at which further passes of a step begin (gradient accumulation, the second
            network of a GAN).
        method: ``stacks``, ``sizes`` or ``none``.
        is_last_complete: the last step was not cut off by a failure or the end of the trace.
    """

    rows: I64
    kind: U8
    micro_rows: I64
    method: str
    is_last_complete: bool

    @classmethod
    def of(cls, trace: Trace) -> Steps:
        """Return the steps of a trace, worked out once."""
        if cls not in trace.memo:
            trace.memo[cls] = find_steps(trace)
        found: Steps = trace.memo[cls]
        return found

    def __len__(self) -> int:
        return len(self.rows)

    def of_kind(self, kind: StepKind) -> I64:
        """Return the rows at which steps of a kind begin."""
        return self.rows[self.kind == kind]


NO_STEPS: Final = Steps(
    np.zeros(0, np.int64), np.zeros(0, np.uint8), np.zeros(0, np.int64), "none", True
)


def find_steps(trace: Trace) -> Steps:
    """Return the steps of a device's trace; none where no loop shows."""
    tell("Looking for steps")
    if not trace.n_events:
        return NO_STEPS
    runs = find_runs(trace)
    tree = CallTree.of(trace)
    if tree is None:
        return _by_size(trace)
    if runs is not None and (runs.label == stacks.BACKWARD).any():
        return _Training(trace, runs, tree).steps()
    return _without_training(trace, tree)


def _steps(
    rows: list[tuple[int, StepKind]], micro: list[int], method: str, *, is_complete: bool
) -> Steps:
    ordered = sorted(rows)
    return Steps(
        np.array([row for row, _ in ordered], np.int64),
        np.array([kind for _, kind in ordered], np.uint8),
        np.array(sorted(micro), np.int64),
        method,
        is_complete,
    )


# ---- training ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop of the program: the node it is in, and which of its lines it goes over.

    ``low`` and ``high`` are the line it turns to and the last line that it turned from; -1 where
    its parts are different functions called by one line.
    """

    node: int
    depth: int
    function: int
    low: int
    high: int
    turns: I64  # indices into the turns of the tree


class _Training:
    """Steps of a program that shows backward passes.

    A unit is a backward pass with what belongs to it; gap j lies between the units j and j + 1.
    """

    def __init__(self, trace: Trace, runs: RoleRuns, tree: CallTree) -> None:
        self.trace, self.runs, self.tree = trace, runs, tree
        ends = np.append(runs.first[1:], trace.n_events)
        is_unit = runs.label == stacks.BACKWARD
        self.begin, self.end = runs.first[is_unit], ends[is_unit]
        self.n = len(self.begin)
        self.visit = tree.visit_at(self.begin)
        place = np.where(self.visit >= 0, tree.visit_node[np.maximum(self.visit, 0)], 0)
        self.path = tree.paths_of(place.astype(np.int32))
        self.loops = _loops(tree)
        self.of_turn = np.full(len(tree.turn_visit), -1, np.int64)
        for i, loop in enumerate(self.loops):
            self.of_turn[loop.turns] = i

    def steps(self) -> Steps:
        """Return the steps, with evaluation between them."""
        closes = self._closing()
        cuts = self._cuts(closes)  # gap -> turn, -1: without one
        self._keep_outer_steps(cuts)
        starts = {j + 1: self._row_of_cut(j, turn) for j, turn in cuts.items()}
        further = self._further_turns(cuts)
        first = self._first_start(cuts)
        if first is not None:
            starts[0] = first
        tail = self._tail_start(cuts, closes)
        rows = [(row, StepKind.TRAIN) for row in (*starts.values(), *further)]
        if tail is not None:
            rows.append((tail, StepKind.TRAIN))
        micro = [self._start_of_unit(j) for j in range(1, self.n) if j not in starts]
        rows += self._evaluation(sorted(row for row, _ in rows))
        cut_off = self.trace.ends_in_failure or not bool(closes[-1])
        is_complete = tail is None and not (cut_off and self._fails_inside(rows))
        return _steps(rows, micro, "stacks", is_complete=is_complete)

    # ---- which gaps can end a step -------------------------------------------------------------

    def _closing(self) -> Bools:
        """Return for each unit whether a step can end after it."""
        optimizer = self.runs.first[self.runs.label == stacks.OPTIMIZER]
        edges = np.append(self.begin, self.trace.n_events)
        count = np.diff(np.searchsorted(optimizer, edges))
        has_step: Bools = count > 0
        inner = has_step[:-1]
        if not len(inner) or np.count_nonzero(inner) >= 0.9 * len(inner):
            return has_step if has_step.any() else np.ones(self.n, np.bool_)
        if self._is_regular(has_step):
            return has_step
        crossing = self._freed_gradients()
        return crossing if self._is_regular(crossing) else np.ones(self.n, np.bool_)

    def _is_regular(self, closes: Bools) -> bool:
        """Return whether units close in groups of about one size, as gradients are accumulated."""
        at = np.flatnonzero(closes)
        if not len(at) or at[0] == 0:
            return False
        sizes = np.diff(at)
        size = int(np.median(sizes)) if len(sizes) else int(at[0]) + 1
        most = MAX_UNEVEN * size
        if size < 2 or at[0] >= most or self.n - 1 - at[-1] > most:
            return False
        return bool(np.count_nonzero(sizes <= most) == len(sizes))

    def _freed_gradients(self) -> Bools:
        """Return after which units gradients go that were made by units before.

        Of accumulated gradients the first pass makes the buffers and the last one's step frees
        them; everything else that a backward pass makes is gone by the next one.
        """
        lives = self.trace.lives
        made = np.searchsorted(self.begin, lives.start, side="right") - 1
        goes = np.searchsorted(self.begin, lives.free, side="right") - 1
        inside = (made >= 0) & (lives.start >= 0) & (lives.free != NEVER)
        inside &= lives.start < self.end[np.maximum(made, 0)]
        crossing = np.flatnonzero(inside & (goes > made))
        n_bytes = np.zeros(self.n, np.int64)
        np.add.at(n_bytes, goes[crossing], lives.size_bytes[crossing])
        result: Bools = n_bytes > 0.5 * n_bytes.max(initial=0)
        return result

    # ---- where loops turned between units --------------------------------------------------------

    def _cuts(self, closes: Bools) -> dict[int, int]:
        """Return the gaps in which a step begins, each with the turn that begins it."""
        turns = self._turns_of_gaps()
        cuts: dict[int, int] = {}
        for j in range(self.n - 1):
            if not closes[j]:
                continue
            if j in turns:
                cuts[j] = turns[j]
            elif self._same_place(j):
                cuts[j] = -1
        enclosing = {self.of_turn[t] for t in cuts.values() if t >= 0}
        for j in range(self.n - 1):
            if closes[j] and j not in cuts and self._goes_on_elsewhere(j, enclosing):
                cuts[j] = -1
        return cuts

    def _turns_of_gaps(self) -> dict[int, int]:
        """Return for each gap the first turn of the outermost loop around both of its units."""
        tree = self.tree
        if not len(tree.turn_visit) or self.n < 2:
            return {}
        gap = np.searchsorted(self.visit, tree.turn_visit, side="left") - 1
        depth = tree.depth[tree.turn_node]
        chosen = np.flatnonzero((gap >= 0) & (gap < self.n - 1) & (depth + 1 < self.path.shape[1]))
        j, d = gap[chosen], depth[chosen]
        here = tree.turn_node[chosen]
        common = (self.path[j, d] == here) & (self.path[j + 1, d] == here)
        chosen, j, d = chosen[common], j[common], d[common]
        fits = self._turns_before(chosen, self.path[j + 1, d + 1])
        chosen, j, d = chosen[fits], j[fits], d[fits]
        order = np.lexsort((chosen, d, j))
        firsts = order[np.append(True, np.diff(j[order]) > 0)] if len(order) else order
        return dict(zip(j[firsts].tolist(), chosen[firsts].tolist(), strict=True))

    def _turns_before(self, turns: I64, children: I32) -> Bools:
        """Return whether each turn goes to a line at or before the one that the unit is in."""
        tree = self.tree
        target = tree.turn_target[turns]
        differs = tree.functions_of(target) != tree.functions_of(children)
        result: Bools = differs | (tree.lines_of(target) <= tree.lines_of(children))
        return result

    def _same_place(self, j: int) -> bool:
        """Return whether the units before and after a gap are made by the very same code."""
        return bool((self.path[j] == self.path[j + 1]).all())

    def _goes_on_elsewhere(self, j: int, loops: set[int]) -> bool:
        """Return whether a gap without a turn leads into another loop, or repeats a call.

        It does not within one iteration of a loop (the networks of a GAN take turns).
        """
        around = [i for i in loops if self._holds(i, j) and self._holds(i, j + 1)]
        if around:
            return False
        return self._site(j) == self._site(j + 1) or any(self._holds(i, j) for i in loops)

    def _holds(self, i: int, j: int) -> bool:
        """Return whether unit j is in the body of loop i."""
        loop, path = self.loops[i], self.path[j]
        if loop.depth + 1 >= len(path) or path[loop.depth] != loop.node:
            return False
        if loop.low < 0:
            return True
        child = path[loop.depth + 1 : loop.depth + 2]
        if int(self.tree.functions_of(child)[0]) != loop.function:
            return True
        return loop.low <= int(self.tree.lines_of(child)[0]) <= loop.high

    def _site(self, j: int) -> int:
        """Return the innermost frame of the program at a unit."""
        frames = self.tree.frame[self.path[j][self.path[j] > 0]]
        frames = frames[frames >= 0]
        return int(frames[-1]) if len(frames) else -1

    # ---- loops of updates that are part of a step ------------------------------------------------

    def _keep_outer_steps(self, cuts: dict[int, int]) -> None:
        """Remove cuts of loops inside a step: a critic's, or updates after rollouts."""
        used = sorted({int(self.of_turn[t]) for t in cuts.values() if t >= 0})
        for outer in used:
            inner = [i for i in used if i != outer and self._encloses(outer, i)]
            if not inner:
                continue
            mine = [j for j, t in cuts.items() if t >= 0 and self.of_turn[t] == outer]
            theirs = [j for j, t in cuts.items() if t >= 0 and self.of_turn[t] in inner]
            if self._takes_turns(cuts, outer, inner, len(mine)) or self._begins_with_passes(
                outer, mine, theirs, cuts
            ):
                for j in theirs:
                    del cuts[j]
                return

    def _encloses(self, outer: int, inner: int) -> bool:
        a, b = self.loops[outer], self.loops[inner]
        if a.node == b.node:
            return a.function == b.function and a.low < b.low <= a.high
        if b.depth <= a.depth:
            return False
        path = self.tree.paths_of(np.array([b.node], np.int32))[0]
        if path[a.depth] != a.node:
            return False
        if a.low < 0:
            return True
        child = path[a.depth + 1 : a.depth + 2]
        if int(self.tree.functions_of(child)[0]) != a.function:
            return True
        return a.low <= int(self.tree.lines_of(child)[0]) <= a.high

    def _takes_turns(
        self, cuts: dict[int, int], outer: int, inner: list[int], n_turns: int
    ) -> bool:
        """Return whether most iterations go on to other training after an inner loop."""
        n = 0
        for j in range(self.n - 1):
            if j in cuts or not self._holds(outer, j) or not self._holds(outer, j + 1):
                continue
            n += any(self._holds(i, j) != self._holds(i, j + 1) for i in inner)
        return n_turns >= 1 and n >= max(1, n_turns // 2)

    def _begins_with_passes(
        self, outer: int, mine: list[int], theirs: list[int], cuts: dict[int, int]
    ) -> bool:
        """Return whether iterations begin with many more passes than a single update needs."""
        if len(mine) < 2 or len(theirs) < len(mine):
            return False
        usual = float(np.median([self._n_passes(j, cuts) for j in theirs]))
        ours = np.array([self._n_passes(j, cuts) for j in mine], np.float64)
        first = self._first_start(cuts, outer)
        if first is None or usual <= 0:
            return False
        before_first = self._n_module(first, int(self.begin[0]))
        enough = np.count_nonzero(ours >= 2 * usual) >= 0.8 * len(ours)
        return bool(np.median(ours) >= 2.5 * usual and enough and before_first >= 2 * usual)

    def _n_passes(self, j: int, cuts: dict[int, int]) -> int:
        """Return how much a module's calls allocate from the cut in a gap to the next unit."""
        return self._n_module(self._row_of_cut(j, cuts[j]), int(self.begin[j + 1]))

    def _n_module(self, low: int, high: int) -> int:
        events, roles = self.trace.events, self.trace.stacks.roles
        rows = slice(low, high)
        is_alloc = events.action[rows] == Action.ALLOC
        return int(np.count_nonzero(is_alloc & roles.in_module[events.stack[rows]]))

    def _further_turns(self, cuts: dict[int, int]) -> list[int]:
        """Return the rows of iterations without a backward pass (a batch that was left out)."""
        rows: list[int] = []
        for j, turn in cuts.items():
            if turn < 0:
                continue
            mine = self.loops[int(self.of_turn[turn])].turns
            low = int(np.searchsorted(mine, turn, side="right"))
            at = self.tree.turn_visit[mine[low:]]
            rows += self.tree.turn_row[mine[low:][at <= self.visit[j + 1]]].tolist()
        return rows

    # ---- where steps begin -----------------------------------------------------------------------

    def _row_of_cut(self, j: int, turn: int) -> int:
        """Return the row at which the step after a gap begins."""
        if turn < 0:
            return self._start_of_unit(j + 1)
        row = int(self.tree.turn_row[turn])
        if self.trace.is_late and self.loops[int(self.of_turn[turn])].low < 0:
            # The recording began in the middle of an iteration, so that a call seen again need not
            # be the first of its iteration.
            ends = np.append(self.runs.first[1:], self.trace.n_events)
            ends = ends[self.runs.label != stacks.FORWARD]
            at = int(np.searchsorted(ends, self.begin[j + 1], side="right")) - 1
            visit = int(np.searchsorted(self.tree.visit_row, ends[at])) if at >= 0 else 0
            return min(row, int(self.tree.visit_row[visit]))
        return row

    def _start_of_unit(self, j: int) -> int:
        """Return the row at which the forward pass before a backward pass begins."""
        run = int(np.searchsorted(self.runs.first, self.begin[j]))
        before = run - 1
        if before >= 0 and self.runs.label[before] == stacks.FORWARD:
            return int(self.runs.first[before])
        return int(self.begin[j])

    def _first_start(self, cuts: dict[int, int], only: int | None = None) -> int | None:
        """Return the row at which the first step begins; None where its beginning is lost.

        The innermost loop of steps around the first unit says so, or the one that is given.
        """
        tree = self.tree
        used = {int(self.of_turn[t]) for t in cuts.values() if t >= 0}
        used = used if only is None else {only}
        around = [i for i in used if self._holds(i, 0)]
        if not around or self.visit[0] < 0:
            return self._start_after_setup()
        loop = self.loops[max(around, key=lambda i: (self.loops[i].depth, self.loops[i].low))]
        visit = int(self.visit[0])
        paths = tree.paths_of(tree.visit_node[: visit + 1])
        under = (
            paths[:, loop.depth] == loop.node if loop.depth < paths.shape[1] else paths[:, 0] < 0
        )
        children = paths[:, min(loop.depth + 1, paths.shape[1] - 1)]
        if loop.low >= 0:
            lines, function = tree.lines_of(children), tree.functions_of(children)
            under &= (function != loop.function) | ((lines >= loop.low) & (lines <= loop.high))
        outside = np.flatnonzero(~under)
        start = int(outside[-1]) + 1 if len(outside) else 0
        if start == 0 and self.trace.is_late:
            usual = tree.turn_target[loop.turns]
            if not np.isin(children[0], usual):
                return None  # the beginning of the step was lost, or came before the recording
        return int(tree.visit_row[start])

    def _start_after_setup(self) -> int | None:
        """Return where a step begins that no loop encloses: after the model was made."""
        trace, roles = self.trace, self.trace.stacks.roles
        end = int(self.begin[0])
        is_alloc = trace.events.action[:end] == Action.ALLOC
        stack = trace.events.stack[:end]
        if trace.is_late and not self._starts_at_rest():
            return None
        called = np.flatnonzero(is_alloc & roles.in_module[stack])
        built = np.flatnonzero(is_alloc & roles.makes_model[stack])
        if len(called):
            built = built[built < called[0]]
        after = int(built[-1]) + 1 if len(built) else 0
        later = np.flatnonzero(is_alloc[after:])
        return after + int(later[0]) if len(later) else end

    def _starts_at_rest(self) -> bool:
        """Return whether the recording began between two steps, with little memory in use."""
        lowest = self.trace.totals.envelope("allocated_bytes", [0]).low[0]
        return bool(self.trace.facts["initial_allocated_bytes"] <= 1.02 * lowest)

    def _tail_start(self, cuts: dict[int, int], closes: Bools) -> int | None:
        """Return where a step begins after the last backward pass, None where none does."""
        tree, last = self.tree, self.n - 1
        if not closes[last] or self.visit[last] < 0:
            return None
        used = {int(self.of_turn[t]) for t in cuts.values() if t >= 0}
        later = np.flatnonzero(tree.turn_visit > self.visit[last])
        for turn in later.tolist():
            i = int(self.of_turn[turn])
            if self._holds(i, last) and (i in used or any(self._encloses(i, k) for k in used)):
                return int(tree.turn_row[turn])
            if not used and self._holds(i, last):
                return int(tree.turn_row[turn])
        return None

    def _fails_inside(self, rows: list[tuple[int, StepKind]]) -> bool:
        """Return whether the last step has not come to its end."""
        if not self.trace.ends_in_failure:
            return len(rows) > 0 and max(rows)[1] == StepKind.TRAIN
        return True

    # ---- evaluation ------------------------------------------------------------------------------

    def _evaluation(self, starts: list[int]) -> list[tuple[int, StepKind]]:
        """Return steps of evaluation: loops over forward passes outside of the training steps."""
        if not starts:
            return []
        optimizer = self.runs.label == stacks.OPTIMIZER
        ends = np.append(self.runs.first[1:], self.trace.n_events)
        busy_end = np.sort(np.concatenate([self.end, ends[optimizer]]))
        found: list[tuple[int, StepKind]] = []
        edges = [*starts, self.trace.n_events]
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            at = int(np.searchsorted(busy_end, high, side="right")) - 1
            # A backward or optimizer run lasts until the next event with a role.
            begin = int(busy_end[at]) if at >= 0 and busy_end[at] > low else low
            if begin > low and begin < high and self._n_module(begin, high):
                found += _loops_of_passes(self.tree, self.trace, begin, high)
        return found


def _loops(tree: CallTree) -> list[_Loop]:
    """Return the loops that turn anywhere, by node and the line they turn to."""
    if not len(tree.turn_visit):
        return []
    key = tree.turn_node.astype(np.int64) << 32 | tree.turn_target
    _, first, member = np.unique(key, return_index=True, return_inverse=True)
    member = member.reshape(-1)
    order = np.argsort(member, kind="stable")
    ends = np.cumsum(np.bincount(member))
    target, source = tree.turn_target[first], tree.turn_source
    function, low = tree.functions_of(target), tree.lines_of(target)
    loops = []
    for i, (begin, end) in enumerate(zip(np.append(0, ends[:-1]), ends, strict=True)):
        turns = order[begin:end]
        node = int(tree.turn_node[first[i]])
        sources = source[turns]
        same = tree.functions_of(sources) == function[i]
        high = int(tree.lines_of(sources[same]).max(initial=-1))
        is_lines = low[i] >= 0 and high >= low[i]
        loops.append(
            _Loop(
                node,
                int(tree.depth[node]),
                int(function[i]),
                int(low[i]) if is_lines else -1,
                high if is_lines else -1,
                turns,
            )
        )
    return _with_nested(loops)


def _with_nested(loops: list[_Loop]) -> list[_Loop]:
    """Return the loops, each reaching as far as those that begin in it."""
    highest = [loop.high for loop in loops]
    groups: dict[tuple[int, int], list[int]] = {}
    for i, loop in enumerate(loops):
        if loop.low >= 0:
            groups.setdefault((loop.node, loop.function), []).append(i)
    for members in groups.values():
        members.sort(key=lambda i: -loops[i].low)
        for at, i in enumerate(members):  # those that begin later were looked at before
            for k in members[:at]:
                if loops[k].low <= highest[i]:
                    highest[i] = max(highest[i], highest[k])
    return [replace(loop, high=high) for loop, high in zip(loops, highest, strict=True)]


def _loops_of_passes(
    tree: CallTree, trace: Trace, low: int, high: int
) -> list[tuple[int, StepKind]]:
    """Return the iterations of the outermost loop over forward passes among some rows."""
    events, roles = trace.events, trace.stacks.roles
    rows = slice(low, high)
    is_call = (events.action[rows] == Action.ALLOC) & roles.in_module[events.stack[rows]]
    calls = np.flatnonzero(is_call) + low
    begin = int(np.searchsorted(tree.turn_row, low))
    stop = int(np.searchsorted(tree.turn_row, high))
    turns = np.arange(begin, stop)
    depth = tree.depth[tree.turn_node[turns]]
    for node_depth in np.unique(depth).tolist():
        level = turns[depth == node_depth]
        for node in np.unique(tree.turn_node[level]).tolist():
            mine = level[tree.turn_node[level] == node]
            target = tree.lines_of(tree.turn_target[mine])
            mine = mine[target == target.min()]
            at = tree.turn_row[mine]
            n_calls = np.diff(np.searchsorted(calls, np.append(at, high)))
            before = int(np.searchsorted(calls, at[0]))
            if np.count_nonzero(n_calls) >= 0.5 * len(at) and before:
                first = _entry(tree, low, int(tree.turn_visit[mine[0]]), node)
                return [(r, StepKind.EVALUATION) for r in (first, *at.tolist())]
    return [(int(calls[0]), StepKind.EVALUATION)]


def _entry(tree: CallTree, low: int, visit: int, node: int) -> int:
    """Return the row at which the program came to a node, before a visit and not before a row."""
    depth = int(tree.depth[node])
    at = visit
    while at > 0 and tree.visit_row[at - 1] >= low:
        path = tree.paths_of(tree.visit_node[at - 1 : at])[0]
        if depth >= len(path) or path[depth] != node:
            break
        at -= 1
    return int(tree.visit_row[at])


# ---- without training --------------------------------------------------------------------------


def _without_training(trace: Trace, tree: CallTree) -> Steps:
    """Return the iterations of the outermost loop that does most of the work."""
    loop = _busiest(trace, tree)
    roles = trace.stacks.roles
    is_alloc = trace.events.action == Action.ALLOC
    has_calls = bool((is_alloc & roles.in_module[trace.events.stack]).any())
    if loop is None:
        return _single(trace, has_calls=has_calls)
    kind = StepKind.EVALUATION if has_calls else StepKind.OTHER
    rows = tree.turn_row[loop.turns].tolist()
    entry = _entry(tree, 0, int(tree.turn_visit[loop.turns[0]]), loop.node)
    if not (trace.is_late and entry == tree.visit_row[0]):
        rows = [_body_start(tree, loop), *rows]
    return _steps(
        [(int(r), kind) for r in rows], [], "stacks", is_complete=not trace.ends_in_failure
    )


def _body_start(tree: CallTree, loop: _Loop) -> int:
    """Return the row at which the first iteration begins: the first visit to a line of the loop."""
    visit = int(tree.turn_visit[loop.turns[0]])
    start = int(np.searchsorted(tree.visit_row, _entry(tree, 0, visit, loop.node)))
    if loop.low < 0:
        return int(tree.visit_row[start])
    paths = tree.paths_of(tree.visit_node[start : visit + 1])
    children = paths[:, loop.depth + 1]
    lines = tree.lines_of(children)
    inside = np.flatnonzero((lines >= loop.low) & (lines <= loop.high))
    return (
        int(tree.visit_row[start + int(inside[0])]) if len(inside) else int(tree.visit_row[start])
    )


def _busiest(trace: Trace, tree: CallTree) -> _Loop | None:
    """Return the outermost loop with enough iterations that covers enough of the trace.

    A loop of a handful of iterations gives way to an inner one with more, as epochs do to steps.
    """
    loops = _loops(tree)
    n_allocs = np.cumsum(trace.events.action == Action.ALLOC)
    total = int(n_allocs[-1])
    wide: list[tuple[int, int, int, _Loop]] = []
    for loop in loops:
        if len(loop.turns) < MIN_STEPS - 1:
            continue
        at = tree.turn_row[loop.turns]
        covered = int(n_allocs[at[-1]] - n_allocs[at[0]])
        visits = np.diff(tree.turn_visit[loop.turns])
        is_even = float(visits.std()) <= MAX_SPREAD * float(visits.mean())
        if covered * 2 >= total and np.median(visits) >= 2 and is_even:
            wide.append((loop.depth, loop.low, len(loop.turns) + 1, loop))
    wide.sort(key=lambda w: w[:2])
    many = [w for w in wide if w[2] >= ENOUGH_STEPS]
    chosen = many or wide
    return chosen[0][3] if chosen else None


def _single(trace: Trace, *, has_calls: bool) -> Steps:
    """Return the one step of a program that failed in its first forward pass; else none."""
    if not (has_calls and trace.ends_in_failure):
        return NO_STEPS
    events, roles = trace.events, trace.stacks.roles
    is_alloc = events.action == Action.ALLOC
    called = np.flatnonzero(is_alloc & roles.in_module[events.stack])
    built = np.flatnonzero(is_alloc & roles.makes_model[events.stack])
    built = built[built < called[0]]
    after = int(built[-1]) + 1 if len(built) else 0
    row = int(np.flatnonzero(is_alloc[after:])[0]) + after
    return _steps([(row, StepKind.TRAIN)], [], "stacks", is_complete=False)


# ---- without stacks ----------------------------------------------------------------------------


def _by_size(trace: Trace) -> Steps:
    """Return the allocations of the rarest size that returns at even distances."""
    lives = trace.lives
    born = slice(lives.n_initial, lives.n_regular)
    rows, size = lives.start[born].astype(np.int64), lives.requested_bytes[born]
    if not len(rows):
        return NO_STEPS
    _, member, count = np.unique(size, return_inverse=True, return_counts=True)
    order = np.argsort(member.reshape(-1), kind="stable")
    ends = np.cumsum(count)
    candidates = np.flatnonzero(count >= MIN_STEPS)
    best: I64 | None = None
    for c in candidates[np.argsort(count[candidates], kind="stable")][:200].tolist():
        at = rows[order[ends[c] - count[c] : ends[c]]]
        gaps = np.diff(at)
        spread = float(gaps.std() / max(1.0, gaps.mean()))
        covered = (at[-1] - at[0] + gaps.mean()) / max(1, trace.n_events)
        if covered < 0.5 or spread > 0.35 or gaps.mean() < 4:
            continue
        if best is None or len(at) < len(best):
            best = at
    if best is None:
        return NO_STEPS
    return _steps(
        [(int(r), StepKind.OTHER) for r in best],
        [],
        "sizes",
        is_complete=not trace.ends_in_failure,
    )
