"""The training steps of a program, found between its backward passes.

What lies between two backward passes decides: if the code that both have in common turned back
meanwhile, a new step has begun; if it only went on (the other network of a GAN), the step goes on.
Passes without an optimizer step after them belong to the same step (gradient accumulation), and so
do those whose gradients are themselves differentiated (the inner updates of MAML). A loop
around a loop of updates is the step if its iterations begin with passes of their own (rollouts,
then updates) or train something else as well (a critic); epochs are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from fragdoctor.frozen import frozen
from fragdoctor.model.arrays import distinct, is_among
from fragdoctor.model.snapshot import I32, I64, Action, Bools
from fragdoctor.trace import stacks
from fragdoctor.trace.call_tree import CallTree, Loop
from fragdoctor.trace.lives import NEVER
from fragdoctor.trace.passes import RoleRuns
from fragdoctor.trace.trace import Trace

MAX_UNEVEN: Final = 4
"""A group of passes is no longer than so many usual ones: else its end was not seen."""

MAX_LOOPS: Final = 50
"""Loops that may be nested in each other, of those with most turns."""

MAX_NESTED: Final = 5
"""Lines that loops from one line may turn at, from the outermost."""

MIN_LOOPED: Final = 0.9
"""Share of the steps in which a loop at their beginning shows."""

NO_TURN: Final = -1


@frozen
class TrainingSteps:
    """Rows at which training steps begin, and further passes of a step.

    ``is_last_complete``: the last one has come to its end in the trace.
    """

    rows: list[int]
    micro_rows: list[int]
    is_last_complete: bool


def find_training_steps(trace: Trace, runs: RoleRuns, tree: CallTree) -> TrainingSteps:
    """Return the steps of a program that shows backward passes."""
    return _Search(trace, runs, tree).steps()


class _Search:
    """A unit is a backward pass with what belongs to it; gap j lies between the units j and j + 1.

    ``cuts`` has the gaps in which a step begins, each with the turn of a loop that begins it.
    """

    def __init__(self, trace: Trace, runs: RoleRuns, tree: CallTree) -> None:
        self.trace, self.runs, self.tree = trace, runs, tree
        ends = np.append(runs.first[1:], trace.n_events)
        is_unit = runs.label == stacks.BACKWARD
        self.begin, self.end = runs.first[is_unit], ends[is_unit]
        self.n = len(self.begin)
        self.visit = tree.visit_at(self.begin)
        place = np.where(self.visit >= 0, tree.visit_node[np.maximum(self.visit, 0)], 0)
        self.place = place.astype(np.int32)
        self.path = tree.paths_of(self.place)
        self.loops = tree.loops
        self.cuts: dict[int, int] = {}
        self._held: dict[tuple[int, ...], Bools] = {}

    def steps(self) -> TrainingSteps:
        closes = self._closing()
        self._cut_where_loops_turn(closes)
        self._cut_elsewhere(closes)
        self._keep_outer_steps()
        starts = {j + 1: self._row_of_cut(j) for j in self.cuts}
        first = self._first_start()
        if first is not None:
            starts[0] = first
        tail = self._tail(bool(closes[-1]))
        further = self.tree.turn_row[[*self._turns_without_pass(tail), *tail[:1]]]
        rows = [*starts.values(), *further.tolist()]
        micro = [self._start_of_unit(j) for j in range(1, self.n) if j not in starts]
        return TrainingSteps(sorted(rows), micro, bool(closes[-1]) and not tail)

    # ---- which gaps can end a step -------------------------------------------------------------

    def _closing(self) -> Bools:
        """Return for each unit whether a step can end after it."""
        optimizer = self.runs.first[self.runs.label == stacks.OPTIMIZER]
        edges = np.append(self.begin, self.trace.n_events)
        has_step: Bools = np.diff(np.searchsorted(optimizer, edges)) > 0
        inner = has_step[:-1]
        if not len(inner) or np.count_nonzero(inner) >= 0.9 * len(inner):
            return has_step if has_step.any() else ~self._keeps_graph()
        if self._is_regular(has_step):
            return has_step
        crossing = self._frees_gradients()
        if self._is_regular(crossing):
            return crossing
        return has_step | ~self._keeps_graph()

    def _is_regular(self, closes: Bools) -> bool:
        """Return whether units close in groups of about one size, as gradients are accumulated."""
        at = np.flatnonzero(closes)
        if not len(at) or at[0] == 0:
            return False
        sizes = np.diff(at)
        size = int(np.median(sizes)) if len(sizes) else int(at[0]) + 1
        longest = max(int(at[0]) + 1, self.n - int(at[-1]), int(sizes.max(initial=0)))
        return size >= 2 and longest <= MAX_UNEVEN * size

    def _frees_gradients(self) -> Bools:
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

    def _keeps_graph(self) -> Bools:
        """Return after which units most of what modules made for them is still there.

        So it is where ``torch.autograd.grad`` makes gradients that another pass goes through.
        Without an optimizer's step no more is asked: a backward pass that fills in ``grad`` and
        keeps its graph is one that leaks.
        """
        lives, roles = self.trace.lives, self.trace.stacks.roles
        by_grad = np.append(0, np.cumsum(roles.in_grad[self.trace.events.stack]))
        is_asked = by_grad[self.end] > by_grad[self.begin]
        unit = np.searchsorted(self.begin, lives.start, side="right")
        made = np.flatnonzero(roles.in_module[lives.stack] & (lives.start >= 0) & (unit < self.n))
        made = made[lives.free[made] >= self.begin[unit[made]]]
        left = made[lives.free[made] >= self.end[unit[made]]]
        before, behind = (
            np.bincount(unit[of], lives.size_bytes[of], self.n) for of in (made, left)
        )
        result: Bools = is_asked & (behind > 0.5 * before)
        return result

    # ---- where loops turned between units --------------------------------------------------------

    def _cut_where_loops_turn(self, closes: Bools) -> None:
        """Cut at the first turn of the outermost loop around the units on both sides of a gap."""
        tree = self.tree
        if not len(tree.turn_visit) or self.n < 2:
            return
        gap = np.searchsorted(self.visit, tree.turn_visit, side="left") - 1
        depth = tree.depth[tree.turn_node]
        turn = np.flatnonzero((gap >= 0) & (gap < self.n - 1) & (depth + 1 < self.path.shape[1]))
        turn = turn[closes[gap[turn]]]
        j, d, node = gap[turn], depth[turn], tree.turn_node[turn]
        is_around = (self.path[j, d] == node) & (self.path[j + 1, d] == node)
        is_around &= self._leads_to(turn, self.path[j, d + 1])
        is_around &= self._leads_to(turn, self.path[j + 1, d + 1])
        turn, j, d = turn[is_around], j[is_around], d[is_around]
        order = np.lexsort((turn, d, j))
        firsts = order[np.append(True, np.diff(j[order]) > 0)] if len(order) else order
        self.cuts = dict(zip(j[firsts].tolist(), turn[firsts].tolist(), strict=True))

    def _leads_to(self, turns: I64, children: I32) -> Bools:
        """Return whether each turn goes to a line at or before the one that a unit is in."""
        tree = self.tree
        target = tree.turn_target[turns]
        differs = tree.functions_of(target) != tree.functions_of(children)
        result: Bools = differs | (tree.lines_of(target) <= tree.lines_of(children))
        return result

    def _cut_elsewhere(self, closes: Bools) -> None:
        """Cut gaps without a turn: the same code again, another loop, or a turn that was lost.

        Within one iteration of a loop units are of one step (the networks of a GAN take turns).
        """
        gaps = [j for j in np.flatnonzero(closes[:-1]).tolist() if j not in self.cuts]
        self.cuts |= {j: NO_TURN for j in gaps if self.place[j] == self.place[j + 1]}
        gaps = [j for j in gaps if j not in self.cuts]
        loops = self._loops_of_cuts()
        within, inside = np.zeros((2, self.n), np.bool_)
        for i in loops:
            held = self._holds(self.loops[i])
            inside |= held
            within[:-1] |= held[:-1] & held[1:]
        site = self.tree.innermost_frames(self.path)
        opening = self._openers() if self.trace.is_late else set()
        for j in gaps:
            is_elsewhere = not within[j] and (site[j] == site[j + 1] or inside[j])
            if is_elsewhere or int(self.place[j + 1]) in opening:
                self.cuts[j] = NO_TURN

    def _openers(self) -> set[int]:
        """Return the places of units that always are the first of their step, once steps show.

        A recording that began within an iteration lacks what the loop's first turn went back to.
        """
        if not self.cuts:
            return set()
        since = min(self.cuts)
        places = self.place[since + 1 :].tolist()
        others = {p for j, p in enumerate(places, since) if j not in self.cuts}
        return set(places) - others

    def _loops_of_cuts(self) -> list[int]:
        """Return the loops whose turns begin steps; those with most cuts if there are too many."""
        turns = np.array([t for t in self.cuts.values() if t != NO_TURN], np.int64)
        loops, count = np.unique(self.tree.loop_of_turn[turns], return_counts=True)
        return sorted(loops[np.argsort(-count, kind="stable")][:MAX_LOOPS].tolist())

    def _holds(self, loop: Loop) -> Bools:
        """Return which units are in the body of a loop."""
        key = (loop.node, loop.function, loop.low, loop.high)
        if key not in self._held:
            self._held[key] = loop.holds(self.tree, self.path)
        return self._held[key]

    # ---- loops of updates that are part of a step ------------------------------------------------

    def _keep_outer_steps(self) -> None:
        """Remove cuts of loops inside a step: a critic's, or updates after rollouts."""
        for outer, inner, mine, theirs in (*self._nested(), *self._nested_from_one_line()):
            if not (mine and theirs):
                continue
            if self._trains_more(outer, inner, len(mine)) or self._begins_with_passes(
                outer, mine, theirs
            ):
                for j in theirs:
                    del self.cuts[j]
                return

    def _nested(self) -> Iterator[tuple[Loop, list[Loop], list[int], list[int]]]:
        """Yield loops of cuts with those inside of them, and the gaps that each of both cuts."""
        loops = self._loops_of_cuts()
        of_cut = {j: self._loop_of(t) for j, t in self.cuts.items() if t != NO_TURN}
        for outer in loops:
            inner = [i for i in loops if i != outer and self._encloses(outer, i)]
            mine = [j for j, i in of_cut.items() if i == outer]
            theirs = [j for j, i in of_cut.items() if i in inner]
            yield self.loops[outer], [self.loops[i] for i in inner], mine, theirs

    def _nested_from_one_line(self) -> Iterator[tuple[Loop, list[Loop], list[int], list[int]]]:
        """Yield the same of loops that begin at one line, told apart by where they turn."""
        tree = self.tree
        for i in self._loops_of_cuts():
            loop = self.loops[i]
            gaps = [j for j, t in self.cuts.items() if t != NO_TURN and self._loop_of(t) == i]
            source = tree.lines_of(tree.turn_source[[self.cuts[j] for j in gaps]])
            for line in distinct(source)[-2::-1][:MAX_NESTED].tolist() if loop.low >= 0 else ():
                mine = [j for j, at in zip(gaps, source.tolist(), strict=True) if at > line]
                theirs = [j for j, at in zip(gaps, source.tolist(), strict=True) if at <= line]
                yield loop, [replace(loop, high=line)], mine, theirs

    def _loop_of(self, turn: int) -> int:
        return int(self.tree.loop_of_turn[turn])

    def _encloses(self, outer: int, inner: int) -> bool:
        return self.loops[outer].encloses(self.tree, self.loops[inner])

    def _trains_more(self, outer: Loop, inner: list[Loop], n_turns: int) -> bool:
        """Return whether most iterations go on to other training after an inner loop."""
        held = self._holds(outer)
        goes_on = held[:-1] & held[1:]
        goes_on[list(self.cuts)] = False
        changes = np.zeros(self.n - 1, np.bool_)
        for loop in inner:
            changes |= np.diff(self._holds(loop))
        return int(np.count_nonzero(goes_on & changes)) >= max(1, n_turns // 2)

    def _begins_with_passes(self, outer: Loop, mine: list[int], theirs: list[int]) -> bool:
        """Return whether iterations begin with many more passes than a single update needs."""
        if len(mine) < 2 or len(theirs) < len(mine):
            return False
        first = self._first_start(outer)
        usual = float(np.median(self._n_calls(theirs)))
        if first is None or usual <= 0:
            return False
        ours = self._n_calls(mine)
        before_first = self._n_module_rows(np.array([first]), self.begin[:1])[0]
        enough = np.count_nonzero(ours >= 2 * usual) >= 0.8 * len(ours)
        return bool(np.median(ours) >= 2.5 * usual and enough and before_first >= 2 * usual)

    def _n_calls(self, gaps: list[int]) -> I64:
        """Return how much modules' calls allocate from the cut in each gap to the next unit."""
        rows = np.array([self._row_of_cut(j) for j in gaps], np.int64)
        return self._n_module_rows(rows, self.begin[np.array(gaps) + 1])

    def _n_module_rows(self, low: I64, high: I64) -> I64:
        rows = self.trace.module_rows
        return np.searchsorted(rows, high) - np.searchsorted(rows, low)

    # ---- iterations without a backward pass ------------------------------------------------------

    def _tail(self, is_closed: bool) -> list[int]:
        """Return the turns at which iterations begin after the last backward pass."""
        tree, last = self.tree, self.n - 1
        if not is_closed or self.visit[last] < 0:
            return []
        used = self._loops_of_cuts()
        later = np.flatnonzero(tree.turn_visit > self.visit[last])
        found, at = np.unique(tree.loop_of_turn[later], return_index=True)
        for i in found[np.argsort(at)].tolist():
            is_step = not used or i in used or any(self._encloses(i, k) for k in used)
            if is_step and self._holds(self.loops[i])[last]:
                found_turns: list[int] = later[tree.loop_of_turn[later] == i].tolist()
                return found_turns
        return []

    def _turns_without_pass(self, tail: list[int]) -> list[int]:
        """Return the turns of further iterations in the gaps (a batch that was left out).

        They turn from where steps turn. Those from elsewhere are a loop that begins at the same
        line as the steps (rollouts), if nearly all steps have some, or many.
        """
        begun = [t for t in self.cuts.values() if t != NO_TURN]
        usual = distinct(self.tree.turn_source[[*begun, *tail[:1]]])
        behind = np.array(tail[1:], np.int64)
        is_usual = is_among(self.tree.turn_source[behind], usual)
        same: list[int] = behind[is_usual].tolist()
        elsewhere: list[int] = behind[~is_usual].tolist()
        other: list[int] = []
        n_gaps = 0
        for j, turn in self.cuts.items():
            if turn == NO_TURN:
                continue
            mine = self.loops[self._loop_of(turn)].turns
            low = int(np.searchsorted(mine, turn, side="right"))
            further = mine[low:][self.tree.turn_visit[mine[low:]] <= self.visit[j + 1]]
            is_usual = is_among(self.tree.turn_source[further], usual)
            same = same + further[is_usual].tolist()
            other += further[~is_usual].tolist()
            n_gaps += not is_usual.all()
        if n_gaps >= MIN_LOOPED * len(begun) or len(other) > len(begun):
            return same
        return same + other + elsewhere

    # ---- where steps begin -----------------------------------------------------------------------

    def _row_of_cut(self, j: int) -> int:
        """Return the row at which the step after a gap begins."""
        tree, turn = self.tree, self.cuts[j]
        if turn == NO_TURN:
            return self._start_of_unit(j + 1)
        row = int(tree.turn_row[turn])
        if not self.trace.is_late or self.loops[self._loop_of(turn)].low >= 0:
            return row
        # The recording began in the middle of an iteration, so that a call seen again need not be
        # the first of its iteration.
        ends = np.append(self.runs.first[1:], self.trace.n_events)
        ends = ends[self.runs.label != stacks.FORWARD]
        at = int(np.searchsorted(ends, self.begin[j + 1], side="right")) - 1
        visit = int(np.searchsorted(tree.visit_row, ends[at])) if at >= 0 else 0
        return min(row, int(tree.visit_row[visit]))

    def _start_of_unit(self, j: int) -> int:
        """Return the row at which the forward pass before a backward pass begins."""
        before = int(np.searchsorted(self.runs.first, self.begin[j])) - 1
        if before >= 0 and self.runs.label[before] == stacks.FORWARD:
            return int(self.runs.first[before])
        return int(self.begin[j])

    def _first_start(self, only: Loop | None = None) -> int | None:
        """Return the row at which the first step begins; None where its beginning is lost.

        The innermost loop of steps around the first unit says so, or the one that is given.
        """
        tree = self.tree
        loops = [self.loops[i] for i in self._loops_of_cuts()] if only is None else [only]
        around = [loop for loop in loops if self._holds(loop)[0]]
        if not around or self.visit[0] < 0:
            return self._start_after_setup()
        loop = max(around, key=lambda k: (k.depth, k.low))
        paths = tree.paths_of(tree.visit_node[: int(self.visit[0]) + 1])
        outside = np.flatnonzero(~loop.holds(tree, paths))
        start = int(outside[-1]) + 1 if len(outside) else 0
        if start == 0 and self.trace.is_late:
            usual = tree.turn_target[loop.turns]
            if not np.isin(paths[0, loop.depth + 1], usual):
                return None  # the beginning of the step was lost, or came before the recording
        row = int(tree.visit_row[start])
        # A loop without lines holds all that its line calls, the making of the model included.
        return row if loop.low >= 0 else max(row, min(after_setup(self.trace), int(self.begin[0])))

    def _start_after_setup(self) -> int | None:
        """Return where a step begins that no loop encloses: after the model was made."""
        if self.trace.is_late and (self.visit[0] < 0 or not self._starts_at_rest()):
            return None
        return min(after_setup(self.trace), int(self.begin[0]))

    def _starts_at_rest(self) -> bool:
        """Return whether the recording began between two steps, with little memory in use."""
        lowest = self.trace.totals.envelope("allocated_bytes", [0]).low[0]
        return bool(self.trace.facts["initial_allocated_bytes"] <= 1.02 * lowest)


def after_setup(trace: Trace) -> int:
    """Return the first row that allocates after the model was made; the number of rows without."""
    is_alloc = trace.events.action == Action.ALLOC
    built = np.flatnonzero(is_alloc & trace.stacks.roles.makes_model[trace.events.stack])
    called = trace.module_rows
    if len(called):
        built = built[built < called[0]]
    after = int(built[-1]) + 1 if len(built) else 0
    later = np.flatnonzero(is_alloc[after:])
    return after + int(later[0]) if len(later) else trace.n_events
