"""The notebook of the documentation shows what its cells really give."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def maker(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("maker", root / "tools" / "make_notebook.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(notebook: dict[str, Any]) -> list[list[str]]:
    """Return the texts that each code cell shows; HTML of frames depends on pandas."""
    return [
        ["".join(o["text"] if o["output_type"] == "stream" else o["data"]["text/plain"])
         for o in cell["outputs"]]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]  # fmt: skip


def test_notebook_shows_what_its_cells_give(
    root: Path, maker: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = json.loads((root / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))
    monkeypatch.chdir(root / "docs")

    with pd.option_context("display.width", 80):
        again = maker.executed(kept)

    assert shown(again) == shown(kept)
    assert sum(map(len, shown(kept))) >= 8


def test_notebook_holds_the_cards(root: Path) -> None:
    kept = json.loads((root / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))

    html = [
        "".join(output["data"].get("text/html", ""))
        for cell in kept["cells"]
        for output in cell.get("outputs", ())
        if "data" in output
    ]

    assert any("Memory snapshot" in h for h in html)
    assert any("Fragmentation (likely)" in h for h in html)
    assert not any("<script" in h for h in html)
