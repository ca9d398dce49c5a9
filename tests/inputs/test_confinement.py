"""Files that lead out of the folder that may be read: by pattern, folder, bundle and link."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from builders import BASE, MIB, block, pickled, segment, snapshot

from fragdoctor.errors import InputError
from fragdoctor.inputs.cases import read_case
from fragdoctor.inputs.confinement import VARIABLE, is_allowed
from fragdoctor.inputs.discovery import discover
from fragdoctor.inputs.folders import DiskTree, expand, matches
from fragdoctor.model.case import Overrides

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project whose links lead to a snapshot, a log and a bundle outside of it."""
    content = pickled(snapshot(segment(BASE, block(20 * MIB, "active_allocated"))))
    outside = tmp_path / "outside"
    (outside / "bundle").mkdir(parents=True)
    for path in (outside / "private-name.pickle", outside / "bundle/snapshot.pickle"):
        path.write_bytes(content)
    (outside / "private-name.log").write_text("step 1\n")
    manifest = json.dumps({"format": "fragdoctor-bundle", "version": 1, "reason": "exit"})
    (outside / "bundle/bundle.json").write_text(manifest)
    home = tmp_path / "project"
    for name in ("links", "logs", "part", "whole", "own"):
        (home / name).mkdir(parents=True)
    (home / "links/link.pickle").symlink_to(outside / "private-name.pickle")
    (home / "logs/link.log").symlink_to(outside / "private-name.log")
    (home / "folder").symlink_to(outside)
    (home / "whole/bundle").symlink_to(outside / "bundle")
    (home / "part/bundle.json").write_text(manifest)
    (home / "part/snapshot.pickle").symlink_to(outside / "private-name.pickle")
    (home / "own/a.pickle").write_bytes(content)
    (home / "own/b.pickle").symlink_to(home / "own/a.pickle")
    monkeypatch.chdir(home)
    monkeypatch.setenv(VARIABLE, str(home.resolve()))
    return home


OUTSIDE = [
    *("links/link.pickle", "links/*.pickle", "links", "links/**", "**", "*/*.pickle"),
    *("folder", "fold*", "folder/*.pickle", "folder/private-name.pickle"),
    *("logs/*.log", "part", "pa*", "whole/bundle", "whole/*", "folder/bundle"),
    *("../outside/private-name.pickle", "../outside", "../*/*.pickle"),
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_nothing_outside_is_read(home: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"may be read|does not exist|holds no") as caught:
        read_case(discover([name]).case_names, Overrides())

    assert "private" not in str(caught.value).replace(name, "")


def test_what_is_checked_tells_no_name_outside(home: Path) -> None:
    paths, missing = expand(["fold*", "folder", "**"])

    assert paths == []
    assert len(missing) == 3
    assert "private" not in "".join(str(error) for _, error in missing)


@pytest.mark.parametrize("name", ["own", "own/*.pickle", "own/b.pickle", "./own/../own/a.pickle"])
def test_what_lies_below_is_read_through_links_too(home: Path, name: str) -> None:
    found = discover([name])

    assert read_case([(found.ranks[0].path if found.ranks else name)], Overrides()).snapshot


def test_without_the_variable_links_are_followed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)

    assert read_case(discover(["links/*.pickle"]).case_names, Overrides()).snapshot


def test_names_that_none_can_have_are_not_allowed(home: Path) -> None:
    (home / "circle").symlink_to("circle")
    is_allowed("circle")  # whatever this Python says of it, nothing is raised

    assert not is_allowed("a\0b")
    assert not is_allowed(f"{home}{os.sep}..")


def test_pattern_follows_no_links_to_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job/latest").mkdir(parents=True)
    (tmp_path / "job/latest/a.txt").touch()
    (tmp_path / "job/again").symlink_to(".")
    (tmp_path / "job/root").symlink_to("/")
    (tmp_path / "job/circle.txt").symlink_to("circle.txt")
    monkeypatch.chdir(tmp_path)

    assert matches("**/a.txt") == ["job/latest/a.txt"]
    assert matches("./j*/**") == ["./job/again", "./job/circle.txt", "./job/latest",
                                  "./job/latest/a.txt", "./job/root"]  # fmt: skip
    assert DiskTree().listing("job") == ([], ["job/latest"])
