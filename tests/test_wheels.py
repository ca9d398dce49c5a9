"""How the package is built: the wheels that are declared, and what is said without a compiler."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / ".github/workflows/wheels.yml"


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_wheels_are_built_for_each_python_that_is_promised(project: dict[str, Any]) -> None:
    prefix = "Programming Language :: Python :: "
    promised = [c.removeprefix(prefix) for c in project["project"]["classifiers"]
                if c.startswith(prefix)]  # fmt: skip

    built = project["tool"]["cibuildwheel"]["build"]

    assert built == [f"cp{version.replace('.', '')}-*" for version in promised]
    assert project["tool"]["scikit-build"]["wheel"]["py-api"] == "cp312"


def test_workflow_builds_on_each_system_and_runs_the_declared_test(project) -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]

    systems = jobs["wheels"]["strategy"]["matrix"]["os"]
    assert {name.split("-")[0] for name in systems} == {"ubuntu", "macos", "windows"}
    assert "ubuntu-24.04-arm" in systems
    command = project["tool"]["cibuildwheel"]["test-command"]
    sample = next(word for word in command.split() if word.startswith("{project}"))
    assert (ROOT / sample.removeprefix("{project}/")).is_file()


@pytest.mark.slow
def test_missing_compiler_is_said_with_what_to_install(tmp_path: Path) -> None:
    cmake, ninja = shutil.which("cmake"), shutil.which("ninja") or shutil.which("make")
    if cmake is None or ninja is None:
        pytest.skip("cmake is not installed")
    generator = "Ninja" if Path(ninja).name == "ninja" else "Unix Makefiles"

    done = subprocess.run(
        [cmake, "-S", ROOT, "-B", tmp_path, "-G", generator, f"-DCMAKE_MAKE_PROGRAM={ninja}"],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path), "CXX": "/nonexistent/c++"},
        capture_output=True,
        text=True,
        check=False,
    )

    said = " ".join(done.stderr.split())
    assert done.returncode != 0
    assert "fragdoctor is built with a C++17 compiler, and none was found" in said
    assert "apt-get install g++" in said
