"""docs/recipes.md: its job script runs, with stand-ins for Slurm; libraries have its arguments."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

PYTHON = os.environ.get("FRAGDOCTOR_FRAMEWORKS") or sys.executable
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


TAKES = {
    "TrainingArguments": "import transformers; owner = transformers.TrainingArguments",
    "SFTConfig": "import trl; owner = trl.SFTConfig",
    "Trainer": "import lightning; owner = lightning.Trainer",
    "Accelerator": "import accelerate; owner = accelerate.Accelerator",
}
LOOK_UP = "import inspect; print(*inspect.signature(owner).parameters)"
METHODS = """from diffusers import AutoencoderKL, DiffusionPipeline, UNet2DConditionModel
for owner in (AutoencoderKL, DiffusionPipeline, UNet2DConditionModel):
    print(*dir(owner))"""

# Read, not imported: that takes the libraries that it trains with.
TORCHTITAN = """import re
from importlib.util import find_spec
spec = find_spec("torchtitan")
if spec is None:
    raise ModuleNotFoundError("torchtitan")
with open(f"{spec.submodule_search_locations[0]}/config/configs.py") as file:
    print(*re.findall(r"^    (\\w+): ", file.read(), re.MULTILINE))"""


def cells(name: str) -> list[str]:
    """Return the second column of the table that is marked with a name."""
    table = re.search(rf"<!-- {name} -->[^\n]*\n\|[^\n]*\n((?:\|[^\n]*\n)+)", PAGE)
    assert table is not None, name
    return [line.split("|")[2] for line in table[1].splitlines()]


def names_known(program: str) -> set[str]:
    done = subprocess.run(
        [PYTHON, "-c", program], capture_output=True, text=True, timeout=240, check=False
    )
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(
            f"{PYTHON} has not all frameworks; FRAGDOCTOR_FRAMEWORKS names a Python that has"
        )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("name", TAKES)
def test_arguments_of_a_table_are_those_of_its_class(name: str) -> None:
    named = {n for cell in cells(name) for n in re.findall(r"`(\w+)[=`]", cell)}
    known = names_known(f"{TAKES[name]}; {LOOK_UP}")

    assert named - {"DataLoader"} <= known
    assert len(named) >= 3


@pytest.mark.slow
def test_methods_of_diffusers_exist() -> None:
    named = {n for cell in cells("diffusers") for n in re.findall(r"(\w+)\(\)", cell)}

    assert named <= names_known(METHODS)
    assert len(named) >= 5


@pytest.mark.slow
def test_options_of_torchtitan_are_fields_of_its_configuration() -> None:
    named = {n for cell in cells("torchtitan") for n in re.findall(r"`--\w+\.(\w+)", cell)}

    assert named <= names_known(TORCHTITAN)
    assert len(named) >= 5


def test_pod_of_the_page_writes_its_bundle_to_a_volume() -> None:
    block = re.search(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert block is not None
    spec = yaml.safe_load(block[1])["spec"]

    (container,) = spec["containers"]
    command = container["command"]
    mounted = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    assert mounted[command[command.index("-o") + 1]] == "bundles"
    assert {v["name"] for v in spec["volumes"]} == set(mounted.values())
