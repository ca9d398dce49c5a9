"""Changes written into the user's file, if it is certain where they go: at the optimizer."""

from __future__ import annotations

import ast
import difflib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fragdoctor.model.prescription import Place, Treatment, by_place, lines_of


def patched(source: str, traits: Mapping[str, Any], treatments: Sequence[Treatment]) -> str | None:
    """Return a program with treatments written into it; None if their place is not certain.

    ``traits`` are what the program was seen to use, with the line that creates its one optimizer.
    """
    if traits["place"] is None or any(one.place is Place.OPEN for one in treatments):
        return None
    statement = _statement(source, traits["place"]["line"])
    lines = io.StringIO(source).readlines()  # split like Python's parser does
    if statement is None or not _is_alone(statement, lines):
        return None
    places = reversed(by_place(treatments))  # the call first, while its lines are as they were
    is_written = all(_write(*pair, statement, lines, traits["optimizers"]) for pair in places)
    return "".join(lines) if is_written else None


def _write(
    place: Place, parts: list[Treatment], at: ast.stmt, lines: list[str], optimizers: Sequence[str]
) -> bool:
    """Write treatments of one place at a statement; return whether that was possible."""
    begin, end = at.lineno - 1, (at.end_lineno or 0) - 1
    written = "".join(
        f"{' ' * at.col_offset}{line}\n" if line else "\n" for line in lines_of(parts)
    )
    if place is Place.BEFORE_OPTIMIZER:
        lines[begin] = written + lines[begin]
        return True
    if place is Place.AFTER_OPTIMIZER:
        lines[end] += written
        return bool(_name_given(at))  # the name that the lines use
    call = _call_of(at, optimizers)
    if call is None or any(k.arg in {None, "fused", "foreach"} for k in call.keywords):
        return False
    _add_arguments(lines, call, [word for one in parts for word in one.arguments])
    return True


def diff(name: str, before: str, after: str) -> list[str]:
    """Return a unified diff of a file, without line ends."""
    old, new = ([line.rstrip("\n") for line in io.StringIO(text)] for text in (before, after))
    found = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", lineterm="")
    return list(found)


def optimizer_name(place: Mapping[str, Any]) -> str:
    """Return the program's name for the optimizer that a line creates, "" if it has none."""
    try:
        source = Path(place["filename"]).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    statement = _statement(source, place["line"])
    return "" if statement is None else _name_given(statement)


def _statement(source: str, line: int) -> ast.stmt | None:
    """Return the innermost statement of a line; None if that is not certain."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    simple = [node for node in found if not hasattr(node, "body")]
    return simple[0] if len(simple) == 1 else None


def _is_alone(statement: ast.stmt, lines: Sequence[str]) -> bool:
    """Return whether a statement's lines contain only it, spaces before it, and a comment."""
    before = lines[statement.lineno - 1].encode()[: statement.col_offset]
    after = lines[(statement.end_lineno or 0) - 1].encode()[statement.end_col_offset :]
    is_last = not after.strip() or after.strip().startswith(b"#")
    return not before.strip(b" ") and is_last and after.endswith(b"\n")


def _name_given(statement: ast.stmt) -> str:
    """Return the variable or attribute that a statement sets, "" if it does something else."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return ast.unparse(target) if isinstance(target, ast.Name | ast.Attribute) else ""
    return ""


def _call_of(statement: ast.stmt, names: Sequence[str]) -> ast.Call | None:
    """Return the only call, in a statement, of a function with one of these names."""
    calls = [
        node
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names
    ]
    return calls[0] if len(calls) == 1 else None


def _add_arguments(lines: list[str], call: ast.Call, arguments: Sequence[str]) -> None:
    """Write arguments before a call's closing parenthesis."""
    row = (call.end_lineno or 0) - 1
    text = lines[row].encode()
    end = (call.end_col_offset or 0) - 1
    last = (call.args + [k.value for k in call.keywords])[-1]
    is_alone = last.end_lineno != call.end_lineno  # on a line of its own, after a comma or not
    if is_alone:
        row = (last.end_lineno or 0) - 1
        text, end = lines[row].encode(), last.end_col_offset or 0
    added = f", {', '.join(arguments)}".encode()
    lines[row] = (text[:end].rstrip(b", ") + added + text[end:]).decode()
