"""Training programs over frameworks, rehearsed, against what PyTorch's allocator counted for them.

The frameworks are large, and no dependency of ours: ``FRAGDOCTOR_FRAMEWORKS`` names a Python that
has them, else they are looked for in this one.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from rehearsal.framework_programs import PEAK_BYTES, PROGRAMS
from rehearsal_stage import Stage

from fragdoctor.rehearsal.process import RehearsalConditions, rehearsed_gpu
from fragdoctor.rehearsal.programs import Program
from fragdoctor.rehearsal.runner import rehearse

PYTHON = os.environ.get("FRAGDOCTOR_FRAMEWORKS") or sys.executable


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_peak_of_a_framework_s_program_is_what_the_allocator_counted(name, tmp_path, monkeypatch):
    found = subprocess.run(
        [PYTHON, "-c", f"import torch, {name}"], capture_output=True, check=False, timeout=240
    )
    if found.returncode:
        pytest.skip(f"{PYTHON} has no {name}; FRAGDOCTOR_FRAMEWORKS names a Python that has")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    stage = Stage(tmp_path)
    stage.script(PROGRAMS[name])

    # The last --python counts.
    options = ("--python", PYTHON, "--gpu", "h100", "--torch-version", "2.12.1", "--steps", "50")
    rehearsal = stage.json(*options, "train.py", apart=True)["rehearsal"]

    assert rehearsal["steps"] == 4
    if name in PEAK_BYTES:
        assert rehearsal["peak_allocated_bytes"] == pytest.approx(PEAK_BYTES[name], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformers", "lightning"])
def test_smaller_batches_take_as_many_updates_as_a_framework_is_told(name, tmp_path, monkeypatch):
    if subprocess.run([PYTHON, "-c", f"import {name}"], check=False, timeout=240).returncode:
        pytest.skip(f"{PYTHON} has no {name}; FRAGDOCTOR_FRAMEWORKS names a Python that has")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    script = Stage(tmp_path).script(PROGRAMS[name])
    gpu = rehearsed_gpu(None, None, is_unlimited=True)
    conditions = RehearsalConditions(gpu, n_steps=50, treatments=["accumulate:8::again"])

    found = rehearse(
        Program(str(script), False, [], [PYTHON]), conditions, tmp_path / "snapshot.pickle"
    )

    assert found.steps == 4


EAGER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(n_layer=4, n_embd=256, n_head=8, vocab_size=4000)
config._attn_implementation = "{}"
model = GPT2LMHeadModel(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    x = torch.randint(0, 4000, (4, 512), device="cuda")
    model(input_ids=x, labels=x).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_fused_attention_from_outside_is_that_of_the_program(tmp_path, monkeypatch):
    found = subprocess.run(
        [PYTHON, "-c", "import torch, transformers"], capture_output=True, check=False, timeout=240
    )
    if found.returncode:
        pytest.skip(f"{PYTHON} has no transformers; FRAGDOCTOR_FRAMEWORKS names a Python that has")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    stage = Stage(tmp_path)
    options = ("--python", PYTHON, "--gpu", "h100")
    stage.script(EAGER.format("sdpa"))
    written = stage.json(*options, "--unlimited", "train.py", apart=True)["rehearsal"]
    stage.script(EAGER.format("eager"))

    cure = stage.json(*options, "--fits-on", "300MiB", "--cure", "train.py", code=1, apart=True)

    (tried,) = [t for t in cure["tried"] if [s["code"] for s in t["treatments"]] == ["sdpa"]]
    assert tried["peak_allocated_bytes"] == written["peak_allocated_bytes"]
