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
    is_certain = all(
        one.place in {Place.BEFORE_OPTIMIZER, Place.AFTER_OPTIMIZER} for one in treatments
    )
    statement = _statement(source, traits["place"]["line"]) if traits["place"] else None
    lines = io.StringIO(source).readlines()  # split like Python's parser does
    if not is_certain or statement is None or not _is_alone(statement, lines):
        return None
    begin, end = statement.lineno - 1, (statement.end_lineno or 0) - 1
    for place, parts in by_place(treatments):
        written = "".join(
            f"{' ' * statement.col_offset}{line}\n" if line else "\n" for line in lines_of(parts)
        )
        if place is Place.BEFORE_OPTIMIZER:
            lines[begin] = written + lines[begin]
        elif _name_given(statement):  # the name that the lines use
            lines[end] += written
        else:
            return None
    return "".join(lines)


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
