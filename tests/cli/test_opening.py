"""Named pipes: one without a writer is refused, one with a slow writer is read."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from fragdoctor import opening
from fragdoctor.errors import InputError
from fragdoctor.opening import open_readable

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
SAMPLE = Path(__file__).parents[2] / "sample_snapshots" / "small_holes_oom.pickle"


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.json"
    os.mkfifo(path)
    monkeypatch.setattr(opening, "WRITER_WAIT_S", 0.3)
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["analyze", "{}"],
        ["oom", "{}"],
        ["estimate", "{}"],
        ["check", "{}"],
        ["compare", "{}", str(SAMPLE)],
        ["simulate", "{}"],
        ["export", "{}", "--format", "csv"],
        ["check", str(SAMPLE), "--baseline", "{}"],
        ["check", str(SAMPLE), "--config", "{}"],
    ],
)
def test_pipe_without_a_writer_is_refused_in_a_sentence(run, pipe: Path, words) -> None:
    start = time.monotonic()

    result = run(*(word.format(pipe) for word in words))

    assert time.monotonic() - start < 9
    assert result.code in (1, 2)
    assert "Nobody writes to the pipe" in result.out + result.err
    assert "Traceback" not in result.err


def test_wait_ends_after_ten_seconds() -> None:
    assert opening.WRITER_WAIT_S == 10


def test_thread_that_waited_ends(pipe: Path) -> None:
    before = threading.active_count()

    with pytest.raises(InputError):
        open_readable(pipe)
    time.sleep(0.1)

    assert threading.active_count() == before


def test_writer_may_come_late_and_be_slow(pipe: Path) -> None:
    def write() -> None:
        time.sleep(0.1)
        with pipe.open("wb", buffering=0) as file:
            time.sleep(0.6)  # longer than one waits for a writer: there is one
            file.write(b"late")

    thread = threading.Thread(target=write)
    thread.start()
    with open_readable(pipe) as file:
        data = file.readall()
    thread.join()

    assert data == b"late"


def test_files_are_opened_as_ever(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")

    with open_readable(tmp_path / "a") as file:
        assert file.readall() == b"content"
    with pytest.raises(FileNotFoundError):
        open_readable(tmp_path / "missing")


@pytest.mark.parametrize("words", [["analyze", str(SAMPLE)], ["export", str(SAMPLE)]])
def test_pipe_without_a_reader_is_refused_in_a_sentence(
    run, pipe: Path, words, monkeypatch
) -> None:
    monkeypatch.setattr(opening, "READER_WAIT_S", 0.3)
    start = time.monotonic()
    kind = "csv" if words[0] == "export" else "text"

    result = run(*words, "--format", kind, "-o", str(pipe))

    assert time.monotonic() - start < 9
    assert result.code == 2
    assert "Nobody reads the pipe" in result.err
    assert "Traceback" not in result.err


def test_reader_may_come_late_and_be_slow(run, pipe: Path) -> None:
    read: list[bytes] = []

    def take() -> None:
        time.sleep(0.4)
        with pipe.open("rb", buffering=0) as file:
            time.sleep(0.4)
            while part := file.read(1000):
                read.append(part)

    thread = threading.Thread(target=take)
    thread.start()
    result = run("analyze", str(SAMPLE), "--format", "html", "-o", str(pipe))
    thread.join(20)

    assert result.code == 0
    assert b"".join(read).endswith(b"</html>\n")
    assert len(b"".join(read)) > 100_000  # more than a pipe holds
