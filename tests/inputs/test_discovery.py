from __future__ import annotations

import json
import zipfile
from pathlib import Path

import fleets
import pytest

from fragdoctor.errors import InputError
from fragdoctor.inputs.discovery import Discovery, discover
from fragdoctor.inputs.remote import is_remote

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.\n"


def note(path: Path, text: str = OOM) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def shape(found: Discovery, root: Path) -> list[tuple[str, int | None, tuple[str, ...]]]:
    def short(name: str) -> str:
        return Path(name).relative_to(root).as_posix()

    return [(short(r.path), r.rank, tuple(short(b) for b in r.beside)) for r in found.ranks]


def test_directory_of_snapshots_is_a_fleet(tmp_path: Path) -> None:
    fleets.write_job(tmp_path, 3)

    found = discover([str(tmp_path)])

    assert found.is_fleet
    assert [r.rank for r in found.ranks] == [0, 1, 2]


def test_directory_of_one_snapshot_and_its_notes_is_one_case(tmp_path: Path) -> None:
    fleets.write_rank(tmp_path / "snapshot.pickle")
    note(tmp_path / "oom.txt")
    fleets.write_rank(tmp_path / "old" / "rank0.pickle")

    found = discover([str(tmp_path)])

    assert not found.is_fleet
    assert found.case_names == (str(tmp_path),)


def test_folders_of_ranks_are_searched_and_keep_their_notes(tmp_path: Path) -> None:
    for i in range(2):
        fleets.write_rank(tmp_path / f"rank{i}" / "snapshot.pickle")
    note(tmp_path / "rank1" / "oom.txt")
    note(tmp_path / "train.log")

    found = discover([str(tmp_path)])

    assert shape(found, tmp_path) == [
        ("rank0/snapshot.pickle", 0, ()),
        ("rank1/snapshot.pickle", 1, ("rank1/oom.txt",)),
    ]
    assert found.ownerless == (str(tmp_path / "train.log"),)


def test_notes_find_their_rank_by_number_and_by_name(tmp_path: Path) -> None:
    fleets.write_job(tmp_path, 2)
    fleets.write_rank(tmp_path / "alpha.pickle")
    note(tmp_path / "logs" / "x").unlink()
    note(tmp_path / "oom_rank1.txt")
    note(tmp_path / "alpha.oom.txt")
    note(tmp_path / "rank9.log")

    found = discover([str(tmp_path)])

    assert shape(found, tmp_path) == [
        ("alpha.pickle", None, ("alpha.oom.txt",)),
        ("rank0.pickle", 0, ()),
        ("rank1.pickle", 1, ("oom_rank1.txt",)),
    ]
    assert found.ownerless == (str(tmp_path / "rank9.log"),)


def test_pattern_is_expanded_and_one_hit_is_one_case(tmp_path: Path) -> None:
    fleets.write_job(tmp_path, 3)

    assert len(discover([f"{tmp_path}/rank*.pickle"]).ranks) == 3
    assert discover([f"{tmp_path}/rank1*"]).case_names == (str(tmp_path / "rank1.pickle"),)


def test_pattern_without_a_hit_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Nothing matches"):
        discover([f"{tmp_path}/*.pickle"])


def test_truncated_snapshot_in_a_directory_is_a_rank(tmp_path: Path) -> None:
    fleets.write_job(tmp_path, 2)
    (tmp_path / "rank2.pickle").write_bytes(b"")

    assert len(discover([str(tmp_path)]).ranks) == 3


def test_name_that_leads_nowhere_is_a_rank_only_of_a_fleet(tmp_path: Path) -> None:
    fleets.write_job(tmp_path, 2)
    there = [str(tmp_path / "rank0.pickle"), str(tmp_path / "rank1.pickle")]
    gone = str(tmp_path / "gone.pickle")

    assert [r.path for r in discover([*there, gone]).ranks] == [gone, *there]
    assert discover([there[0], gone]).case_names == (there[0], gone)


def test_snapshot_and_a_text_of_any_name_are_one_case(tmp_path: Path) -> None:
    path = fleets.write_rank(tmp_path / "rank0.pickle")

    assert not discover([str(path), str(note(tmp_path / "notes.md"))]).is_fleet


def test_standard_input_is_one_case() -> None:
    assert discover(["-"]) == Discovery(case_names=("-",))


def test_logs_of_named_ranks_alone_are_a_fleet_and_others_one_case(tmp_path: Path) -> None:
    named = [str(note(tmp_path / "a" / f"rank{i}.log")) for i in range(2)]
    others = [str(note(tmp_path / "b" / f"part{i}.log")) for i in range(2)]

    assert [r.rank for r in discover(named).ranks] == [0, 1]
    assert discover(others) == Discovery(case_names=tuple(others))


def test_bundles_are_ranks_whether_folders_or_archives(tmp_path: Path) -> None:
    manifest = json.dumps({"rank": 0})
    fleets.write_rank(tmp_path / "rank0.bundle" / "snapshot.pickle")
    note(tmp_path / "rank0.bundle" / "bundle.json", manifest)
    with zipfile.ZipFile(tmp_path / "rank1.zip", "w") as archive:
        archive.writestr("bundle.json", manifest)
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("data.pkl", b"")

    found = discover([str(tmp_path)])

    assert shape(found, tmp_path) == [("rank0.bundle", 0, ()), ("rank1.zip", 1, ())]


def bundle(folder: Path, **facts: object) -> Path:
    fleets.write_rank(folder / "snapshot.pickle")
    manifest = {"format": "fragdoctor-bundle", "version": 1, "host": "h", **facts}
    note(folder / "bundle.json", json.dumps(manifest))
    return folder


def test_most_telling_bundle_of_each_process_stands_for_it(tmp_path: Path) -> None:
    for rank in range(2):
        bundle(tmp_path / f"a{rank}", rank=rank, pid=10 + rank, reason="exit")
        bundle(tmp_path / f"b{rank}", rank=rank, pid=10 + rank, reason="oom")

    assert [r.path for r in discover([str(tmp_path)]).ranks] == [
        str(tmp_path / "b0"),
        str(tmp_path / "b1"),
    ]


def test_bundles_of_one_process_are_one_case(tmp_path: Path) -> None:
    bundle(tmp_path / "a", pid=10, reason="exit")
    bundle(tmp_path / "b", pid=10, reason="oom")

    found = discover([str(tmp_path)])

    assert not found.is_fleet
    assert found.case_names == (str(tmp_path / "b"),)


def test_urls_are_ranks_that_nobody_opens_here() -> None:
    found = discover(["s3://bucket/rank0.pickle", "s3://bucket/rank1.pickle"])

    assert [(r.path, r.rank) for r in found.ranks] == [
        ("s3://bucket/rank0.pickle", 0),
        ("s3://bucket/rank1.pickle", 1),
    ]


@pytest.mark.parametrize(
    ("name", "remote"),
    [
        ("s3://b/x", True),
        ("memory://x", True),
        ("C:\\x", False),
        ("a/b", False),
        ("://x", False),
        ("CUDA out of memory ://", False),
    ],
)
def test_url_is_told_from_a_path(name: str, remote: bool) -> None:
    assert is_remote(name) is remote
