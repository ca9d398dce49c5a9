"""Changes written into the user's file, where it is certain where they go: at the optimizer."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from fragdoctor.model.prescription import Place, Treatment


def patched(source: str, traits: Mapping[str, Any], treatments: Sequence[Treatment]) -> str | None:
    """Return a program with treatments written into it; None where their place is not certain.

    ``traits`` are what the program was seen to use, with the line that makes its one optimizer.
    """
    if traits["place"] is None or any(one.place is Place.OPEN for one in treatments):
        return None
    lines = source.splitlines(keepends=True)
    try:
        statement = _statement(ast.parse(source), traits["place"]["line"])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if statement is None or not lines[-1].endswith("\n"):
        return None
    indent = lines[statement.lineno - 1].encode()[: statement.col_offset].decode()
    if indent.strip() or _shares_its_line(statement, lines):
        return None
    for one in treatments:
        written = [f"{indent}{line}\n" if line else "\n" for line in one.lines]
        if one.place is Place.BEFORE_OPTIMIZER:
            lines[statement.lineno - 1] = "".join([*written, lines[statement.lineno - 1]])
        elif one.place is Place.AFTER_OPTIMIZER:
            if _name_given(statement) != "optimizer":
                return None
            end = (statement.end_lineno or 0) - 1
            lines[end] = "".join([lines[end], *written])
        else:
            call = _call_of(statement, traits["optimizers"])
            if call is None or any(k.arg in {None, "fused", "foreach"} for k in call.keywords):
                return None
            _add_arguments(lines, call, one.arguments)
    return "".join(lines)


def diff(name: str, before: str, after: str) -> list[str]:
    """Return a unified diff of a file, without ends of lines."""
    found = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"a/{name}", f"b/{name}", lineterm=""
    )
    return list(found)


def _statement(module: ast.Module, line: int) -> ast.stmt | None:
    """Return the innermost statement of a line."""
    found = [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    simple = [node for node in found if not hasattr(node, "body")]
    return simple[0] if len(simple) == 1 else None


def _shares_its_line(statement: ast.stmt, lines: Sequence[str]) -> bool:
    """Whether more than a comment follows a statement in its last line."""
    end = lines[(statement.end_lineno or 0) - 1].encode()[statement.end_col_offset :].decode()
    return bool(end.strip()) and not end.strip().startswith("#")


def _name_given(statement: ast.stmt) -> str:
    """Return the variable that a statement sets, "" if it does something else."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else ""
    return ""


def _call_of(statement: ast.stmt, names: Sequence[str]) -> ast.Call | None:
    """Return the one call of a function of these names in a statement."""
    calls = [
        node
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names
    ]
    return calls[0] if len(calls) == 1 else None


def _add_arguments(lines: list[str], call: ast.Call, arguments: Sequence[str]) -> None:
    """Write arguments before the parenthesis that ends a call."""
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
