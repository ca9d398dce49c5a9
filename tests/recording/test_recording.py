"""What must hold for the package that other interpreters load by path."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import fragdoctor.recording

FILES = sorted(Path(fragdoctor.recording.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_module_runs_on_python_39_with_nothing_but_the_standard_library(path) -> None:
    source = path.read_text(encoding="utf-8")

    is_first = path.name == "sitecustomize.py"  # it sends older ones away, and must parse there
    tree = ast.parse(source, feature_version=(3, 6) if is_first else (3, 9))

    used = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and node.level == 0
            else []
        )
    }
    assert used <= set(sys.stdlib_module_names)
    is_plain = path.name in ("__init__.py", "sitecustomize.py")
    assert "from __future__ import annotations" in source or is_plain


def test_bootstrap_is_found_beside_the_package() -> None:
    assert {"sitecustomize.py", "history_recorder.py", "arming.py"} <= {p.name for p in FILES}
