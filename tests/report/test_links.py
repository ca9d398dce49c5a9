"""Lines of the program lead to the editor at a terminal that follows links (OSC 8)."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from fragdoctor.cli import console
from fragdoctor.cli.options import ReportOutput
from fragdoctor.model.finding import Location
from fragdoctor.report import document as doc
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.source_files import links_to
from fragdoctor.report.text import render

FILES = "file://{path}#{line}"
SOURCE = "def step():\n    return 1\n"


def look(root: Path, **more: object) -> RenderOptions:
    return RenderOptions(color=True, source_root=str(root), link=FILES, **more)  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a b").mkdir()
    for place in ("train.py", "a b/model.py", "a b/train.py"):
        (tmp_path / place).write_text(SOURCE, encoding="utf-8")
    return tmp_path


def test_line_leads_to_its_file(root: Path) -> None:
    found = links_to([Location(f"{root}/a b/model.py", 2, "step")], look(root))

    assert found == {"model.py:2": f"file://{root}/a%20b/model.py#2"}


def test_line_recorded_elsewhere_is_found_by_the_path_map(root: Path) -> None:
    there = Location("/workspace/model.py", 2, "step")

    found = links_to([there], look(root, path_map=(("/workspace", "a b"),)))

    assert found == {"model.py:2": f"file://{root}/a%20b/model.py#2"}


@pytest.mark.parametrize(
    "location",
    [
        Location("/etc/passwd", 1, ""),
        Location("../train.py", 2, "step"),
        Location("gone.py", 2, "step"),
        Location("train.py", 200, "step"),
        Location("train.py\x1b]8;;evil\x1b\\", 2, "step"),
    ],
)
def test_what_is_not_a_line_of_the_program_leads_nowhere(root: Path, location: Location) -> None:
    assert links_to([location], look(root)) == {}


def test_name_that_two_files_share_leads_nowhere(root: Path) -> None:
    two = [Location(f"{root}/{place}", 2, "step") for place in ("train.py", "a b/train.py")]

    assert links_to(two, look(root)) == {}


def shown(text: str, options: RenderOptions) -> str:
    places = {"train.py:2": "file:///src/train.py#2"}
    return render(doc.ReportDocument("", text, (), (), places=places), options)


def test_name_is_a_link_and_parts_of_longer_names_are_none() -> None:
    text = shown("train.py:2 in step, old_train.py:2, train.py:20", RenderOptions(color=True))

    assert text.count("file:///src/train.py#2\x1b\\train.py:2\x1b]8;;\x1b\\") == 1
    assert text.count("file://") == 1


def test_plain_text_has_none() -> None:
    assert shown("at train.py:2", RenderOptions()) == "at train.py:2\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "link"),
    [
        ({"TERM_PROGRAM": "vscode"}, "vscode://file{path}:{line}"),
        ({"TERM": "xterm-kitty"}, FILES),
        ({"VTE_VERSION": "7600"}, FILES),
        ({"VTE_VERSION": "4999"}, ""),
        ({"WT_SESSION": "x"}, FILES),
        ({"TERM_PROGRAM": "Apple_Terminal"}, ""),
        ({"TERM_PROGRAM": "vscode", "CI": "1"}, ""),
        ({}, ""),
    ],
)
def test_links_are_for_terminals_that_follow_them(monkeypatch, environ, link) -> None:
    names = ("TERM", "TERM_PROGRAM", "VTE_VERSION", "WT_SESSION", "KONSOLE_VERSION",
             "FORCE_HYPERLINK", "CI")  # fmt: skip
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", Terminal())

    assert console.look_of(ReportOutput()).link == link
    assert console.look_of(ReportOutput(output=Path("report.txt"))).link == ""
