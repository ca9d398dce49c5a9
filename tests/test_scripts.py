"""Scripts of ``benchmarks`` and ``tools`` name only what the package has."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("tools/*.py")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_imports_what_the_package_has(script: Path) -> None:
    imports = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fragdoctor")
        for alias in node.names
    ]

    for module, name in imports:
        try:
            if not hasattr(importlib.import_module(str(module)), name):
                importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            pytest.skip(f"{module} needs PyTorch")
