"""The code of a notebook: its cells, and what of them is not Python and is left out."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any, Final

from fragdoctor.errors import ConfigError
from fragdoctor.frozen import frozen

SUFFIX: Final = ".ipynb"
MAX_BYTES: Final = 256 << 20
_MOST_NAMED: Final = 5
# Magics whose cell is Python after its first line.
_OF_PYTHON: Final = ("time", "timeit", "capture", "prun", "memit", "mprun")
_ASSIGNED: Final = re.compile(r"^(\s*)([A-Za-z_][\w, ]*)=\s*[!%].*$")
_HELP: Final = re.compile(r"^\s*(\?{1,2}\s*[\w.]+|[\w.]+\s*\?{1,2})\s*$")


@frozen
class Cell:
    """A cell of code.

    Attributes:
        number: counts the cells of code, from 1.
        source: Python; a line that was left out does nothing.
    """

    number: int
    source: str


@frozen
class Notebook:
    """The code of a notebook.

    Attributes:
        cells: in their order.
        note: a sentence on what was left out, "".
    """

    cells: tuple[Cell, ...]
    note: str


def read_notebook(path: Path) -> Notebook:
    """Return the cells of a notebook; they are read, not run.

    Raises:
        ConfigError: it is no notebook, or not one of Python.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError(f"{path} is too large for a notebook.", hint="Clear its outputs.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = [_source(cell) for cell in _cells(content) if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ConfigError(
            f"{path} is not a notebook.", hint="Save it again with Jupyter, or export it as .py."
        ) from err
    language = _language(content)
    if language != "python":
        raise ConfigError(f"{path} is a notebook of {language}.", hint="Give one of Python.")
    left_out: list[str] = []
    cells = []
    for number, source in enumerate(found, 1):
        plain, skipped = _plain(source)
        cells.append(Cell(number, plain))
        left_out += [f"{text} (cell {number})" for text in skipped]
    return Notebook(tuple(cells), _note(left_out))


def _cells(content: Any) -> list[Any]:
    """Return the cells of format 4; format 3 has them in worksheets."""
    if "cells" in content:
        return list(content["cells"])
    return [cell for sheet in content["worksheets"] for cell in sheet["cells"]]


def _source(cell: Any) -> str:
    source = cell["source"] if "source" in cell else cell["input"]
    return source if isinstance(source, str) else "".join(source)


def _language(content: Any) -> str:
    metadata = content.get("metadata", {})
    language = metadata.get("language_info", {}).get("name")
    return str(language or metadata.get("kernelspec", {}).get("language") or "python").lower()


def _plain(source: str) -> tuple[str, list[str]]:
    """Return a cell as Python with as many lines, and what was left out of it."""
    lines = re.split(r"\r\n|\r|\n", source)  # Python's lines; splitlines() knows more ends
    first = next((line.strip() for line in lines if line.strip()), "")
    if first.startswith("%%"):
        name = first[2:].split()[0] if first[2:].split() else ""
        if name not in _OF_PYTHON:
            return "\n".join("" for _ in lines), [first]
        lines[next(i for i, line in enumerate(lines) if line.strip())] = ""
    left_out = []
    while (i := _wrong_line(lines)) is not None:
        line, assigned = lines[i], _ASSIGNED.match(lines[i])
        if assigned is not None:
            lines[i] = f"{assigned[1]}{assigned[2].rstrip()} = []"
        elif line.strip().startswith(("%", "!")) or _HELP.match(line):
            lines[i] = f"{line[: len(line) - len(line.lstrip())]}pass"
        else:
            break  # not a magic: an error of the program, which it will meet
        left_out.append(line.strip())
        while line.endswith("\\") and i + 1 < len(lines):
            i, line = i + 1, lines[i + 1]
            lines[i] = ""
    return "\n".join(lines), left_out


def _wrong_line(lines: list[str]) -> int | None:
    """Return the first line that Python does not understand; None where it understands all."""
    try:
        ast.parse("\n".join(lines))
    except SyntaxError as err:
        return err.lineno - 1 if err.lineno and err.lineno <= len(lines) else None
    except (ValueError, RecursionError, MemoryError):
        pass
    return None


def _note(left_out: list[str]) -> str:
    if not left_out:
        return ""
    more = len(left_out) - _MOST_NAMED
    rest = f" and {more} more" if more > 0 else ""
    return f"Left out of the notebook: {', '.join(left_out[:_MOST_NAMED])}{rest}"
