"""Files that are no snapshot, given to every command: one sentence that names them, one code."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
from builders import pickled, small
from command_line import Run

SAMPLES = Path(__file__).parents[2] / "sample_snapshots"
OLD = {
    "snapshot0.pickle": pickle.dumps(small(), 0),
    "snapshot1.pickle": pickle.dumps(small(), 1),
    "weights.log": pickle.dumps({"w": [1.0, 2.0]}, 0),
    "notes": pickle.dumps([1, "two"], 1),
    "evil.pkl": b"cos\nsystem\n(S'true'\ntR.",
}
OTHER = {
    "config.pkl": (pickle.dumps({"lr": 0.1}, 4), 2),
    "number.pkl": (pickle.dumps(5, 2), 2),
    "ordered.pkl": (pickle.dumps(OrderedDict(a=1), 4), 3),
}
COMMANDS = {
    "analyze": ("analyze", "{}"),
    "analyze a folder": ("analyze", "."),
    "analyze ranks": ("analyze", "{}", "snapshot.pickle"),
    "check": ("check", "{}"),
    "check a folder": ("check", "."),
    "simulate": ("simulate", "{}"),
    "compare": ("compare", "snapshot.pickle", "{}"),
    "export": ("export", "{}"),
    "pack": ("pack", "{}", "--gpu", "24GiB"),
    "pack with another": ("pack", "{}", "snapshot.pickle", "--gpu", "24GiB"),
}
OOM = {"oom": ("oom", "{}")}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arguments(command: str, folder: Path, name: str, data: bytes) -> list[str]:
    (folder / name).write_bytes(data)
    words = [word.format(name) for word in (COMMANDS | OOM)[command]]
    if "snapshot.pickle" in words:
        (folder / "snapshot.pickle").write_bytes(pickled(small()))
    return words


@pytest.mark.parametrize("name", OLD)
@pytest.mark.parametrize("command", COMMANDS | OOM)
def test_pickle_of_an_old_protocol_is_refused_by_every_command(
    command: str, name: str, run: Run, folder: Path
) -> None:
    done = run(*arguments(command, folder, name, OLD[name]))

    said = (done.out + done.err).replace("\n", " ")
    assert done.code == 3
    assert name in said
    assert "not a memory snapshot" in said or "not a message or a log" in said
    assert "executed" in said or command in {"analyze ranks", "check", "check a folder"}


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("command", COMMANDS)
def test_pickle_of_something_else_is_named_and_called_no_snapshot(
    command: str, name: str, run: Run, folder: Path
) -> None:
    data, code = OTHER[name]

    done = run(*arguments(command, folder, name, data))

    assert f"{name} is not a memory snapshot: " in (done.out + done.err).replace("\n", " ")
    assert done.code == (0 if command == "analyze ranks" and code == 2 else code)


@pytest.mark.parametrize("name", OLD)
def test_pickle_of_an_old_protocol_is_no_model(name: str, run: Run, folder: Path) -> None:
    (folder / name).write_bytes(OLD[name])

    done = run("estimate", name, "--gpu", "24GiB")

    assert done.code == 3
    assert f"{name} is a pickle of protocol 0 or 1, not a model" in done.err.replace("\n", " ")
    assert "executed" in done.err


def test_old_pickle_on_standard_input_is_refused(run: Run) -> None:
    for command in ("analyze", "oom", "check", "simulate", "export"):
        assert run(command, "-", stdin=OLD["snapshot0.pickle"]).code == 3


def test_fleet_of_nothing_but_refused_files_is_refused(run: Run, folder: Path) -> None:
    for rank in range(3):
        (folder / f"rank{rank}.pickle").write_bytes(OLD["snapshot1.pickle"])

    done = run("analyze", ".")

    assert done.code == 3
    assert "None of the 3 ranks could be read." in done.err


@pytest.mark.parametrize("name", ["r.json", "r.html", "r.sarif", "r.xml"])
@pytest.mark.parametrize("command", ["analyze", "oom", "simulate", "check", "rehearse"])
def test_own_report_is_called_a_report_and_not_read_as_a_log(
    name: str, command: str, run: Run, tmp_path: Path
) -> None:
    report = tmp_path / name
    assert run(str(SAMPLES / "capacity_oom.pickle"), "-o", str(report)).code == 0

    read = run(command, str(report))

    assert read.code == 2
    said = " ".join(f"{read.out} {read.err}".split())
    assert "is a report of fragdoctor" in said
    assert "files that it was made from" in said or command in {"check", "rehearse"}


@pytest.mark.parametrize("name", ["t.json", "t.speedscope.json"])
def test_own_export_is_called_a_report_and_not_read_as_a_log(
    name: str, run: Run, tmp_path: Path
) -> None:
    exported = tmp_path / name
    run("export", str(SAMPLES / "capacity_oom.pickle"), "-o", str(exported))

    read = run("analyze", str(exported))

    assert read.code == 2
    assert "is a report of fragdoctor" in read.err


def test_hint_for_json_names_a_command_that_takes_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[{"loss": 2.0}, {"loss": 1.0}]')

    assert "Run: fragdoctor analyze" in run("simulate", str(tmp_path / "x.json")).err
