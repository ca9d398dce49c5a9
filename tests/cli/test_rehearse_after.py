"""What follows a failure: the same command rehearsed, its recording continued, changes tried."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import run as run  # noqa: PLC0414 - a fixture
from command_line import Run
from msgspec.structs import replace
from rehearsal_stage import Stage

from fragdoctor.cli import rehearse
from fragdoctor.cli import run as run_verb
from fragdoctor.cli.rehearse import follow, program_of
from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.errors import ConfigError
from fragdoctor.inputs import cases
from fragdoctor.inputs.cases import read_case
from fragdoctor.model.case import Overrides
from fragdoctor.model.prescription import Prescription
from fragdoctor.model.simulation import Outlook, OutlookBasis, OutlookState
from fragdoctor.report.base import RenderOptions
from fragdoctor.units import MIB

SAMPLES = Path(__file__).parents[2] / "sample_snapshots"
PROGRAM = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

net = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
data = TensorDataset(torch.zeros(8192, 1024))
for (x,) in DataLoader(data, batch_size=2048):
    loss = (net(x.cuda()) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def stage(tmp_path) -> Stage:
    pytest.importorskip("torch")
    return Stage(tmp_path)


@pytest.mark.usefixtures("prepared")
def test_recording_is_continued_and_changes_are_tried(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.script(PROGRAM)
    capacity = 250 * MIB
    failed = stage.run("--capacity", f"{capacity}B", "--snapshot", "failed.pickle", "train.py")
    assert failed.returncode == 1, failed.stderr
    monkeypatch.chdir(stage.home)
    case = read_case(["failed.pickle"], Overrides(capacity_bytes=capacity))
    told: list[str] = []

    continued, prescription = follow(
        case, diagnose(case), [sys.executable, "train.py"], "2m", told.append
    )

    assert prescription.needs_bytes > capacity
    assert prescription.cure is not None
    assert told[0] == "the unchanged program"
    outlooks = [one.predicted.outlook for one in continued.rejected]
    assert any(o is not None and o.basis is OutlookBasis.COMPLETE for o in outlooks)


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("by", ["call", "setting", "nothing"])
def test_changes_are_tried_under_the_limit_in_force_at_the_failure(
    by: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whichever kind it is; the rehearsal itself has no limit, which shows the need."""
    limit, whole = 250 * MIB, 1000 * MIB
    call = "torch.cuda.set_per_process_memory_fraction(0.25)\n"
    lines = PROGRAM.splitlines(keepends=True)
    stage.script("".join([*lines[:4], call if by == "call" else "", *lines[4:]]))
    conf = "per_process_memory_fraction:0.25"
    words = ["--conf", conf] if by == "setting" else []
    had = limit if by == "nothing" else whole
    failed = stage.run(*words, "--capacity", f"{had}B", "--snapshot", "failed.pickle", "train.py")
    assert failed.returncode == 1, failed.stderr
    monkeypatch.chdir(stage.home)
    if words:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
    fraction = None if by == "nothing" else 0.25
    case = read_case(["failed.pickle"], Overrides(capacity_bytes=whole, memory_fraction=fraction))

    continued, found = follow(
        case, diagnose(case), [sys.executable, "train.py"], "2m", lambda _: None
    )

    assert found.capacity_bytes == limit
    assert found.needs_bytes > limit
    assert found.cure is not None
    assert found.cure.treatments[0].code != "expandable-segments"
    if by != "nothing":
        assert "memory fraction lets PyTorch have 250.00 MiB" in " ".join(found.notes)
        (raised,) = [r for r in continued.recommendations if r.code == "raise-memory-limit"]
        enough = float(raised.title.rpartition(" ")[2]) * whole
        assert enough >= found.needs_bytes


def test_analyze_says_what_it_lacks_where_no_command_was_recorded(run: Run) -> None:
    done = run("analyze", str(SAMPLES / "capacity_oom.pickle"), "--rehearse")

    assert done.code == 2
    assert "The recording does not say which command was run." in done.err


