"""``fragdoctor estimate --model``: the user's own code, traced."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command_line import Run

pytest.importorskip("torch")

MODEL = """
import torch
from torch import nn

print("imported")

def build():
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))

def fails():
    return build().nothing
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_project.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_project", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def test_estimate_of_own_model_names_phases_lines_and_batch(run: Run) -> None:
    outcome = run(
        "estimate", "--model", "my_project:build", "--input-shape", "64,512", "--loss", "mean",
        "--gpu", "1GiB",
    )  # fmt: skip

    assert outcome.code == 0, outcome.err
    assert "Fits on 1GiB" in outcome.out
    assert "optimizer states" in outcome.out
    assert "my_project:build, 2.1M parameters" in outcome.out
    assert "imported" not in outcome.out


def test_estimate_of_own_model_as_json_is_one_document(run: Run) -> None:
    outcome = run(
        "estimate", "--model", "my_project:build", "--input-shape", "64x512", "--batch", "128",
        "--optimizer", "sgd", "--format", "json", "--gpu", "1GiB",
    )  # fmt: skip

    document = json.loads(outcome.out)
    assert document["route"] == "model"
    items = {item["id"]: item["largest_bytes"] for item in document["items"]}
    assert items["parameters"] == 2 * 512 * 2048 * 4 + (512 + 2048) * 4
    assert items["inputs"] == 128 * 512 * 4
    assert "optimizer_state" not in items


def test_error_in_own_model_is_one_sentence_with_its_line(run: Run) -> None:
    outcome = run("estimate", "--model", "my_project:fails")

    assert outcome.code == 2
    assert "Error: my_project:fails failed at my_project.py:11 in fails: Attr" in outcome.err
    assert "Traceback" not in outcome.err


def test_error_in_own_model_has_its_traceback_when_asked(run: Run) -> None:
    outcome = run("estimate", "--model", "my_project:fails", "--verbose")

    assert outcome.code == 2
    assert "Traceback" in outcome.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--params", "7B"], "--model takes no other model"),
        (["--input-shape", "8,a"], "--input-shape wants sizes such as 8,1024"),
        (["--dtype", "int4"], "cannot be traced in int4"),
        (["--input-shape", "8,512", "--input-dtype", "decimal"], "no dtype 'decimal' in torch"),
        (["--input-shape", "8,512", "--loss", "best"], "no loss 'best'"),
        ([], "gives no inputs for the model"),
    ],
)
def test_option_that_does_not_go_with_a_model_is_said(
    run: Run, words: list[str], sentence: str
) -> None:
    outcome = run("estimate", "--model", "my_project:build", *words)

    assert outcome.code == 2
    assert sentence in outcome.err


def test_missing_torch_names_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    outcome = run("estimate", "--model", "my_project:build")

    assert outcome.code == 2
    assert "fragdoctor[torch]" in outcome.err
