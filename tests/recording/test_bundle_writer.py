from __future__ import annotations

import json
from pathlib import Path

import pytest

from fragdoctor.recording.bundle_writer import add_file, update_manifest, write_bundle


def writer(text: str):
    def write(path: str) -> None:
        Path(path).write_text(text, encoding="utf-8")

    return write


def fails(path: str) -> None:
    writer("half")(path)
    raise RuntimeError("no")


def test_write_bundle_makes_the_folders_and_leaves_no_temporary(tmp_path) -> None:
    home = tmp_path / "a" / "b"

    path = write_bundle(str(home), "x", {"k": 1}, {"f.txt": writer("hello")})

    assert str(home / "x") == path
    assert ["x"] == [p.name for p in home.iterdir()]
    assert "hello" == (home / "x" / "f.txt").read_text(encoding="utf-8")
    manifest = json.loads((home / "x" / "bundle.json").read_text(encoding="utf-8"))
    assert {"k": 1, "files": ["f.txt"], "problems": []} == manifest


@pytest.mark.parametrize("as_file", [True, False])
def test_write_bundle_takes_the_next_name_where_one_is_taken(tmp_path, as_file) -> None:
    taken = tmp_path / "x"
    if as_file:
        taken.write_text("mine")
    else:
        taken.mkdir()
        (taken / "mine").write_text("mine")

    paths = [write_bundle(str(tmp_path), "x", {}, {}) for _ in range(2)]

    assert [str(tmp_path / "x-2"), str(tmp_path / "x-3")] == paths
    assert "mine" == (taken if as_file else taken / "mine").read_text()


def test_write_bundle_leaves_out_a_part_that_fails_and_names_it(tmp_path) -> None:
    path = write_bundle(str(tmp_path), "x", {}, {"bad": fails, "good": writer("g")})

    manifest = json.loads((tmp_path / "x" / "bundle.json").read_text(encoding="utf-8"))
    assert (["good"], ["bad: RuntimeError: no"]) == (manifest["files"], manifest["problems"])
    assert not (tmp_path / "x" / "bad").exists()
    assert path.endswith("x")


def test_write_bundle_that_is_interrupted_leaves_nothing(tmp_path) -> None:
    def interrupted(path: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_bundle(str(tmp_path), "x", {}, {"f": interrupted})

    assert [] == list(tmp_path.iterdir())


def test_files_and_fields_are_added_later_without_leftovers(tmp_path) -> None:
    path = write_bundle(str(tmp_path), "x", {"n": 1, "k": "v"}, {})

    add_file(path, "oom.txt", "text\n")
    update_manifest(path, n=2)

    manifest = json.loads((tmp_path / "x" / "bundle.json").read_text(encoding="utf-8"))
    assert (2, "v") == (manifest["n"], manifest["k"])
    assert {"oom.txt", "bundle.json"} == {p.name for p in (tmp_path / "x").iterdir()}
