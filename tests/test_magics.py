"""The cell magics, with a shell that notes what is registered and runs cells as IPython does."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
from rehearsal_stage import TRAINING

import fragdoctor


class Shell:
    def __init__(self) -> None:
        self.magics: dict[str, Any] = {}
        self.ran: list[str] = []

    def register_magic_function(self, function: Any, kind: str, name: str) -> None:
        assert kind == "cell"
        self.magics[name] = function

    def run_cell(self, cell: str) -> None:
        self.ran.append(cell)


@pytest.fixture
def shell() -> Shell:
    shell = Shell()
    fragdoctor.load_ipython_extension(shell)
    return shell


@pytest.mark.usefixtures("prepared")
def test_cell_is_rehearsed_as_a_program(shell: Shell) -> None:
    lines = [line.removeprefix("    ") for line in TRAINING.splitlines()]

    found = shell.magics["cure"](" 4GiB", "\n".join([*lines, "train(3)"]))

    assert found.fits
    assert "Fits in 4.00 GiB as it is" in found._repr_html_()
    assert repr(found).endswith("of 4.00 GiB: fits as it is>")
    assert shell.ran == []


@pytest.mark.usefixtures("prepared")
def test_report_is_printed_where_no_html_is_shown(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = "import torch\n%matplotlib inline\nkept = torch.empty(1 << 20, device='cuda')\n"

    shell.magics["cure"]("1GiB", cell)
    assert "Fits in 1.00 GiB as it is" in capsys.readouterr().out

    shell.kernel = object()  # type: ignore[attr-defined]
    shell.magics["cure"]("1GiB", cell)
    assert not capsys.readouterr().out


@pytest.mark.usefixtures("prepared")
def test_cell_is_tried_on_a_named_gpu(shell: Shell) -> None:
    found = shell.magics["cure"]("rtx4090", "import torch\ntorch.empty(1 << 20, device='cuda')\n")

    assert found.fits
    assert 22 << 30 < found.capacity_bytes < 24 << 30


@pytest.mark.usefixtures("prepared")
def test_traceback_of_a_cell_that_fails_is_shown(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell.magics["cure"]("1GiB", "import torch\nmodel = Net().cuda()") is None

    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said
    assert said.endswith("what other cells define is not there.\n")


@pytest.mark.parametrize("line", ["", "much"])
def test_capacity_that_is_missing_is_asked_for_in_a_sentence(
    shell: Shell, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell.magics["cure"](line, "pass") is None
    assert capsys.readouterr().err.strip()


def test_cell_is_run_under_the_recorder(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(fragdoctor, "record", lambda bundle: nullcontext(asked.append(bundle)))
    monkeypatch.setattr(fragdoctor, "diagnose", lambda bundle: ("diagnosis of", bundle))
    shell.kernel = object()  # type: ignore[attr-defined]

    found = shell.magics["gpu_memory"]("", "x = 1")

    assert shell.ran == ["x = 1"]
    assert found == ("diagnosis of", asked[0])


def test_loading_the_package_does_not_load_the_magics() -> None:
    code = "import fragdoctor, sys; sys.exit('fragdoctor.magics' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
