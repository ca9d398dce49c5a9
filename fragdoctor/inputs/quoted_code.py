"""Read the Python code that a text quotes, and say what it keeps on the GPU.

People paste lines with gaps, prompts and line numbers, so each statement is parsed by itself, and
its indentation says what it is in. Nothing is executed. What a model returns holds the graph of
that call, and so does what is computed from it, until it is detached.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import Struct

from fragdoctor.lazy import regex
from fragdoctor.model.case import QuotedCode

MAX_CHARS: Final = 64 * 1024
_MAX_STATEMENTS: Final = 1000
_MAX_STATEMENT: Final = 400
_MAX_NAME: Final = 60

_MARKS: Final = regex(
    r"(?:> ?(?!>>)){0,9}(?:(?:>>>|\.\.\.|In \[\d{0,5}\]:) ?|-{0,6}> ?\d{1,5} |[-+](?= )"
    r"| {0,6}\d{1,5}[:|]? (?= {0,80}[A-Za-z_]))?`{0,3}"
)
"""What stands before a quoted line: marks of quotes, prompts, line numbers, diffs."""
_FRAME: Final = regex(r"\s{0,80}File .{1,400}, line \d|.{1,400}\.py:\d{1,6}")
"""A line of a traceback; the line below it was not written beside the others."""
_STRINGS: Final = regex(r"'[^']{0,400}'|\"[^\"]{0,400}\"|#.{0,400}")
_HEADER: Final = regex(r"(?:async )?(?:for|while|with|def|class|if|elif|else|try|except|finally)\b")
_SAME_HEADERS: Final = (
    ("elif (.*)", r"if \1"),
    ("else|except.*", "if _"),
    ("try|finally", "with _"),
)
_CODE: Final = regex(r"[\w.\[\]'\", ()*]{1,120}?(?:\+=|=(?!=))|[\w.]{1,80}\(")

_NO_GRADIENT: Final = regex(r"no_grad|inference_mode|(?:set_|enable_)grad(?:_enabled)?\(False")
_TRAINS: Final = regex(r"\.backward\(|\.fit\(|Trainer\(|training_step|optimi[sz]er")
_EVALUATES: Final = regex(r"(?i)eval|valid|test|infer|predict")
_MODEL: Final = regex(
    r"(?i)(?!_?(?:get|load|make|build|create|save|init|train|test|eval|set|enable|run)_)"
    r"(?=(?-i:[a-z_]))\w{0,60}?(?:model|net(?:work)?|(?:en|de)coder|critic|actor|policy|backbone"
    r"|extractor|bert|generator|discriminator)_?\w{0,3}$"
)
"""Names of models, which are no names of functions that make or use one."""
_LOSS: Final = regex(r"(?i)criterion|loss")
_WITHIN_MODEL: Final = ("forward", "__init__", "__call__")
_OF_MODULES: Final = ("parameters", "eval", "train", "state_dict", "load_state_dict")
"""Methods that a module has and a tensor has not."""
_LIBRARY: Final = ("torch", "F", "functional", "nn")
_JOINS: Final = ("cat", "concat", "stack", "vstack", "hstack")
_COLLECTS: Final = ("append", "extend", "add", "push")
_PICKS: Final = ("max", "min", "topk", "sort")


_DETACHES: Final = frozenset(
    {"item", "numpy", "tolist", "float", "int", "len", "shape", "detach", "data", "argmax", "eq"}
)
"""Calls and attributes whose result has no graph."""


class _Statement(Struct):
    """One statement with the headers that it is indented under, outermost first."""

    node: ast.stmt
    source: str
    indent: int
    under: Sequence[_Statement]

    @property
    def loops(self) -> list[_Statement]:
        return [s for s in self.under if isinstance(s.node, ast.For | ast.While)]

    @property
    def function(self) -> str:
        named = [s.node.name for s in self.under if isinstance(s.node, ast.FunctionDef)]
        return named[-1] if named else ""

    def can_follow(self, other: _Statement) -> bool:
        """Return whether no branch that it is in leaves the other out."""
        of_both = (
            [s for s in one.under if not isinstance(s.node, ast.With)] for one in (self, other)
        )
        return all(a is b for a, b in zip(*of_both, strict=False))


def quoted_code(text: str) -> QuotedCode:
    """Return what the code in a text keeps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escape sequences in strings
        try:
            return _Reader(text[:MAX_CHARS]).found
        except RecursionError:  # nobody writes such expressions
            return QuotedCode()


