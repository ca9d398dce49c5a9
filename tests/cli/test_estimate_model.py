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

class Misfit(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(512, 64)

    def forward(self, x):
        return self.layer(x[:, :5])

def misfit():
    return Misfit(), torch.zeros(4, 512)

def ends():
    raise SystemExit(7)

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(512, 64)

    def forward(self, x):
        y = self.layer(x)
        if y.abs().max().item() > 1.0:
            y = y * 2
        return y

def branching():
    return Branching(), torch.zeros(4, 512)

def complete():
    return {
        "model": build(), "inputs": torch.zeros(4, 512), "loss_fn": lambda y: y.mean(),
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
    }

def own_step():
    def step(model, optimizer, inputs):
        model(inputs).mean().backward()
        optimizer.step()

    return {"model": build(), "inputs": torch.zeros(4, 512), "train_step": step}
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_project.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_project", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


@pytest.mark.slow
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


def test_failing_operation_is_one_sentence_and_logs_nothing(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = run("estimate", "--model", "my_project:misfit")

    assert outcome.code == 2
    assert "my_project.py:19 in forward: RuntimeError: mat1 and mat2 shapes" in outcome.err
    assert caplog.text == ""


def test_factory_that_ends_the_program_is_said(run: Run) -> None:
    outcome = run("estimate", "--model", "my_project:ends")

    assert outcome.code == 2
    assert "ended the program at my_project.py:25 in ends" in outcome.err


def test_syntax_error_is_told_with_its_own_line(run: Run, project: Path) -> None:
    (project / "broken_project.py").write_text("x = 1\ndef f(:\n", encoding="utf-8")

    outcome = run("estimate", "--model", "broken_project:f")

    assert outcome.code == 2
    assert "broken_project.py:2: SyntaxError" in outcome.err


def test_error_in_own_model_has_its_traceback_when_asked(run: Run) -> None:
    outcome = run("estimate", "--model", "my_project:fails", "--verbose")

    assert outcome.code == 2
    assert "Traceback" in outcome.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--params", "7B"], "--params does not go with --model"),
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


def test_value_that_the_model_reads_is_told_with_its_line(run: Run) -> None:
    outcome = run("estimate", "--model", "my_project:branching", "--loss", "mean")

    line = MODEL.splitlines().index("        if y.abs().max().item() > 1.0:") + 1
    text = " ".join(outcome.out.split())
    assert f"The model read a value (.item()) at my_project.py:{line}; a trace has no" in text
    assert "branches that depend on it may differ" in text


def test_model_that_reads_no_value_has_no_such_note(run: Run) -> None:
    outcome = run("estimate", "--model", "my_project:complete", "--dtype", "amp-fp16")

    assert outcome.code == 0, outcome.err
    assert ".item()" not in outcome.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("complete", ["--optimizer", "adamw"]),
        ("complete", ["--loss", "ce"]),
        ("complete", ["--input-shape", "8,512"]),
        ("own_step", ["--grad-accumulation", "2"]),
        ("own_step", ["--dtype", "amp-bf16"]),
        ("own_step", ["--loss", "mean"]),
    ],
)
def test_option_that_the_factory_decides_is_refused(
    run: Run, factory: str, words: list[str]
) -> None:
    outcome = run("estimate", "--model", f"my_project:{factory}", *words)

    assert outcome.code == 2
    assert f"{words[0]} does not go with a factory that gives its own" in outcome.err
