"""Whole-output goldens: reviewed files, rewritten only by ``pytest --update-golden``."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a function that compares text with a golden file."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            GOLDEN.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
            return
        expected = path.read_text(encoding="utf-8") if path.is_file() else ""
        if expected != text:
            diff = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), name, "now", lineterm=""
            )
            pytest.fail("\n".join(diff))

    return compare