@pytest.mark.parametrize("is_there", [True, False])
def test_command_of_a_bundle_is_rehearsed_where_it_was_run(
    is_there: bool, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or here, if there is no such folder on this machine."""
    home, bundle = tmp_path / "home", tmp_path / "oom1-pid7"
    bundle.mkdir()
    shutil.copy(SAMPLES / "capacity_oom.pickle", bundle / "snapshot.pickle")
    facts = {"format": "fragdoctor-bundle", "version": 1, "reason": "oom", "folder": str(home)}
    (bundle / "bundle.json").write_text(json.dumps({**facts, "command": ["train.py"]}))
    here = Path.cwd()
    if is_there:
        home.mkdir()

    def follow(*_: object) -> None:
        raise ConfigError(f"in {Path.cwd()}")

    monkeypatch.setattr(rehearse, "follow", follow)
    done = run("analyze", str(bundle), "--rehearse")

    assert f"in {home if is_there else here}" in done.err
    assert Path.cwd() == here


@pytest.mark.parametrize(
    "words", [("--format", "json"), ("--continue-with", "capacity_oom.pickle")]
)
def test_rehearsal_of_a_bundle_is_for_text(
    words: Sequence[str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(SAMPLES)

    assert run("analyze", "capacity_oom.pickle", "--rehearse", *words).code == 2


def test_capacity_must_be_known() -> None:
    sample = SAMPLES / "empty.pickle"
    case = read_case([str(sample)], Overrides())

    with pytest.raises(ConfigError, match="how much of the GPU PyTorch could have"):
        follow(case, diagnose(case), ["python", "train.py"], "2m", lambda _: None)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["/venv/bin/python3.11", "-u", "train.py", "-m", "x"],
         (["train.py", "-m", "x"], False, "/venv/bin/python3.11")),
        (["python", "-X", "dev", "-m", "pack.train", "--a"],
         (["pack.train", "--a"], True, "python")),
        (["torchrun", "--nproc-per-node", "2", "train.py"],
         (["torchrun", "--nproc-per-node", "2", "train.py"], False, None)),
    ],
)  # fmt: skip
def test_command_is_taken_apart(words: Sequence[str], expected: tuple[Any, ...]) -> None:
    assert program_of(words) == expected


def test_script_on_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, first in [("tune", "#!/usr/bin/env python3"), ("go", "#!/bin/sh")]:
        (tmp_path / name).write_text(f"{first}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert program_of(["tune", "run"]) == ([str(tmp_path / "tune"), "run"], False, None)
    with pytest.raises(ConfigError, match="go is not a Python script"):
        program_of(["go"])


@pytest.mark.parametrize("words", [[], ["python", "-c", "print()"], ["sh", "go.sh"]])
def test_command_that_is_no_file_of_python_is_refused(words: Sequence[str]) -> None:
    with pytest.raises(ConfigError):
        program_of(words)


@pytest.mark.parametrize("state", [*OutlookState])
def test_outcome_of_the_settings_is_said_after_a_failure(
    state: OutlookState, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the rehearsal decides; what it rules out is not rerun, either."""
    case = read_case([str(SAMPLES / "capacity_oom.pickle")], Overrides())
    found = diagnose(case)
    refused = found.rejected[0]
    outlook = Outlook(state, OutlookBasis.COMPLETE)
    settled = replace(refused, predicted=replace(refused.predicted, outlook=outlook))
    continued = replace(found, recommendations=[], rejected=[settled])
    prescription = Prescription("train.py", "", 1, 2, False, [], [])
    monkeypatch.setattr(rehearse, "follow", lambda *_: (continued, prescription))
    monkeypatch.setattr(cases, "read_bundle", lambda _: case)

    left = run_verb._followed(Path("oom1"), found, ["train.py"], "30s", RenderOptions())

    assert left is continued
    said = "no setting of the allocator lets it finish" in capsys.readouterr().err
    assert said == (state is OutlookState.FAILS)
