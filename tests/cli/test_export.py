from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from builders import pickled, small
from command_line import Run

import fragdoctor


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pickle").write_bytes(pickled(small()))
    return tmp_path


@pytest.mark.parametrize("table", ["events", "blocks", "segments", "allocations"])
def test_csv_goes_to_standard_output(
    here: Path, table: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    from fragdoctor.cli.app import main

    with pytest.raises(SystemExit) as end:
        main(["export", "a.pickle", "--table", table])

    out, _ = capfdbinary.readouterr()
    assert not end.value.code
    assert out.startswith(b"device,")
    assert out.count(b"\n") > 1


def test_formats_are_written_to_files(run: Run, here: Path) -> None:
    for name in ("csv", "trace", "speedscope", "snapshot"):
        assert run("export", "a.pickle", "--format", name, "-o", f"out.{name}").code == 0

    assert json.loads((here / "out.trace").read_text())["traceEvents"]
    assert json.loads((here / "out.speedscope").read_text())["profiles"]
    assert pickle.loads((here / "out.snapshot").read_bytes())["segments"]


def test_redacted_snapshot_holds_no_name_of_the_users_files(run: Run, here: Path) -> None:
    outcome = run("export", "a.pickle", "--format", "snapshot", "--redact", "-o", "b.pickle")

    assert outcome.code == 0
    assert b"train.py" not in (here / "b.pickle").read_bytes()
    assert b"train.py" in (here / "a.pickle").read_bytes()
    before, after = (fragdoctor.diagnose(fragdoctor.load(n)) for n in ("a.pickle", "b.pickle"))
    assert before.verdict == after.verdict


@pytest.mark.parametrize("name", ["csv", "trace", "speedscope"])
def test_redact_works_for_every_format(run: Run, here: Path, name: str) -> None:
    run("export", "a.pickle", "--format", name, "--redact", "-o", "out")

    assert "train.py" not in (here / "out").read_text()


@pytest.mark.parametrize(
    "args",
    [
        ("none.pickle",),
        ("a.pickle", "--format", "xlsx"),
        ("a.pickle", "--table", "frames"),
        ("a.pickle", "--device", "7"),
        ("a.pickle", "-o", "a.pickle", "--force"),
        ("a.pickle", "-o", "old.csv"),
        ("a.pickle", "-o", "no/such/out.csv"),
        ("notes.txt",),
    ],
)
def test_what_cannot_be_exported_is_an_error(run: Run, here: Path, args: tuple[str, ...]) -> None:
    (here / "old.csv").write_text("mine")
    (here / "notes.txt").write_text("hello")

    assert run("export", *args).code == 2
    assert (here / "old.csv").read_text() == "mine"


def test_failed_export_leaves_no_file(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fragdoctor.export import trace_events

    def broken(*_: object) -> object:
        yield "{"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_events, "trace_parts", broken)

    assert run("export", "a.pickle", "--format", "trace", "-o", "out.json").code == 2
    assert [p.name for p in here.iterdir()] == ["a.pickle"]
