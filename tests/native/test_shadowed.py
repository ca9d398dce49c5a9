"""A folder of sources that shadows the installed package uses the core of that package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import fragdoctor
from fragdoctor._native import _ext
from fragdoctor._native.shadowed import SUMS, folder_of_core, sums_of_sources
from fragdoctor.errors import NativeCoreMissing

pytestmark = pytest.mark.slow


def sources(root: Path) -> Path:
    folder = root / "fragdoctor" / "_native"
    folder.mkdir(parents=True)
    (folder / "reader.cpp").write_text("int a;\n")
    (folder / "reader.h").write_text("int b;\n")
    return folder


def installed(root: Path, sums: dict[str, str]) -> Path:
    folder = root / "fragdoctor" / "_native"
    folder.mkdir(parents=True)
    (folder / f"_ext{EXTENSION_SUFFIXES[0]}").write_bytes(b"")
    (folder / SUMS).write_text("".join(f"{name} {s}\n" for name, s in sums.items()))
    return folder


def test_core_of_the_same_sources_is_taken(tmp_path: Path) -> None:
    here = sources(tmp_path / "clone")
    installed(tmp_path / "old", {"reader.cpp": "0"})
    core = installed(tmp_path / "site", sums_of_sources(here))

    path = [str(tmp_path / "clone"), "", str(tmp_path / "old"), str(tmp_path / "site")]

    assert str(core) == folder_of_core(here, path)


def test_core_of_other_sources_is_not_taken(tmp_path: Path) -> None:
    here = sources(tmp_path / "clone")
    installed(tmp_path / "site", sums_of_sources(here))
    (here / "reader.cpp").write_text("int changed;\n")

    with pytest.raises(NativeCoreMissing, match="built from other sources") as caught:
        folder_of_core(here, [str(tmp_path / "site")])
    assert f"pip install {tmp_path / 'clone'}" in str(caught.value)


@pytest.mark.parametrize("path", [[], [""], ["nowhere"]])
def test_no_core_says_what_to_run(tmp_path: Path, path: list[str]) -> None:
    here = sources(tmp_path)

    with pytest.raises(NativeCoreMissing, match="is not built for this Python") as caught:
        folder_of_core(here, path)
    assert isinstance(caught.value, ImportError)
    assert f"pip install {tmp_path}" in caught.value.hint


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a folder with the sources as in a clone: without an extension next to them."""
    ignored = shutil.ignore_patterns("*.so", "*.pyd", SUMS, "__pycache__")
    shutil.copytree(
        Path(fragdoctor.__file__).parent, tmp_path / "fragdoctor", ignore=ignored, symlinks=True
    )
    return tmp_path


def python(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the clone, without site, since an editable install would precede the path."""
    installed = [str(Path(_ext.__file__).parents[2]), *filter(None, sys.path)]
    return subprocess.run(
        [sys.executable, "-S", *words],
        cwd=clone,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(installed)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_command_works_in_a_folder_that_shadows_the_package(clone: Path, samples: Path) -> None:
    sample = samples / "fragmentation_oom.pickle"

    done = python(clone, "-m", "fragdoctor", "analyze", str(sample), "-q")

    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith("Fragmentation")


def test_import_works_in_a_folder_that_shadows_the_package(clone: Path, samples: Path) -> None:
    sample = samples / "empty.pickle"
    code = "import fragdoctor, sys; print(fragdoctor.__file__, fragdoctor.load(sys.argv[1]))"

    done = python(clone, "-c", code, str(sample))

    assert done.stdout.startswith(f"{clone / 'fragdoctor' / '__init__.py'} <Snapshot"), done.stderr


def test_changed_sources_without_their_core_are_one_sentence(clone: Path, samples: Path) -> None:
    with (clone / "fragdoctor" / "_native" / "columns.h").open("a") as file:
        file.write("// changed\n")

    done = python(clone, "-m", "fragdoctor", "analyze", str(samples / "empty.pickle"))

    assert done.returncode == 2
    assert done.stderr.startswith("Error: The installed core of fragdoctor was built from other")
    assert "Traceback" not in done.stderr
    assert "bug" not in done.stderr
