from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from fragdoctor import diagnose
from fragdoctor.errors import ConfigError, InputError, LimitExceeded, NotASnapshot, RefusedSnapshot
from fragdoctor.inputs import bundles as reader
from fragdoctor.inputs.bundles import FORMAT, VERSION, is_bundle, read_manifest, with_facts
from fragdoctor.inputs.cases import read_bundle, read_case, read_snapshot
from fragdoctor.model.case import BundleDevice, BundleFacts, Overrides
from fragdoctor.recording import bundle_writer as writer

GIB = 1 << 30
MANIFEST = {
    "format": "fragdoctor-bundle",
    "version": 1,
    "reason": "oom",
    "pid": 12,
    "rank": 3,
    "versions": {"torch": "2.12.1+cu130"},
    "devices": [{"index": 0, "total_bytes": 8 * GIB, "memory_fraction": 0.5}],
    "oom": {"device": 0},
}
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of "
    "which 1.00 GiB is free. Including non-PyTorch memory, this process has 7.00 GiB memory in "
    "use. Of the allocated memory 6.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by "
    "PyTorch but unallocated.\n"
)


@pytest.fixture
def snapshot(samples: Path) -> Path:
    return samples / "capacity_oom.pickle"


@pytest.fixture
def bundle(tmp_path: Path, snapshot: Path) -> Path:
    home = tmp_path / "oom1-pid12"
    home.mkdir()
    (home / "bundle.json").write_text(json.dumps(MANIFEST), encoding="utf-8")
    shutil.copy(snapshot, home / "snapshot.pickle")
    stats = {"0": {"allocated_bytes.all.current": 5, "num_ooms": 1}}
    (home / "stats.json").write_text(json.dumps(stats), encoding="utf-8")
    (home / "oom.txt").write_text(MESSAGE, encoding="utf-8")
    return home


def zipped(path: Path, members: dict[str, bytes], **more) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def members_of(bundle: Path, prefix: str = "") -> dict[str, bytes]:
    return {f"{prefix}{p.name}": p.read_bytes() for p in bundle.iterdir()}


def test_read_bundle_of_a_directory_is_one_case_with_what_the_manifest_knows(bundle) -> None:
    assert is_bundle(bundle)

    case = read_bundle(bundle)

    assert case.snapshot is not None
    assert {0: 4 * GIB} == case.snapshot.limits == read_snapshot(str(bundle)).limits
    assert case.oom is not None
    assert 1 == len(case.oom.messages)
    assert 5 == case.stats.of_device(0)[0].allocated_bytes
    assert Overrides(8 * GIB, memory_fraction=0.5, torch_version="2.12.1") == case.overrides
    assert (3, "oom", 0) == (case.bundle.rank, case.bundle.reason, case.bundle.oom_device)
    assert (str(bundle),) == case.sources


@pytest.mark.parametrize("prefix", ["", "oom1-pid12/"])
def test_read_bundle_of_a_zip_is_the_same_case(bundle, tmp_path, prefix) -> None:
    path = zipped(tmp_path / "b.zip", members_of(bundle, prefix))

    case = read_bundle(path)

    direct = read_bundle(bundle)
    assert (direct.overrides, direct.bundle) == (case.overrides, case.bundle)
    assert len(direct.snapshot.events.action) == len(case.snapshot.events.action)
    assert read_snapshot(str(path)).devices == read_snapshot(str(bundle)).devices == (0,)
    assert {"b.zip", bundle.name} == {p.name for p in tmp_path.iterdir()}  # nothing unpacked


def test_read_bundle_leaves_the_users_words_as_they_are(bundle) -> None:
    told = Overrides(GIB, memory_fraction=0.25, torch_version="2.4.0")

    assert told == read_bundle(bundle, told).overrides


def test_writer_and_reader_agree_on_names_and_version() -> None:
    assert (writer.FORMAT, writer.VERSION) == (FORMAT, VERSION)
    assert writer.MANIFEST == reader.MANIFEST
    assert {writer.SNAPSHOT, writer.STATS, writer.MESSAGE} == set(reader.MEMBERS)


def test_bundle_says_in_the_report_when_it_was_written(bundle) -> None:
    facts = {**MANIFEST, "n_ooms": 9, "n_skipped": 6, "problems": ["stats.json: no"]}
    (bundle / "bundle.json").write_text(json.dumps(facts), encoding="utf-8")

    notes = diagnose(read_bundle(bundle)).notes

    assert "The bundle of rank 3 was written at an out-of-memory error." in notes
    assert "The process had run out of memory 9 times by then, 6 of them without a bundle." in notes
    assert "Not in the bundle: stats.json: no." in notes


