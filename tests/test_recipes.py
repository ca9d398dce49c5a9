"""The job script of docs/recipes.md is run as it stands, with stand-ins for Slurm and torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
SRUN = """#!/bin/bash
for node in 0 1; do SLURM_NODEID=$node SLURM_PROCID=$node "$@" || code=$?; done
exit ${code:-0}
"""
TORCHRUN = """#!/bin/bash
for local in 0 1; do
  RANK=$((2 * SLURM_NODEID + local)) LOCAL_RANK=$local WORLD_SIZE=4 {python} train.py || code=$?
done
exit ${{code:-0}}
"""
PROGRAM = """import os, torch
torch.alloc(30)
if os.environ["RANK"] == "3":
    torch.alloc(90)
"""


@pytest.mark.slow
def test_slurm_script_leaves_a_folder_a_node_and_one_report(tmp_path: Path) -> None:
    script = re.search(r"^```bash\n(#!/bin/bash\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert script is not None
    tools = {
        "srun": SRUN,
        "torchrun": TORCHRUN.format(python=sys.executable),
        "scontrol": "#!/bin/bash\necho node-a; echo node-b\n",
        "fragdoctor": f'#!/bin/bash\nexec {sys.executable} -m fragdoctor "$@"\n',
    }
    (tmp_path / "bin").mkdir()
    for name, text in tools.items():
        path = tmp_path / "bin" / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    slurm = {
        "SUBMIT_DIR": str(tmp_path),
        "JOB_ID": "7",
        "NNODES": "2",
        "JOB_NODELIST": "node-[a-b]",
    }
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("FRAGDOCTOR", "SLURM"))},
        **{f"SLURM_{k}": v for k, v in slurm.items()},
        "PYTHONPATH": f"{ROOT / 'tests' / 'capture' / 'fake'}:{ROOT}",
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "COLUMNS": "80",
    }

    done = subprocess.run(
        ["bash", "-c", script[1]],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip

    assert done.returncode == 1, done.stderr  # that of the rank that failed
    found = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.glob("bundles-7/*/*.zip"))
    names = [re.sub(r"-pid\d+", "", name) for name in found]
    assert names == [
        "bundles-7/node0/rank0-exit.zip",
        "bundles-7/node0/rank1-exit.zip",
        "bundles-7/node1/rank2-exit.zip",
        "bundles-7/node1/rank3-oom1.zip",
    ]
    assert "rank 3" in done.stdout
