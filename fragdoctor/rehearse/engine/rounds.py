"""Rounds of the loops in the user's own code: how often each has begun, and which are its steps.

The code is compiled from its source with one addition: what a ``for`` goes through, and what a
``while`` asks, is counted. Lines, names and the lives of tensors stay as they are.
"""

from __future__ import annotations

import ast
import builtins
import dis
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import SourceFileLoader
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, Self
from weakref import WeakSet

import torch

from fragdoctor.rehearse.engine import put
from fragdoctor.rehearse.engine.memory_history import ENGINE, is_users
from fragdoctor.rehearse.engine.skipping import (
    WAIT_S,
    Passage,
    Round,
    Skipping,
    Source,
    is_on_gpu,
    n_remaining,
    no_length,
    source_of,
)

_FOR, _END, _BEGIN = "__fragdoctor_for__", "__fragdoctor_end__", "__fragdoctor_begin__"
_SKIPPED, _ADVANCED = "__fragdoctor_skipped__", "__fragdoctor_advanced__"
_to_code: Any = SourceFileLoader.source_to_code  # takes a tree too
_OWN: Final = (str(Path(torch.__file__).parent), ENGINE)


@dataclass(slots=True, eq=False)
class LoopPlace:
    """A loop of the program's source, and how far it is.

    Attributes:
        first, last: its lines.
        is_of_epochs: it counts epochs, by the name of its variable.
        n_begun: rounds that have begun.
        is_between: the next round has not begun yet: its data is being made.
        products_at_entry: matrix products of the whole run when the loop was entered.
        products_at_round: and when its last round began.
        is_of_optimizers: it goes through optimizers: each of its rounds calls others than the
            rounds before it, since the loop was entered, and each of them once.
        source: what its source says about its rounds.
        passage: how far it is since it was entered last.
    """

    first: int
    last: int
    is_of_epochs: bool
    n_begun: int = 0
    is_between: bool = True
    products_at_entry: int = 0
    products_at_round: int = 0
    is_of_optimizers: bool = False
    source: Source = field(default_factory=Source)
    passage: Passage | None = None
    _seen: set[Round] = field(default_factory=set)
    _has_skipped: bool = False
    _before: set[int] = field(default_factory=set)
    _in_round: set[int] = field(default_factory=set)
    _has_repeated: bool = False

    def enter(self, n_products: int) -> None:
        """Note that the loop is entered."""
        self.products_at_entry = n_products
        self._has_skipped |= self.passage is not None and self.passage.has_skipped
        self.passage = Passage(self.source, self._seen, has_skipped=self._has_skipped)
        self._before.clear()
        self._in_round.clear()

    def begin(self, n_products: int) -> None:
        """Note that a round begins."""
        self.is_between = False
        self.n_begun += 1
        self.products_at_round = n_products
        self._before |= self._in_round
        self._in_round.clear()

    def note(self, optimizer: int) -> bool:
        """Note that an optimizer is called in this round; whether that says what the loop is."""
        was_of_optimizers = self.is_of_optimizers
        self._has_repeated |= optimizer in self._before or optimizer in self._in_round
        self._in_round.add(optimizer)
        self.is_of_optimizers = not self._has_repeated and (was_of_optimizers or bool(self._before))
        return self.is_of_optimizers is not was_of_optimizers

    @property
    def n_complete(self) -> int:
        """Rounds that are over, seen from inside of the loop."""
        return self.n_begun - (not self.is_between)


_Nest = tuple[LoopPlace, ...]  # loops within loops, the outermost first