def _lines(text: str) -> Iterator[str]:
    """Yield lines of code without the marks before them; open brackets join lines."""
    held, is_of_frame = "", False
    for raw in text.split("\n"):
        line = raw.expandtabs(4).rstrip("` ")
        if is_of_frame or _FRAME.match(line):
            is_of_frame = not is_of_frame
            continue
        marks = _MARKS.match(line)
        held = f"{held} {line.strip()}" if held else line[marks.end() if marks else 0 :]
        code = _STRINGS.sub("", held)
        n_open = sum(map(code.count, "([{")) - sum(map(code.count, ")]}"))
        if n_open <= 0 or not line.strip() or len(held) > _MAX_STATEMENT:
            yield held
            held = ""


def _statements(text: str) -> Iterator[_Statement]:
    under: list[_Statement] = []
    decorator = ""
    for line in _lines(text):
        source = line.strip()
        if not source or source[0] in "#@":
            decorator = source if source[:1] == "@" else decorator
            continue
        indent = len(line) - len(line.lstrip())
        while under and under[-1].indent >= indent:
            under.pop()
        if (node := _parsed(source)) is not None:
            yield (statement := _Statement(node, f"{decorator} {source}", indent, tuple(under)))
            if _HEADER.match(source):
                under.append(statement)
        decorator = ""


def _parsed(source: str) -> ast.stmt | None:
    code = source
    if _HEADER.match(source):
        code = _STRINGS.sub("''", source).rstrip().rstrip(":")
        for header, same in _SAME_HEADERS:
            code = re.sub(rf"^(?:{header})$", same, code)
        code = f"{code}: pass"
    elif not _CODE.match(source):
        return None
    try:
        body = ast.parse(code).body if len(code) <= _MAX_STATEMENT else []
    except (SyntaxError, ValueError, MemoryError):
        return None
    return body[0] if len(body) == 1 else None


