from __future__ import annotations

import json
import zipfile
from pathlib import Path

from fragdoctor.inputs.folders import find_bundles, pack


def make(home: Path, name: str, reason: str, time: str, **more) -> Path:
    place = home / name
    place.mkdir(parents=True)
    manifest = {"format": "fragdoctor-bundle", "version": 1, "reason": reason, "time": time, **more}
    (place / "bundle.json").write_text(json.dumps(manifest), encoding="utf-8")
    return place


def test_find_bundles_puts_the_failure_that_ended_a_program_first(tmp_path) -> None:
    make(tmp_path, "rank0-exit", "exit", "1")
    make(tmp_path, "rank1-oom1", "oom", "2")
    make(tmp_path, "rank2-oom1", "oom", "4", ended_program=True)
    make(tmp_path, "rank3-oom1", "oom", "3", ended_program=True)
    make(tmp_path, "rank4-sigterm", "signal", "0")
    make(tmp_path, ".half.tmp", "oom", "0")
    (tmp_path / "junk").mkdir()

    names = [found.path.name for found in find_bundles(tmp_path)]

    assert ["rank3-oom1", "rank2-oom1", "rank1-oom1", "rank4-sigterm", "rank0-exit"] == names


def test_find_bundles_of_nothing_is_empty(tmp_path) -> None:
    assert () == find_bundles(tmp_path / "no")


def test_pack_makes_a_zip_and_takes_the_directory_away(tmp_path) -> None:
    place = make(tmp_path, "b", "exit", "1")
    (tmp_path / "b.zip").write_text("mine")

    path = pack(place)

    assert (tmp_path / "b-2.zip") == path
    assert ["b/bundle.json"] == zipfile.ZipFile(path).namelist()
    assert {"b.zip", "b-2.zip"} == {p.name for p in tmp_path.iterdir()}
    assert "mine" == (tmp_path / "b.zip").read_text()