def test_facts_of_unequal_devices_are_nobodys_capacity() -> None:
    facts = BundleFacts(
        "oom", devices=(BundleDevice(0, total_bytes=GIB), BundleDevice(1, total_bytes=2 * GIB))
    )

    assert Overrides() == with_facts(Overrides(), facts)


def test_bundle_reads_beside_a_log_but_not_beside_another_bundle(bundle, tmp_path) -> None:
    log = tmp_path / "train.log"
    log.write_text(MESSAGE, encoding="utf-8")
    other = tmp_path / "other"
    shutil.copytree(bundle, other)
    (other / "snapshot.pickle").unlink()

    assert 2 == len(read_case([str(bundle), str(log)], Overrides()).oom.messages)
    with pytest.raises(ConfigError, match="2 bundles"):
        read_case([str(bundle), str(other)], Overrides())


def test_bundle_without_any_part_says_why(bundle) -> None:
    for name in ("snapshot.pickle", "stats.json", "oom.txt"):
        (bundle / name).unlink()

    with pytest.raises(InputError, match="nothing else"):
        read_bundle(bundle)


@pytest.mark.parametrize(
    "text",
    ["[" * 9, '{"0": [1, 2]}', '{"0": {"allocated_bytes.all.current": 1' + "0" * 5000 + "}}"],
)
def test_bundle_whose_statistics_are_damaged_is_read_without_them_and_says_so(bundle, text) -> None:
    (bundle / "stats.json").write_text(text, encoding="utf-8")

    case = read_bundle(bundle)

    assert case.snapshot is not None
    assert case.bundle is not None
    assert any("stats.json cannot be used" in problem for problem in case.bundle.unusable)


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"no pickle at all"])
def test_bundle_whose_snapshot_is_damaged_is_diagnosed_without_it_and_says_so(bundle, data) -> None:
    whole = (bundle / "snapshot.pickle").read_bytes()
    (bundle / "snapshot.pickle").write_bytes(data or whole[: len(whole) // 2])

    diagnosis = diagnose(read_bundle(bundle))

    assert diagnosis.case.snapshot is None
    assert diagnosis.case.oom is not None
    (note,) = [n for n in diagnosis.notes if "snapshot.pickle cannot be used: " in n]
    assert str(bundle) not in note
    with pytest.raises(InputError, match=r"snapshot\.pickle cannot be used"):
        read_snapshot(str(bundle))


def test_bundle_with_a_damaged_snapshot_alone_names_it_once(bundle) -> None:
    for name in ("stats.json", "oom.txt"):
        (bundle / name).unlink()
    (bundle / "snapshot.pickle").write_bytes(b"\x80\x04")

    with pytest.raises(InputError, match=r"nothing to judge: snapshot\.pickle cannot be") as caught:
        read_bundle(bundle)

    assert caught.value.sentence.count(str(bundle)) == 1
    assert caught.value.exit_code == 2


def test_bundle_with_a_useless_text_alone_says_its_path_once(bundle) -> None:
    for name in ("stats.json", "snapshot.pickle"):
        (bundle / name).unlink()
    (bundle / "oom.txt").write_text("nothing\n", encoding="utf-8")

    with pytest.raises(InputError, match=r"oom\.txt cannot be used: it holds no") as caught:
        read_bundle(bundle)

    assert caught.value.sentence.count(str(bundle)) == 1


def test_bundle_whose_snapshot_is_hostile_is_refused_and_names_it(bundle) -> None:
    hostile = b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04echo\x85R."
    (bundle / "snapshot.pickle").write_bytes(hostile)

    with pytest.raises(RefusedSnapshot, match=r"snapshot\.pickle") as caught:
        read_bundle(bundle)

    assert caught.value.exit_code == 3


def test_zip_of_torch_save_is_no_bundle(tmp_path) -> None:
    path = zipped(tmp_path / "model.pt", {"model/data.pkl": b"x", "model/version": b"3"})

    assert not is_bundle(path)
    with pytest.raises(RefusedSnapshot, match=r"model\.pt is not a memory snapshot"):
        read_case([str(path)], Overrides())


@pytest.mark.parametrize(
    "names",
    [
        ("../bundle.json",),
        ("/bundle.json",),
        ("a/b/bundle.json",),
        ("a/bundle.json", "b/bundle.json"),
    ],
)
def test_zip_whose_manifest_is_elsewhere_is_refused(tmp_path, names) -> None:
    path = zipped(tmp_path / "b.zip", dict.fromkeys(names, json.dumps(MANIFEST).encode()))

    with pytest.raises(InputError):
        read_case([str(path)], Overrides())
    assert ["b.zip"] == [p.name for p in tmp_path.iterdir()]


@pytest.mark.slow
def test_zip_that_unpacks_to_far_more_is_refused(bundle, tmp_path) -> None:
    members = members_of(bundle)
    members["oom.txt"] = b"\n" * (200 << 20)
    path = zipped(tmp_path / "b.zip", members)

    with pytest.raises(LimitExceeded, match="unpacks to more"):
        read_bundle(path)


def test_zip_with_a_member_twice_is_refused(bundle, tmp_path) -> None:
    path = zipped(tmp_path / "b.zip", members_of(bundle))
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("oom.txt", b"another")

    with pytest.raises(RefusedSnapshot, match="twice"):
        read_bundle(path)


def test_zip_with_too_many_members_is_refused(bundle, tmp_path) -> None:
    many = {f"f{n}": b"" for n in range(1001)}
    path = zipped(tmp_path / "b.zip", {**members_of(bundle), **many})

    with pytest.raises(LimitExceeded, match="members"):
        read_bundle(path)


@pytest.mark.slow
def test_zip_that_is_damaged_anywhere_is_refused_or_read_but_never_crashes(
    bundle, tmp_path
) -> None:
    (bundle / "snapshot.pickle").write_bytes(b"\x80\x04]\x94.")
    whole = zipped(tmp_path / "b.zip", members_of(bundle)).read_bytes()
    path = tmp_path / "c.zip"

    for at in range(4, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            read_case([str(path)], Overrides())
        except InputError:
            continue


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[" * 100_000, b"[]", b"null", b'{"format": "x"}', b"\xff\xfe\x00", b'"a"'],
)
def test_manifest_that_is_none_is_not_a_snapshot(data) -> None:
    with pytest.raises(NotASnapshot):
        read_manifest(data, "b")


def test_manifest_of_a_later_version_is_said_to_be_one() -> None:
    with pytest.raises(InputError, match="another version"):
        read_manifest(json.dumps({**MANIFEST, "version": 2}).encode(), "b")


@pytest.mark.parametrize(
    "junk", [None, True, -1, 1 << 70, 1e300, "x" * 10_000, [], {}, [[]], [{}], {"a": {}}]
)
def test_manifest_with_junk_in_any_field_is_read_without_it(junk) -> None:
    for field in (
        *MANIFEST,
        "command",
        "exception",
        "environment",
        "n_ooms",
        "problems",
        "time",
        "traceback",
    ):
        if field in ("format", "version"):
            continue
        facts = read_manifest(json.dumps({**MANIFEST, field: junk}).encode(), "b")

        assert facts.pid in (12, None)
        assert all(len(text) <= 4096 for text in (facts.time, facts.signal, *facts.command))


def test_traceback_of_a_manifest_is_read_without_what_is_no_line() -> None:
    lines = [["a.py", 5, "main"], ["b.py"], "c.py", ["d.py", "6", None]]

    facts = read_manifest(json.dumps({**MANIFEST, "traceback": lines}).encode(), "b")

    assert [str(line) for line in facts.traceback] == ["a.py:5 in main", "d.py"]


def test_manifest_that_is_too_long_is_refused(bundle) -> None:
    (bundle / "bundle.json").write_bytes(b" " * (5 << 20))

    with pytest.raises(LimitExceeded, match="manifest"):
        read_bundle(bundle)


def test_is_bundle_never_raises(tmp_path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "x.zip").write_bytes(b"PK\x03\x04 and nothing")

    assert not any(
        is_bundle(p) for p in (tmp_path, fifo, tmp_path / "x.zip", tmp_path / "no", "a\0b")
    )


def test_bundle_from_a_pipe_is_told_to_be_given_by_name(bundle, tmp_path, monkeypatch) -> None:
    data = zipped(tmp_path / "b.zip", members_of(bundle)).read_bytes()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))

    with pytest.raises(NotASnapshot) as caught:
        read_case(["-"], Overrides())
    assert "by its file name" in caught.value.hint