class _Reader:
    """Follows what the values of a text's statements hold."""

    def __init__(self, text: str) -> None:
        self._holds: dict[str, bool] = {}
        self._made: dict[str, _Statement] = {}
        self._modules: set[str] = set()
        self._losses: set[str] = set()
        self._backward: list[_Statement] = []
        self._forward: list[_Statement] = []
        self._kept = ""
        statements = [s for s, _ in zip(_statements(text), range(_MAX_STATEMENTS), strict=False)]
        statements = [s for s in statements if s.function not in _WITHIN_MODEL]
        for s in statements:
            for node in ast.walk(s.node):
                self._note(node, s)
        for s in statements:
            self._read(s)
        trains = _TRAINS.search(text) is not None
        unused = (
            s.source
            for s in self._forward
            if not _keeps_no_graph(s) and (not trains or self._is_unused(s))
        )
        call = next(unused, "").strip()[:_MAX_NAME]
        self.found = QuotedCode(
            kept=self._kept,
            unused_graph="" if trains else call,
            evaluated_graph=call if trains else "",
        )

    def _note(self, call: ast.AST, s: _Statement) -> None:
        """Note what a call of a method says of its object, wherever in the text it is."""
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            return
        if call.func.attr in _OF_MODULES:
            self._modules.add(_name(call.func.value))
        if call.func.attr == "backward":
            self._backward.append(s)
            self._losses |= {n.id for n in ast.walk(call) if isinstance(n, ast.Name)}

    def _is_unused(self, call: _Statement) -> bool:
        """Return whether no backward pass can follow a call of a model."""
        own = [b for b in self._backward if b.function == call.function]
        is_left_out = bool(own) and not any(b.can_follow(call) for b in own)
        return is_left_out or _EVALUATES.search(call.function) is not None

    def _read(self, s: _Statement) -> None:
        node = s.node
        if isinstance(node, ast.Assign):
            self._assign(s, node.targets[0], node.value)
        elif isinstance(node, ast.AugAssign):
            self._add(s, node.target, held=self._held(node.value, s))
        elif isinstance(node, ast.Expr | ast.Return) and node.value is not None:
            held, func = self._held(node.value, s), getattr(node.value, "func", None)
            if isinstance(func, ast.Attribute) and func.attr in _COLLECTS:
                self._add(s, func.value, held=held)

    def _assign(self, s: _Statement, target: ast.expr, value: ast.expr) -> None:
        held, called = self._held(value, s), _name(getattr(value, "func", value))
        if isinstance(target, ast.Subscript):
            self._add(s, target.value, held=held)
            return
        parts = set(map(ast.unparse, ast.iter_child_nodes(value)))
        if called in _JOINS and isinstance(value, ast.Call):
            parts |= {ast.unparse(x) for arg in value.args for x in ast.iter_child_nodes(arg)}
        for i, one in enumerate(target.elts if isinstance(target, ast.Tuple) else [target]):
            name = ast.unparse(one)
            if name in parts:  # a sum, a joined tensor, or a state that goes from round to round
                self._add(s, one, held=held)
                continue
            is_loss = name in self._losses and not _keeps_no_graph(s)
            self._holds[name] = is_loss or (held and not (i and called in _PICKS))
            self._made[name] = s

    def _add(self, s: _Statement, to: ast.expr, *, held: bool) -> None:
        """Note that a container, or a sum, gets a graph in a loop that it outlives."""
        name = ast.unparse(to)
        made = self._made.get(name)
        outlived = [x for x in s.loops if made is None or x not in made.loops]
        later = (b for b in self._backward if b.function == s.function)
        # One backward pass after the loop would need all of it.
        if held and outlived and not any(outlived[0] not in b.loops for b in later):
            self._kept = self._kept or name[:_MAX_NAME]

    def _held(self, node: ast.AST, s: _Statement) -> bool:
        """Return whether the value of an expression holds a graph."""
        if isinstance(node, ast.Call):
            return self._returned(node, s)
        if isinstance(node, ast.Compare | ast.JoinedStr) or getattr(node, "attr", "") in _DETACHES:
            return False
        is_named = isinstance(node, ast.Name | ast.Attribute)
        parts = [self._held(part, s) for part in ast.iter_child_nodes(node)]
        name = ast.unparse(node) if is_named else ""
        return any(parts) or self._holds.get(name, name in self._losses)

    def _returned(self, call: ast.Call, s: _Statement) -> bool:
        given = [self._held(arg, s) for arg in (*call.args, *call.keywords)]
        owner, name = getattr(call.func, "value", None), _name(call.func)
        if name == "forward" or self._is_model(call.func, s):
            self._forward.append(s)
            return not _keeps_no_graph(s)
        if name in _DETACHES:
            return False
        if _name(owner) in _LIBRARY or name[:1].isupper() or _LOSS.search(name):
            return any(given)
        return (owner is not None and self._held(owner, s)) or (any(given) and name in _COLLECTS)

    def _is_model(self, node: ast.expr, s: _Statement) -> bool:
        """Return whether an expression is a model, and not the layer that a loop is at."""
        name = _name(node)
        of_loops = (n for x in s.loops for n in ast.walk(getattr(x.node, "target", x.node)))
        is_layer = any(_name(n) == name for n in of_loops)
        return not is_layer and (name in self._modules or _MODEL.match(name) is not None)


def _keeps_no_graph(s: _Statement) -> bool:
    """Return whether a statement is in a block or function that turns gradients off."""
    around = (x.source for x in s.under if isinstance(x.node, ast.With | ast.FunctionDef))
    return any(map(_NO_GRADIENT.search, around))


def _name(node: ast.AST | None) -> str:
    """Return the last part of a dotted name, or ""."""
    return getattr(node, "attr", "") or getattr(node, "id", "")
