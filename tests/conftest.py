"""Fixtures of the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A loaded machine may take any time: no property may depend on how fast it is.
settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-machine")

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that rewrites whole-output goldens; review the diff before committing it."""
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files")


def shared_dir() -> Path | None:
    """Return the folder of recordings beside the project, if it is there."""
    given = os.environ.get("FRAGDOCTOR_SHARED")
    path = Path(given) if given else ROOT.parent / "shared"
    return path if (path / "snapshots" / "expected.json").is_file() else None


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
    """Return the folder of recordings beside the project; skip without it."""
    path = shared_dir()
    if path is None:
        pytest.skip("the recordings beside the project are not here")
    return path
