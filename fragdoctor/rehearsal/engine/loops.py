"""Loops in the user's own code: the code is compiled from its source with one addition.

The items of a ``for`` and the condition of a ``while`` are tracked;
:mod:`fragdoctor.rehearsal.engine.skipping` decides which rounds can be skipped. Lines, names and
the lifetimes of tensors stay as they are.
"""

from __future__ import annotations

import ast
import builtins
import dis
import io
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, Self
from weakref import ref

import torch

from fragdoctor.rehearsal.engine import frames_from, nothing, put, seen_through
from fragdoctor.rehearsal.engine.memory_history import ENGINE, is_users
from fragdoctor.rehearsal.engine.skipping import (
    WAIT_S,
    Calls,
    Function,
    Loop,
    Passage,
    Skipping,
    is_on_gpu,
    n_remaining,
    no_length,
    source_of,
)

_FOR, _END, _BEGIN = "__fragdoctor_for__", "__fragdoctor_end__", "__fragdoctor_begin__"
READ: Final = "__fragdoctor_read__"
_CALLED: Final = "__fragdoctor_called__"
_SKIPPED, _ADVANCED = "__fragdoctor_skipped__", "__fragdoctor_advanced__"
_to_code: Any = SourceFileLoader.source_to_code  # also takes a tree
_OWN: Final = (str(Path(torch.__file__).parent), ENGINE)


