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