class _Items(Iterator[Any]):
    """What a ``for`` goes through; it holds no item, so that each dies when it always did."""

    __slots__ = ("_items", "_iterator", "_next", "_passage", "_place", "_rounds")

    def __init__(self, rounds: Rounds, place: LoopPlace, items: Iterable[Any]) -> None:
        self._items = items
        self._iterator = iter(items)
        self._next = self._iterator.__next__
        self._rounds, self._place = rounds, place
        place.enter(rounds.n_products)
        self._passage = place.passage

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        rounds, place = self._rounds, self._place
        is_over = not place.is_between
        rounds.end(place)
        skipping, passage = rounds.skipping, self._passage
        if not is_over or passage is None or not skipping.is_on:
            item = self._next()
        else:
            n = skipping.rounds_to_skip(
                passage, self._n_remaining, is_of_steps=rounds.is_of_steps(place)
            )
            item = self._next() if n == 0 else self._after(n, passage)
        rounds.begin(place)
        return item

    def _n_remaining(self) -> int | None:
        passage = self._passage
        n_taken = 0 if passage is None else passage.n_rounds
        return n_remaining(self._iterator, self._items, n_taken)

    def _after(self, n: int | None, passage: Passage) -> Any:
        """Return the item after some that nobody sees; with None the last one, if it can be kept.

        Raises:
            StopIteration: there is none.
        """
        skipping, begun = self._rounds.skipping, time.monotonic()
        n_gone = 0
        kept: list[Any] = []
        skipping.is_jumping = True
        try:
            while n is None or n_gone < n:
                if time.monotonic() - begun > WAIT_S:
                    skipping.partial = skipping.partial or (
                        f"items of the loop at line {self._place.first} were jumped over for "
                        f"{WAIT_S:.0f} s, and there are more"
                    )
                    skipping.on_stuck(skipping.partial)
                    break
                try:
                    item = self._next()
                except StopIteration:
                    if not kept:
                        raise
                    n_gone -= 1
                    return kept.pop()
                n_gone += 1
                if n is None:
                    kept[:] = [] if is_on_gpu(item) else [item]
                del item
        finally:
            skipping.is_jumping = False
            self._place.n_begun += n_gone
            if n is None:
                passage.to_skip += n_gone
                passage.n_rounds += n_gone
                skipping.note(sys._getframe(2), n_gone)
        return self._next()


class _Counting(ast.NodeTransformer):
    """Adds the counting to the loops of a file."""

    def __init__(self, first_number: int) -> None:
        self._first_number = first_number
        self.places: list[LoopPlace] = []

    def visit_For(self, node: ast.For) -> ast.For:
        number = self._place(node, _names(node.target))
        self.generic_visit(node)
        node.iter = _call(_FOR, node.iter, number, node.iter)
        self._advance(node, number)
        return node

    def visit_While(self, node: ast.While) -> ast.While:
        number = self._place(node, _names(node.test))
        self.generic_visit(node)
        asked = [_call(_END, node.test, number), node.test, _call(_BEGIN, node.test, number)]
        node.test = ast.copy_location(ast.BoolOp(ast.And(), asked), node.test)
        self._advance(node, number)
        return node

    def _advance(self, node: ast.For | ast.While, number: int) -> None:
        """Let each round begin with counters that are where rounds jumped over would bring them."""
        counters = self.places[number - self._first_number].source.counters
        if not counters:
            return
        like, changes = node.body[0], []
        for i, counter in enumerate(counters):
            target: Any = ast.parse(f"{ast.unparse(counter)} = 0").body[0]
            target.value = ast.Call(
                ast.Name(_ADVANCED, ast.Load()),
                [ast.Constant(number), ast.Constant(i), counter],
                [],
            )
            changes.append(target)
        test = ast.Call(ast.Name(_SKIPPED, ast.Load()), [ast.Constant(number)], [])
        added = ast.copy_location(ast.If(test, changes, []), like)
        for part in ast.walk(added):
            ast.copy_location(part, like)
        node.body.insert(0, ast.fix_missing_locations(added))

    def _place(self, node: ast.For | ast.While, names: Iterable[str]) -> int:
        is_of_epochs = any("epoch" in name.lower() or name == "ep" for name in names)
        last = node.end_lineno or node.lineno
        self.places.append(LoopPlace(node.lineno, last, is_of_epochs, source=source_of(node)))
        return self._first_number + len(self.places) - 1


def _names(node: ast.expr) -> Iterator[str]:
    return (part.id for part in ast.walk(node) if isinstance(part, ast.Name))


def _call(name: str, like: ast.expr, number: int, *more: ast.expr) -> ast.expr:
    called = ast.Call(ast.Name(name, ast.Load()), [ast.Constant(number), *more], [])
    return ast.fix_missing_locations(ast.copy_location(called, like))