class _Items(Iterator[Any]):
    """The items of a ``for``; holds no item itself, so that each dies when it otherwise would."""

    __slots__ = ("_items", "_iterator", "_loops", "_next", "_passage")

    def __init__(self, loops: Loops, loop: Loop, items: Iterable[Any]) -> None:
        self._items = items
        self._iterator = iter(items)
        self._next = self._iterator.__next__
        self._loops = loops
        self._passage = loop.passage = Passage(loop, loops.skipping.steps())
        loop.is_between = True

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        passage, skipping = self._passage, self._loops.skipping
        is_over = not passage.loop.is_between
        passage.loop.is_between = True
        n: int | None = 0
        if is_over and skipping.is_on:
            n = skipping.rounds_to_skip(
                passage, lambda: n_remaining(self._iterator, self._items, passage.n_rounds)
            )
        try:
            item = self._next() if n == 0 else self._after(n)
        except StopIteration:
            if passage.loop.is_guessed and not passage.n_known:
                skipping.is_guessed(passage.loop.is_guessed, passage.loop.first, passage.n_rounds)
            raise
        if _has_module(item):
            passage.is_of_layers = True
        self._loops.begin(passage.loop)
        return item

    def _after(self, n: int | None) -> Any:
        """Return the item after some skipped ones; with None the last one, if it can be kept.

        Raises:
            StopIteration: there is none.
        """
        skipping, begun = self._loops.skipping, time.monotonic()
        n_gone = 0
        kept: list[Any] = []
        skipping.is_jumping = True
        try:
            while n is None or n_gone < n:
                if time.monotonic() - begun > WAIT_S:
                    skipping.partial = skipping.partial or (
                        f"skipping items of the loop at line {self._passage.loop.first} took "
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
            if n is None:
                skipping.note(self._passage, n_gone, sys._getframe(2))
        return self._next()


class _Repeated(Iterator[Any]):
    """The items of a ``for``, each several times once it is seen to take steps.

    Tensors on a GPU are not kept, so they come only once.
    """

    def __init__(self, items: Iterable[Any], loop: Loop, n_each: int) -> None:
        self._iterator, self._loop, self._n_each = iter(items), loop, n_each
        self._n_left = 0
        self._kept: Any = None

    def __next__(self) -> Any:
        if self._n_left and self._loop.is_of_steps:
            self._n_left -= 1
            return self._kept
        item = next(self._iterator)
        self._kept = None if is_on_gpu(item) else item
        self._n_left = 0 if self._kept is None else self._n_each - 1
        return item


def _has_module(item: Any) -> bool:
    """Return whether a loop's item is a module, or a tuple with one (``enumerate``, ``zip``)."""
    return any(isinstance(m, torch.nn.Module) for m in (item if type(item) is tuple else (item,)))


class _Following(ast.NodeTransformer):
    """Adds the calls that track the loops of a file."""

    def __init__(self, first_number: int, first_function: int) -> None:
        self._first_number, self._first_function = first_number, first_function
        self.loops: list[Loop] = []
        self.functions: list[Function] = []

    def visit_For(self, node: ast.For) -> ast.For:
        number = self._add(node)
        self.generic_visit(node)
        node.iter = _call(_FOR, node.iter, number, node.iter)
        self._advance(node, number)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Note calls of a function that compares its arguments or adds to what outlives it."""
        source, n_before = source_of(node), len(self.loops)
        self.generic_visit(node)
        arguments = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
        shared = {n for one in node.body if isinstance(one, ast.Global) for n in one.names}
        kept = [c for c in source.counters if not isinstance(c, ast.Name) or c.id in shared]
        if kept or (arguments and source.meetings):
            given = [ast.Name(name, ast.Load()) for name in arguments]
            noted = _call(_CALLED, node.body[0], self._first_function + len(self.functions), *given)
            at = ast.get_docstring(node) is not None
            node.body.insert(at, ast.copy_location(ast.Expr(noted), node.body[0]))
            found = Function(source._replace(counters=kept), arguments, self.loops[n_before:])
            self.functions.append(found)
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        is_number = isinstance(node.func, ast.Name) and node.func.id in {"int", "float"}
        return _call(READ, node, 0, node) if is_number else node

    def visit_While(self, node: ast.While) -> ast.While:
        number = self._add(node)
        self.generic_visit(node)
        asked = [_call(_END, node.test, number), node.test, _call(_BEGIN, node.test, number)]
        node.test = ast.copy_location(ast.BoolOp(ast.And(), asked), node.test)
        self._advance(node, number)
        return node

    def _advance(self, node: ast.For | ast.While, number: int) -> None:
        """Let each round begin with counters set as if the skipped rounds had run."""
        counters = [*map(ast.unparse, self.loops[number - self._first_number].source.counters)]
        if not counters:
            return
        changes = [f"{c} = {_ADVANCED}({number}, {i}, {c})" for i, c in enumerate(counters)]
        # A counter may be set on a path that the program does not take.
        tried = [f" try: {one}\n except (AttributeError, NameError): pass\n" for one in changes]
        ended = f" {_ADVANCED}({number}, {len(counters)}, None)"
        added = ast.parse(f"if {_SKIPPED}({number}):\n{''.join(tried)}{ended}").body[0]
        for part in ast.walk(added):
            ast.copy_location(part, node.body[0])
        node.body.insert(0, added)

    def _add(self, node: ast.For | ast.While) -> int:
        last, test = node.end_lineno or node.lineno, getattr(node, "test", None)
        self.loops.append(Loop(node.lineno, last, source_of(node), test))
        return self._first_number + len(self.loops) - 1


def _call(name: str, like: ast.expr | ast.stmt, number: int, *more: ast.expr) -> ast.Call:
    called = ast.Call(ast.Name(name, ast.Load()), [ast.Constant(number), *more], [])
    return ast.fix_missing_locations(ast.copy_location(called, like))


def unless_traced(follow: Callable[..., Any], *plain: bool) -> Callable[..., Any]:
    """Return a call that Dynamo sees through: to the items, or to a plain answer."""

    @seen_through
    def call(number: int, *items: Any) -> Any:
        if torch.compiler.is_compiling():
            return (plain or items)[0]
        return follow(number, *items)

    return call


@dataclass(slots=True)
class Loops:
    """The loops of the user's own code.

    Attributes:
        skipping: decides which of their rounds are skipped.
        n_each: how often the rounds of a loop that takes steps are run.
    """

    skipping: Skipping = field(default_factory=Skipping)
    n_each: int = 1
    _loops: list[Loop] = field(default_factory=list)
    _functions: list[Function] = field(default_factory=list)
    _by_file: dict[str, list[Loop]] = field(default_factory=dict)

    def install(self) -> None:
        """Track all of the user's code that is loaded."""
        put(builtins, _FOR, unless_traced(self._items))
        put(builtins, _END, unless_traced(self._while_ends, True))
        put(builtins, _BEGIN, unless_traced(lambda n: self.begin(self._loops[n]), True))
        put(builtins, _CALLED, unless_traced(self._called, True))
        put(builtins, _SKIPPED, unless_traced(self._has_skipped, False))
        put(builtins, _ADVANCED, self._advanced)
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
            with io.open_code(path) as stream:  # like runpy, since a treatment may change it
                code = self.compiled(stream.read(), path)
            return (code, path) if isinstance(found, tuple) else code

        put(SourceFileLoader, "get_code", get_code)
        put(SourceFileLoader, "source_to_code", lambda _, *args: self.compiled(*args))
        put(runpy, "_get_code_from_file", get_code_from_file)

    def compiled(self, source: bytes, filename: str) -> CodeType:
        """Return the code of a file, with its loops tracked.

        Raises:
            SyntaxError: the file is not valid Python.
        """
        following = _Following(len(self._loops), len(self._functions))
        tree = following.visit(ast.parse(source, filename))
        self._by_file[filename] = following.loops
        self._loops += following.loops
        self._functions += following.functions
        code: CodeType = _to_code(SourceFileLoader("__main__", filename), tree, filename)
        return code

    def _items(self, number: int, items: Iterable[Any]) -> Iterator[Any]:
        if threading.current_thread() is not threading.main_thread():
            return iter(items)
        loop = self._loops[number]
        several = _Repeated(items, loop, self.n_each) if self.n_each > 1 else items
        return _Items(self, loop, several)

    def _called(self, number: int, *arguments: Any) -> None:
        skipping, function = self.skipping, self._functions[number]
        if not skipping.is_on or threading.current_thread() is not threading.main_thread():
            return
        given = {
            name: value
            for name, value in zip(function.arguments, arguments, strict=True)
            if isinstance(value, int | float)
        }
        first = arguments[0] if arguments else None
        key, kept = (number, 0), nothing
        if type(first).__weakrefoffset__ and not isinstance(first, torch.Tensor):
            key = number, id(first)
            kept = ref(first, lambda _: skipping.calls.pop(key, None))
        skipping.calls[key] = Calls(function, given, kept, sys._getframe(2).f_globals)

    def guess(self, filename: str, line: int) -> None:
        """Note that a made-up value says how often the loop at a line runs."""
        for one in self._by_file.get(filename, ()):
            if one.first == line:
                one.is_guessed = filename

    def _has_skipped(self, number: int) -> bool:
        """Return whether counters lag behind; a beginning round asks, and then updates them."""
        passage = self._loops[number].passage
        return passage is not None and passage.to_skip > 0

    def _advanced(self, number: int, counter: int, value: Any) -> Any:
        passage = self._loops[number].passage
        if passage is None:
            return value
        if counter < len(passage.loop.source.counters):
            return self.skipping.advanced(passage, counter, value)
        passage.to_skip = 0  # all of them are
        return None

    def _while_ends(self, number: int) -> bool:
        loop = self._loops[number]
        if loop.is_between or loop.passage is None:
            loop.passage = Passage(loop, self.skipping.steps())
            return True
        loop.is_between = True
        is_on = self.skipping.is_on
        return not is_on or self.skipping.rounds_to_skip(loop.passage, no_length) is not None

    def begin(self, loop: Loop) -> bool:
        """Begin a round."""
        loop.is_between = False
        if self.skipping.is_on and loop.passage is not None:
            self.skipping.begin(loop.passage)
        return True

    def takes_steps(self, innermost: FrameType | None) -> bool:
        """Note an optimizer call here; return whether it is in a loop of the user's own.

        It is not if a library's loop is within that loop.
        """
        for frame in frames_from(innermost):
            code, line = frame.f_code, frame.f_lineno
            loops = self._by_file.get(code.co_filename)
            if loops is None:
                if _is_in_loop(code, frame.f_lasti):
                    return False
            else:
                first = 0 if code.co_name == "<module>" else code.co_firstlineno
                around = [one for one in loops if first < one.first <= line <= one.last]
                if around:
                    around[-1].is_of_steps = True
                    return True
        return False


@cache
def _is_in_loop(code: CodeType, instruction: int) -> bool:
    if code.co_filename.startswith(_OWN):  # PyTorch calls hooks in a loop
        return False
    return any(
        "JUMP_BACKWARD" in step.opname and step.argval <= instruction <= step.offset
        for step in dis.get_instructions(code)
    )
