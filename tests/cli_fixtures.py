"""Fixtures for the tests of the command line."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
from command_line import FakePipeline, Outcome, Run, Stdin

from fragdoctor.cli.app import main


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "CI", "TERM"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs ``fragdoctor ARGS...`` and returns its outcome."""

    def call(*args: str, stdin: bytes = b"", is_terminal: bool = False) -> Outcome:
        monkeypatch.setattr(sys, "stdin", Stdin(stdin, is_terminal=is_terminal))
        with pytest.raises(SystemExit) as exit_info:
            main(list(args))
        out, err = capsys.readouterr()
        return Outcome(int(exit_info.value.code or 0), out, err)

    return call


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePipeline]:
    """Replace the diagnosis by a fixed one, so that a test covers only the command line."""
    fake = FakePipeline()
    module = types.ModuleType("fragdoctor.diagnosis.pipeline")
    module.diagnose = fake.diagnose  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fragdoctor.diagnosis.pipeline", module)
    return fake
