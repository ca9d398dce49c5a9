"""Run the cells of ``docs/notebook.ipynb`` without Jupyter and store their outputs in it.

    python tools/make_notebook.py           # from the root of the project

To change a cell, edit its source in the notebook itself, then run this.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the outputs of one code cell in Jupyter's format."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append(
            {"output_type": "stream", "name": "stdout", "text": lines(printed.getvalue())}
        )
    if value is not None:
        data = {"text/plain": lines(repr(value))}
        draw = getattr(value, "_repr_html_", None)
        if draw is not None and (html := draw()) is not None:
            data["text/html"] = lines(html)
        outputs.append({"output_type": "execute_result", "data": data, "metadata": {}})
    return outputs


def lines(text: str) -> list[str]:
    """Return text the way notebooks store it, as lines with their line ends."""
    return text.splitlines(keepends=True)


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook with the outputs of its code cells, which are run in order."""
    import pandas as pd

    # Otherwise the width would depend on the terminal.
    with pd.option_context("display.width", 100, "display.max_columns", 20):
        return {**notebook, "cells": _executed(notebook["cells"])}


def _executed(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names: dict[str, Any] = {}
    count = 0
    done = []
    for cell in cells:
        if cell["cell_type"] != "code":
            done.append(cell)
            continue
        count += 1
        outputs = run_cell("".join(cell["source"]), names)
        for output in outputs:
            if output["output_type"] == "execute_result":
                output["execution_count"] = count
        done.append({**cell, "execution_count": count, "outputs": outputs})
    return done


def main() -> None:
    """Run the notebook and write it back."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    with contextlib.chdir(NOTEBOOK.parent):
        done = executed(notebook)
    NOTEBOOK.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{NOTEBOOK}: {len(done['cells'])} cells", file=sys.stderr)


if __name__ == "__main__":
    main()
