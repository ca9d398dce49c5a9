from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fragdoctor.cli import console
from fragdoctor.errors import ConfigError
from fragdoctor.model.hooks import report_progress

SCRIPT = """
import sys; sys.path[:0] = {paths!r}
import diagnoses
from fragdoctor.cli import console
from fragdoctor.report.base import render
console.prepare_streams()
shown = render("analyze", "text", diagnoses.fragmentation(), console.look_of(None))
console.write_report(shown, None)
"""


def on_a_terminal(root: Path, **environment: str) -> str:
    """Return what a report looks like on a pseudo-terminal of 100 columns."""
    leader, follower = pty.openpty()
    script = SCRIPT.format(paths=[str(root), str(root / "tests")])
    env = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}}
    env |= {"TERM": "xterm", "PYTHONIOENCODING": "utf-8", **environment}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=follower, stdin=follower, env=env
    ) as process:
        os.close(follower)
        chunks = []
        while True:
            try:
                chunk = os.read(leader, 65536)
            except OSError:
                break
            if not chunk:
                break
            chunks.append(chunk)
        process.wait(timeout=60)
    os.close(leader)
    return b"".join(chunks).decode()


def test_terminal_gets_colour_and_unicode(root: Path) -> None:
    shown = on_a_terminal(root)

    assert "\x1b[1;31mFragmentation (proven)" in shown
    assert "\u2588" in shown
    assert "\u2502" in shown  # the axis of the timeline


def test_terminal_with_no_color_keeps_unicode(root: Path) -> None:
    shown = on_a_terminal(root, NO_COLOR="1")

    assert "\x1b[" not in shown
    assert "\u2588" in shown


def test_terminal_of_ascii_gets_ascii(root: Path) -> None:
    shown = on_a_terminal(root, PYTHONIOENCODING="ascii", NO_COLOR="1")

    assert shown.isascii()
    assert "[####" in shown


def test_dumb_terminal_gets_neither(root: Path) -> None:
    shown = on_a_terminal(root, TERM="dumb")

    assert shown.isascii()
    assert "\x1b" not in shown


def test_encoding_that_lacks_a_letter_writes_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))

    console.prepare_streams()
    console.write_report("caf\u00e9\n", None)

    assert raw.getvalue() == b"caf\\xe9\n"


def test_write_report_does_not_overwrite_what_appeared_meanwhile(tmp_path: Path) -> None:
    target = tmp_path / "r.txt"
    target.write_text("mine")

    with pytest.raises(ConfigError, match="exists"):
        console.write_report("new", target)

    assert target.read_text() == "mine"


def test_write_report_follows_a_link_instead_of_replacing_it(tmp_path: Path) -> None:
    target, link = tmp_path / "r.txt", tmp_path / "link.txt"
    target.write_text("old")
    link.symlink_to(target)

    console.write_report("new", link, force=True)

    assert link.is_symlink()
    assert target.read_text() == "new"


def test_link_that_leads_nowhere_needs_force(tmp_path: Path) -> None:
    target, link = tmp_path / "elsewhere.txt", tmp_path / "r.txt"
    link.symlink_to(target)

    for refuse in (
        console.check_output,
        lambda o, force: console.write_report("x", o, force=force),
    ):
        with pytest.raises(ConfigError, match=r"exists\."):
            refuse(link, force=False)
    assert not target.exists()
    console.write_report("new", link, force=True)

    assert target.read_text() == "new"
    assert link.is_symlink()


def test_progress_off_a_terminal_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with console.Progress("Replaying") as progress:
        progress.update(1, 2)

    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_after_a_second_and_clears(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    monkeypatch.delenv("CI", raising=False)

    with console.Progress("Replaying") as progress:
        progress.update(1, 9)
        assert stream.getvalue() == ""
        now[0] += 1.5
        progress.update(5, 9)
        assert "Replaying 5 of 9" in stream.getvalue()

    assert stream.getvalue().endswith("\r\x1b[K")


def eager_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return what stands in for standard error; progress shows at once."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(console, "_PROGRESS_AFTER_S", 0.0)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("CI", raising=False)
    return stream


def test_progress_shows_what_the_work_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = eager_terminal(monkeypatch)
    with console.Progress("Reading"):
        report_progress("Reading", 340_000_000, 1_000_000_000)
        report_progress("Analysing: growth")
        report_progress("Replaying", 3, 13)
    report_progress("Nobody hears this")

    lines = [line.removesuffix("\x1b[K") for line in terminal.getvalue().split("\r")[1:]]
    assert lines == [
        "Reading 34% (0 s)",
        "Analysing: growth (0 s)",
        "Replaying 3 of 13 (0 s)",
        "",
    ]


def test_progress_renews_the_line_while_the_work_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = eager_terminal(monkeypatch)
    monkeypatch.setattr(console, "_PROGRESS_AT_LEAST_EVERY_S", 0.02)
    renewed = threading.Event()
    write = terminal.write

    def counted(text: str) -> int:
        if terminal.getvalue().count("Undoing the trace") > 2:
            renewed.set()
        return write(text)

    monkeypatch.setattr(terminal, "write", counted)

    with console.Progress("Reading"):
        report_progress("Undoing the trace")
        was_renewed = renewed.wait(30)

    assert was_renewed
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_progress_line_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = eager_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "30")

    with console.Progress("Reading"):
        report_progress("Analysing: the steps of the program of the user")

    lines = terminal.getvalue().replace("\x1b[K", "").split("\r")
    assert max(map(len, lines)) == 29


def test_progress_of_several_files_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = eager_terminal(monkeypatch)
    with console.Progress("Judged") as progress:
        for name in progress.each(["a", "b"]):
            report_progress(f"Reading {name}")

    shown = terminal.getvalue()
    assert "File 1 of 2: Reading a" in shown
    assert "File 2 of 2: Reading b" in shown
    assert "Judged 2 of 2" in shown
