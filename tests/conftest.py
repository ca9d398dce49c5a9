"""Options and fixtures for the whole test suite."""

from __future__ import annotations

import atexit
import gc
import os
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine may take any amount of time: no property test may depend on speed.
settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fast", settings.get_profile("any-machine"), max_examples=30)
settings.load_profile("any-machine")

ROOT = Path(__file__).resolve().parents[1]
REHEARSING = {"stage", "prepared"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the test suite's options."""
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files")
    parser.addoption("--all", action="store_true", help="run the slow tests too")


def pytest_configure(config: pytest.Config) -> None:
    """Try fewer examples of each property without its own number, unless slow tests run too."""
    if leaves_slow_out(config):
        settings.load_profile("fast")


def leaves_slow_out(config: pytest.Config) -> bool:
    """Return whether to leave slow tests out: yes, except with --all, -m, or a file's name."""
    asked = config.getoption("--all") or config.getoption("markexpr") or names_files(config)
    return not asked


def names_files(config: pytest.Config) -> bool:
    """Return whether the arguments name files, rather than the whole suite or a folder."""
    return any(arg.partition("::")[0].endswith(".py") for arg in config.args)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Run named files in this process, because the workers of ``-n auto`` start too slowly."""
    return 0 if names_files(config) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the slow tests out, unless they are requested.

    Rehearsals are sorted next to each other so that one worker runs them, because each worker that
    runs one has to import PyTorch.
    """
    items.sort(key=lambda item: REHEARSING.isdisjoint(getattr(item, "fixturenames", ())))
    if not leaves_slow_out(config):
        return
    slow = [item for item in items if "slow" in item.keywords]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if "slow" not in item.keywords]


def pytest_collection_finish() -> None:
    """Exclude modules and tests, which live to the end, from garbage collection."""
    gc.freeze()


class Committed(type(Path())):  # type: ignore[misc]
    """A path among the committed recordings; a path that does not exist skips the test."""

    def __truediv__(self, key: str | Path) -> Committed:
        path = super().__truediv__(key)
        if not path.exists():
            pytest.skip(f"{key} is not among the committed recordings")
        return path


@pytest.fixture(scope="session")
def has_all_recordings() -> bool:
    """Return whether all recordings exist; if so, tests check how many they have looked at."""
    return not isinstance(shared_dir(), Committed)


@cache
def shared_dir() -> Path:
    """Return the folder of all recordings, next to the project, or else of the committed ones."""
    given = os.environ.get("FRAGDOCTOR_SHARED")
    path = Path(given) if given else ROOT.parent / "shared"
    if (path / "snapshots" / "expected.json").is_file():
        return path
    folder = tempfile.TemporaryDirectory(prefix="fragdoctor-recordings-")
    atexit.register(folder.cleanup)
    with tarfile.open(ROOT / "tests" / "golden" / "recordings.tar.xz") as archive:
        if hasattr(tarfile, "data_filter"):  # from Python 3.11.4 on
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder.name)
    return Committed(folder.name)


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the project's root."""
    return ROOT


@pytest.fixture(scope="session")
def samples(root: Path) -> Path:
    """Return the folder of the project's own recordings."""
    return root / "sample_snapshots"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of recordings; a test that needs a missing one is skipped."""
    return shared_dir()


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearse in forks of a process that has imported PyTorch."""
    pytest.importorskip("torch")
    from rehearsal_stage import use_prepared

    use_prepared(monkeypatch)