@dataclass(slots=True)
class Rounds:
    """Counts the rounds of all loops, and knows in which of them the program takes its steps.

    A step is a round of the innermost loop in which all optimizers are called. It is a round of a
    loop around that one, if such a round computes as much before it comes to the inner loop: what
    reinforcement learning does between its updates. Epochs are no steps, unless nothing else is.
    Neither are rounds of a loop through optimizers. While one has not been called yet, the first
    round of the outermost loop may still come to it: then no loop within is taken for one of steps.

    Attributes:
        n_products: matrix products so far.
        uncalled: optimizers that were made and not called yet.
        on_end: called when a step is over.
        on_begin: called when the next one begins.
        skipping: decides which rounds are jumped over.
    """

    n_products: int = 0
    uncalled: WeakSet[Any] = field(default_factory=WeakSet)
    on_end: Callable[[], None] = lambda: None
    on_begin: Callable[[], None] = lambda: None
    skipping: Skipping = field(default_factory=Skipping)
    _places: list[LoopPlace] = field(default_factory=list)
    _by_file: dict[str, list[LoopPlace]] = field(default_factory=dict)
    _nests: dict[_Nest, None] = field(default_factory=dict)
    _counted: set[LoopPlace] = field(default_factory=set)
    _waits: bool = False

    def install(self, undo: ExitStack) -> None:
        """Count in all code of the user that is loaded until ``undo`` is closed."""
        put(undo, builtins, _FOR, self._items)
        put(undo, builtins, _END, self._while_ends)
        put(undo, builtins, _BEGIN, lambda number: self.begin(self._places[number]))
        self.skipping.steps = lambda: {place: place.n_begun for place in self._counted}
        self.skipping.on_steps = _count
        put(undo, builtins, _SKIPPED, self._has_skipped)
        put(undo, builtins, _ADVANCED, self._advanced)
        cached, of_file = SourceFileLoader.get_code, runpy._get_code_from_file  # type: ignore[attr-defined]

        def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
            path = loader.get_filename(fullname)
            if not is_users(path):
                return cached(loader, fullname)
            return self.compiled(loader.get_data(path), path)

        def get_code_from_file(*args: str) -> Any:
            found = of_file(*args)
            path = args[-1]
            if not path.endswith(".py"):  # compiled already
                return found
            code = self.compiled(Path(path).read_bytes(), path)
            return (code, path) if isinstance(found, tuple) else code

        put(undo, SourceFileLoader, "get_code", get_code)
        put(undo, SourceFileLoader, "source_to_code", lambda _, *args: self.compiled(*args))
        put(undo, runpy, "_get_code_from_file", get_code_from_file)

    def compiled(self, source: bytes, filename: str) -> CodeType:
        """Return the code of a file, in which rounds are counted.

        Raises:
            SyntaxError: it is no Python.
        """
        counting = _Counting(len(self._places))
        tree = counting.visit(ast.parse(source, filename))
        self._by_file[filename] = counting.places
        self._places += counting.places
        code: CodeType = _to_code(SourceFileLoader("__main__", filename), tree, filename)
        return code

    def _items(self, number: int, items: Iterable[Any]) -> Iterator[Any]:
        if threading.current_thread() is not threading.main_thread():
            return iter(items)
        return _Items(self, self._places[number], items)

    def _has_skipped(self, number: int) -> bool:
        """Whether counters are behind; asked as a round begins, which then brings them on."""
        passage = self._places[number].passage
        return passage is not None and passage.to_skip > 0

    def _advanced(self, number: int, counter: int, value: Any) -> Any:
        passage = self._places[number].passage
        if passage is None:
            return value
        made = self.skipping.advanced(passage, counter, value)
        if counter == len(passage.source.counters) - 1:
            passage.to_skip = 0
        return made

    def is_of_steps(self, place: LoopPlace) -> bool:
        """Whether rounds of a loop are steps."""
        return place in self._counted

    def _while_ends(self, number: int) -> bool:
        place = self._places[number]
        if place.is_between:
            place.enter(self.n_products)
            return True
        self.end(place)
        if place.passage is not None and self.skipping.is_on:
            n = self.skipping.rounds_to_skip(
                place.passage, no_length, is_of_steps=self.is_of_steps(place)
            )
            place.n_begun += n or 0
        return True

    def end(self, place: LoopPlace) -> None:
        """A round is over, if one went on."""
        is_over = not place.is_between
        place.is_between = True
        if is_over and place in self._counted:
            self.on_end()

    def begin(self, place: LoopPlace) -> bool:
        """Begin a round."""
        if place in self._counted:
            self.on_begin()
        place.begin(self.n_products)
        if self.skipping.is_on and place.passage is not None:
            self.skipping.begin(place.passage)
        return True

    def mark(self, frame: FrameType | None, optimizer: object = None) -> bool:
        """Note that an optimizer is called here; whether a loop of the user's own does so."""
        nest = self._nest(frame, is_own=True)
        said: list[bool] = []
        if optimizer is not None:
            self.uncalled.discard(optimizer)
            said = [place.note(id(optimizer)) for place in nest]
        if not nest:
            return False
        waited, self._waits = self._waits, bool(self.uncalled) and nest[0].n_begun == 1
        if nest not in self._nests or any(said) or waited:
            self._nests[nest] = None
            self._counted = self._loops_of_steps()
        return True

    def end_warm_up(self) -> None:
        """Count no round of before: a graph was captured, and its replays are steps."""
        self._nests.clear()
        self._counted = set()

    def n_complete(self, frame: FrameType | None) -> int:
        """Return the steps that are over at a place of the program."""
        nest = self._nest(frame)
        if self._counted:
            return sum(p.n_complete if p in nest else p.n_begun for p in self._counted)
        steps = [place for place in nest if not place.is_of_epochs] or nest
        return steps[0].n_complete if steps else 0

    @property
    def n_taken(self) -> int:
        """Steps so far, with one that goes on."""
        return sum(place.n_begun for place in self._counted)

    def _nest(self, frame: FrameType | None, *, is_own: bool = False) -> _Nest:
        """Return the user's loops around a place.

        With ``is_own`` none, if a loop of a library is within them.
        """
        found: list[LoopPlace] = []
        while frame is not None:
            code, line = frame.f_code, frame.f_lineno
            places = self._by_file.get(code.co_filename)
            if places is None:
                if is_own and not found and _is_in_loop(code, frame.f_lasti):
                    return ()
            elif code.co_name == "__init__" and not is_own:
                found = []  # what builds a model takes no steps
            else:
                first = 0 if code.co_name == "<module>" else code.co_firstlineno
                found += [p for p in places if first < p.first <= line <= p.last][::-1]
            frame = frame.f_back
        return tuple(reversed(found))

    def _loops_of_steps(self) -> set[LoopPlace]:
        """Return the loops whose rounds are steps, one for each stage of the program."""
        stages: dict[LoopPlace, list[_Nest]] = {}
        for nest in self._nests:
            ends = [i for i, place in enumerate(nest) if i and place.is_of_optimizers]
            stages.setdefault(nest[0], []).append(nest[: min(ends, default=None)])
        found: set[LoopPlace] = set()
        for nests in stages.values():
            common = nests[0]
            for nest in nests[1:]:
                common = tuple(a for a, b in zip(common, nest, strict=False) if a is b)
            if common[-1].is_of_epochs and any(len(nest) > len(common) for nest in nests):
                found.update(nest[-1] for nest in nests)
            elif not (self._waits and common[0].n_begun == 1 and _is_within_another(common)):
                found.add(self._outer_of(common))
        return found

    def _outer_of(self, nest: _Nest) -> LoopPlace:
        """Return the innermost loop, or the one around it that is as much of a step."""
        inner = nest[-1]
        n_products = self.n_products - inner.products_at_round
        for place, within in pairwise(nest):
            before = within.products_at_entry - place.products_at_round
            if not place.is_of_epochs and before >= n_products > 0:
                return place
        return inner


def _count(place: LoopPlace, n: int) -> None:
    """Count steps that were jumped over."""
    place.n_begun += n


def _is_within_another(nest: _Nest) -> bool:
    return len([place for place in nest if not place.is_of_epochs]) > 1


@cache
def _is_in_loop(code: CodeType, instruction: int) -> bool:
    if code.co_filename.startswith(_OWN):  # hooks are called in a loop of PyTorch's
        return False
    return any(
        "JUMP_BACKWARD" in step.opname and step.argval <= instruction <= step.offset
        for step in dis.get_instructions(code)
    )
