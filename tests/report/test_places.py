"""Where results point: mapped paths, and sources that were recorded elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from fragdoctor.model.finding import Location
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.results import place_of
from fragdoctor.report.source_files import relative

SOURCE = "def step():\n    x = 1\n    return x\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text(SOURCE)
    return tmp_path


def where(root: Path, path: str, line: int = 2, function: str = "step") -> str:
    look = RenderOptions(source_root=str(root))
    return place_of(Location(path, line, function), look).path


def test_file_recorded_elsewhere_is_found_by_the_end_of_its_path(root: Path) -> None:
    assert "pkg/train.py" == where(root, "/workspace/pkg/train.py")


@pytest.mark.parametrize(
    ("path", "line", "function"),
    [
        ("/workspace/pkg/train.py", 2, "other"),  # another function stands there
        ("/workspace/pkg/train.py", 9, "step"),  # the file is shorter
        ("/workspace/pkg/../train.py", 2, "step"),
        ("/workspace/lib/other.py", 2, "step"),
    ],
)
def test_other_file_of_that_name_is_not_taken(
    root: Path, path: str, line: int, function: str
) -> None:
    assert where(root, path, line, function).startswith("/workspace/")


@pytest.mark.parametrize(
    ("mapping", "path", "expected"),
    [
        (("/workspace", "."), "/workspace/train.py", "train.py"),
        (("/workspace/", "src"), "/workspace/a/train.py", "src/a/train.py"),
        (("/workspace", "/home/me/project"), "/workspace/train.py", "train.py"),
        (("/work", "."), "/workspace/train.py", "/workspace/train.py"),
        (("C:/job", "."), "C:\\job\\train.py", "train.py"),
    ],
)
def test_recorded_paths_are_mapped(mapping: tuple[str, str], path: str, expected: str) -> None:
    look = RenderOptions(source_root="/home/me/project", path_map=(mapping,))

    assert expected == relative(path, look)
