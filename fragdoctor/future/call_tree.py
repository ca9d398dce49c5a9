"""The call tree of a program as its trace walks through it, and the loops that turn in it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from fragdoctor._native import _ext
from fragdoctor.frozen import frozen
from fragdoctor.model.arrays import distinct
from fragdoctor.model.snapshot import I32, I64, U8, Action, Bools, Snapshot
from fragdoctor.trace.stacks import NATIVE, TORCH
from fragdoctor.trace.trace import Trace

MAX_DEPTH: Final = 96
"""Frames of a path that are looked at."""

_OPEN, _CLOSED, _SKIPPED = 0, 1, 2
# Torch's decorators and launchers: the program goes on below them.
_TRANSPARENT: Final = re.compile(
    r"[/\\]torch[/\\](?:utils[/\\]_contextlib|amp[/\\]autocast_mode|cuda[/\\]amp[/\\]autocast_mode"
    r"|_dynamo[/\\](?:eval_frame|external_utils)|autograd[/\\]grad_mode|_compile"
    r"|multiprocessing[/\\]spawn|distributed[/\\]\w+"
    r"|distributed[/\\]elastic[/\\].*)\.py$"
)
# An optimizer may call the program back (a closure), and its loops show.
_OPTIMIZERS: Final = re.compile(r"[/\\]torch[/\\]optim[/\\]\w+\.py$")


@frozen
class Loop:
    """A loop of the program: the node it is in, and which of its lines it goes over.

    Attributes:
        node, depth: the node, and how deep it is in the tree.
        function: that the loop's line is in.
        low, high: the line that it turns to and the last line that it turned from; -1 where its
            parts are different functions called by one line.
        turns: ``int64[k]``, indices into the turns of the tree.
    """

    node: int
    depth: int
    function: int
    low: int
    high: int
    turns: I64

    def holds(self, tree: CallTree, paths: I32) -> Bools:
        """Return which paths are in the body of the loop."""
        if self.depth + 1 >= paths.shape[1]:
            return np.zeros(len(paths), np.bool_)
        result: Bools = paths[:, self.depth] == self.node
        if self.low < 0:
            return result
        child = paths[:, self.depth + 1]
        line = tree.lines_of(child)
        is_inside = (self.low <= line) & (line <= self.high)
        result &= is_inside | (tree.functions_of(child) != self.function)
        return result


@dataclass(frozen=True)
class CallTree:
    """Places in the call tree, the visits to them in order, and the turns of loops.

    Attributes:
        parent, frame: ``int32[n]``, of each node; node 0 is the root. A frame of -1 is code of the
            parent's own line.
        visit_row, visit_node: ``int32[v]``, event row at which each visit begins, and its place.
        turn_visit, turn_node, turn_target, turn_source: ``int32[t]``: at a visit the loop in a node
            begins again, with one of its children, after another.
        function, line: of each frame: functions have numbers; lines beyond 2**31 are cut.
    """

    parent: I32
    frame: I32
    visit_row: I32
    visit_node: I32
    turn_visit: I32
    turn_node: I32
    turn_target: I32
    turn_source: I32
    function: I32
    line: I64

    @classmethod
    def of(cls, trace: Trace) -> CallTree | None:
        """Return the tree of a trace; None where its allocations have no Python stacks."""
        snapshot = trace.snapshot
        # What an iteration leaves behind is freed at its end or in the next one: frees mislead.
        action = trace.events.action
        rows = np.flatnonzero((action == Action.ALLOC) | (action == Action.OOM))
        stack = trace.events.stack[rows]
        function = _functions(snapshot)
        kind = _frame_kinds(snapshot, trace.stacks.classes)
        root = _main_function(snapshot, kind, function, stack)
        if root < 0:
            return None
        table, frames = snapshot.stacks, snapshot.frames
        raw = _ext.call_tree(
            stack=stack,
            offsets=table.offsets,
            stack_frames=table.frames,
            frame_kind=kind,
            function=function,
            line=frames.line,
            root=root,
            max_depth=MAX_DEPTH,
        )
        raw["visit_row"] = rows[raw.pop("visit_event")].astype(np.int32)
        line = np.minimum(frames.line, np.uint64(2**31)).astype(np.int64)
        return cls(**raw, function=function, line=line)

    @cached_property
    def depth(self) -> I32:
        """``int32[n]``: of each node, 0 for the root."""
        result = np.zeros(len(self.parent), np.int32)
        for node in range(1, len(self.parent)):  # a child comes after its parent
            result[node] = result[self.parent[node]] + 1
        return result

    @cached_property
    def turn_row(self) -> I64:
        """``int64[t]``: event row at which each loop begins again."""
        return self.visit_row[self.turn_visit].astype(np.int64)

    def paths_of(self, nodes: I32) -> I32:
        """Return ``int32[k, depth]``: the path from the root to each node, -1 behind its end."""
        depth = self.depth[nodes]
        paths = np.full((len(nodes), int(depth.max(initial=0)) + 2), -1, np.int32)
        at = nodes.copy()
        going = np.arange(len(nodes))
        while len(going):
            paths[going, self.depth[at[going]]] = at[going]
            going = going[at[going] > 0]
            at[going] = self.parent[at[going]]
        return paths

    def lines_of(self, nodes: I32) -> I64:
        """Return the line of each node, -1 for the root, for none, and for own code of a line."""
        frame = np.where(nodes >= 0, self.frame[nodes], -1)
        return np.where(frame >= 0, self.line[frame], -1)

    def functions_of(self, nodes: I32) -> I32:
        """Return the function of each node; -1 as in ``lines_of``."""
        frame = np.where(nodes >= 0, self.frame[nodes], -1)
        return np.where(frame >= 0, self.function[frame], np.int32(-1))

    @cached_property
    def loops(self) -> list[Loop]:
        """The loops that turn anywhere, by node and the line they turn to."""
        return _loops(self)

    def visit_at(self, rows: npt.ArrayLike) -> I64:
        """Return the visit that each event row falls into, -1 before the first."""
        return np.searchsorted(self.visit_row, rows, side="right").astype(np.int64) - 1


def _loops(tree: CallTree) -> list[Loop]:
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
            Loop(
                node,
                int(tree.depth[node]),
                int(function[i]),
                int(low[i]) if is_lines else -1,
                high if is_lines else -1,
                turns,
            )
        )
    return _with_nested(loops)


def _with_nested(loops: list[Loop]) -> list[Loop]:
    """Return the loops, each reaching as far as those that begin in it."""
    highest = [loop.high for loop in loops]
    groups: dict[tuple[int, int], list[int]] = {}
    for i, loop in enumerate(loops):
        if loop.low >= 0:
            groups.setdefault((loop.node, loop.function), []).append(i)
    for members in groups.values():
        behind: list[int] = []  # those that begin later and in none other, the nearest last
        for i in sorted(members, key=lambda i: -loops[i].low):
            while behind and loops[behind[-1]].low <= highest[i]:
                highest[i] = max(highest[i], highest[behind.pop()])
            behind.append(i)
    return [replace(loop, high=high) for loop, high in zip(loops, highest, strict=True)]


def _functions(snapshot: Snapshot) -> I32:
    """Return a number for each frame, the same for frames of one function."""
    frames = snapshot.frames
    key = frames.filename.astype(np.int64) * (len(snapshot.strings) + 1) + frames.name
    function: I32 = np.unique(key, return_inverse=True)[1].reshape(-1).astype(np.int32)
    return function


def _frame_kinds(snapshot: Snapshot, classes: U8) -> U8:
    """Return what each frame means for a path."""
    kind = np.full(len(classes), _OPEN, np.uint8)
    kind[classes == TORCH] = _CLOSED
    kind[classes == NATIVE] = _SKIPPED
    filename = snapshot.frames.filename
    for i in distinct(filename[classes == TORCH]).tolist():
        name = snapshot.strings[i][:1000] if i >= 0 else ""
        if _TRANSPARENT.search(name):
            kind[filename == i] = _SKIPPED
        elif _OPTIMIZERS.search(name):
            kind[filename == i] = _OPEN
    return kind


def _main_function(snapshot: Snapshot, kind: U8, function: I32, stack: I32) -> int:
    """Return the outermost function of most events: that of the main thread; -1 without any."""
    offsets, frames = snapshot.stacks.offsets, snapshot.stacks.frames
    seen = np.flatnonzero(kind[frames] != _SKIPPED)
    if not len(seen):
        return -1
    at = seen[np.maximum(np.searchsorted(seen, offsets[1:]) - 1, 0)]
    inside: Bools = (at >= offsets[:-1]) & (at < offsets[1:])
    outermost = np.where(inside, frames[at], -1)
    of_event = outermost[stack[stack >= 0]]
    of_event = of_event[of_event >= 0]
    # Calls that come back from the autograd engine begin in torch.
    of_event = of_event[kind[of_event] == _OPEN]
    if not len(of_event):
        return -1
    return int(np.bincount(function[of_event]).argmax())
