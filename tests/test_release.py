"""How a release is built and published, and what is said without a compiler."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import release_notes
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / ".github/workflows/release.yml"


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


def test_what_was_built_once_is_attested_and_published_without_a_password() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    jobs, publish = workflow["jobs"], workflow["jobs"]["publish"]

    assert workflow["permissions"] == {"contents": "read"}
    assert set(publish["needs"]) == {"wheels", "sdist", "version"}
    assert publish["permissions"] == {"id-token": "write", "attestations": "write"}
    assert [step["uses"].split("@")[0] for step in publish["steps"]] == [
        "actions/download-artifact",
        "actions/attest-build-provenance",
        "pypa/gh-action-pypi-publish",
    ]
    assert "with" not in publish["steps"][-1]
    built = [job["steps"][-1]["with"]["name"] for job in (jobs["wheels"], jobs["sdist"])]
    assert all(name.startswith("dist-") for name in built)
    assert all("push" in jobs[name]["if"] for name in ("version", "publish"))


def test_ci_runs_everything_on_each_python_that_is_promised(project: dict[str, Any]) -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    (job,) = yaml.safe_load(text)["jobs"].values()
    prefix = "Programming Language :: Python :: "

    promised = [c for c in project["project"]["classifiers"] if c.startswith(prefix)]
    assert promised == [prefix + version for version in job["strategy"]["matrix"]["python"]]
    assert job["steps"][-1]["run"] == ".ci/run"


def test_notes_of_a_release_are_its_section_of_the_changelog() -> None:
    text = (
        "# Changelog\n\n## [0.3.0] - later\n\n- c\n\n"
        "## [0.2.0] - now\n\n### Added\n\n- a\n\n## [0.1.0]\n- b\n"
    )

    assert release_notes.notes_of("0.2.0", text) == "### Added\n\n- a\n"
    assert release_notes.notes_of("0.1.0", text) == "- b\n"
    assert release_notes.notes_of("0.2", text) == ""


def test_tag_that_is_not_the_version_ends_the_release(
    project: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    version = project["project"]["version"]

    assert release_notes.main(f"v{version}.9") == 1
    assert f"The tag is v{version}.9, but pyproject.toml says {version}." in capsys.readouterr().err


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


def test_conda_recipe_says_what_the_project_says(project: dict[str, Any]) -> None:
    recipe = yaml.safe_load((ROOT / "packaging/recipe.yaml").read_text(encoding="utf-8"))
    stated, needs = project["project"], recipe["requirements"]

    run = [one if isinstance(one, str) else one["then"] for one in needs["run"]]
    python = f"python {stated['requires-python']}"
    assert {one.replace(" ", "") for one in run} == {
        python.replace(" ", ""), *(d.split(";")[0].strip() for d in stated["dependencies"])
    }  # fmt: skip
    backend = {one.replace(" ", "") for one in needs["host"]} - {"python", "pip"}
    assert backend == set(project["build-system"]["requires"])
    (script,) = recipe["build"]["python"]["entry_points"]
    assert script == f"fragdoctor = {stated['scripts']['fragdoctor']}"
    assert recipe["context"]["version"] == stated["version"]
    assert recipe["about"]["summary"] == stated["description"]
    for test in recipe["tests"]:
        for path in test.get("files", {}).get("source", ()):
            assert (ROOT / path).is_file()
