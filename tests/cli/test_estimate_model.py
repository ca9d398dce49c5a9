"""``fragdoctor estimate --model``: steps of the user's own model, rehearsed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command_line import Run

pytestmark = pytest.mark.usefixtures("prepared")

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

class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.lora_A = nn.Linear(1024, 4096, bias=False)

    def forward(self, x):
        return self.lora_A(x.to(self.lora_A.weight.dtype))

def plain():
    return Adapted(), torch.zeros(4, 1024)

def adapted():
    model, inputs = plain()
    model.peft_config = {}
    return model, inputs

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

def fed():
    return build(), torch.zeros(64, 512)

def branching():
    return Branching(), torch.zeros(4, 512)
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_project.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_project", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def test_own_model_is_rehearsed_as_a_program_is(run: Run) -> None:
    outcome = run(
        "estimate", "--model", "my_project:fed",
        "--gpu", "1GiB",
    )  # fmt: skip

    assert outcome.code == 0, outcome.err
    assert "Fits in the 574.00 MiB that PyTorch has on 1GiB" in outcome.out
    assert "optimizer state" in outcome.out
    assert "Sequential has 2,099,712 parameters" in outcome.out
    assert "imported" not in outcome.out


@pytest.mark.slow
def test_batches_are_searched_on_each_gpu(run: Run) -> None:
    outcome = run(
        "estimate", "--model", "my_project:fed",
        "--batch", "1..100000", "--gpu", "1GiB", "--gpu", "2GiB",
    )  # fmt: skip

    assert outcome.code == 0, outcome.err
    assert "The largest batch that fits on 1GiB is" in outcome.out
    assert "The largest batch that fits on 2GiB is" in outcome.out


def test_own_model_as_json_is_one_document(run: Run) -> None:
    outcome = run(
        "estimate", "--model", "my_project:fed", "--batch", "128",
        "--optimizer", "sgd", "--format", "json", "--gpu", "1GiB",
    )  # fmt: skip

    found = json.loads(outcome.out)["rehearsal"]
    assert found["fits"]
    assert found["batch"] == 128


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        ("fails", "failed at {here}my_project.py:11 in fails: AttributeError"),
        ("misfit", "failed at {here}my_project.py:19 in forward: RuntimeError: mat1 and mat2"),
        ("ends", "The program ended with exit code 7"),
    ],
)
def test_error_in_own_model_is_one_sentence_with_its_line(
    run: Run, project: Path, factory: str, sentence: str
) -> None:
    outcome = run("estimate", "--model", f"my_project:{factory}")

    assert outcome.code == 2
    assert sentence.format(here=f"{project}/") in outcome.err


def test_syntax_error_is_told_with_its_own_line(run: Run, project: Path) -> None:
    (project / "broken_project.py").write_text("x = 1\ndef f(:\n", encoding="utf-8")

    outcome = run("estimate", "--model", "broken_project:f")

    assert outcome.code == 2
    assert 'broken_project.py", line 2' in outcome.err
    assert "SyntaxError" in outcome.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--params", "7B"], "--params does not go with --model"),
        (["--dtype", "int4"], "cannot be rehearsed in int4"),
        ([], "returns no inputs for the model"),
    ],
)
def test_option_that_does_not_go_with_a_model_is_said(
    run: Run, words: list[str], sentence: str
) -> None:
    outcome = run("estimate", "--model", "my_project:build", *words)

    assert outcome.code == 2
    assert sentence in outcome.err
    assert "Traceback" not in outcome.err


def test_several_batches_are_refused_by_formulas(run: Run) -> None:
    outcome = run("estimate", "--params", "7B", "--batch", "1..8")

    assert outcome.code == 2
    assert "Formulas take one --batch" in outcome.err


def test_value_that_the_model_reads_is_told_with_its_line(run: Run) -> None:
    outcome = run("estimate", "--model", "my_project:branching", "--gpu", "1GiB")

    line = MODEL.splitlines().index("        if y.abs().max().item() > 1.0:") + 1
    assert "Assumed about values" in outcome.out
    assert f"my_project.py:{line}" in outcome.out


def test_adapters_of_a_16_bit_base_stay_in_fp32(run: Run) -> None:
    def peak_of(factory: str) -> int:
        outcome = run(
            "estimate", "--model", f"my_project:{factory}", "--dtype", "bf16",
            "--optimizer", "sgd", "--gpu", "1GiB", "--format", "json",
        )  # fmt: skip
        assert outcome.code == 0, outcome.err
        return int(json.loads(outcome.out)["rehearsal"]["peak_allocated_bytes"])

    n_parameters = 1024 * 4096
    # Weights and gradients, at 4 bytes instead of 2.
    assert peak_of("adapted") - peak_of("plain") >= 2 * 2 * n_parameters
