"""What another machine has to install to have this copy of fragdoctor."""

from __future__ import annotations

import json
import subprocess
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fragdoctor import installed

COMMIT = "4f2c5a5de1a1a7d1a6f3c9f2e8b7a6c5d4e3f2a1"


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, "fragdoctor==0.2.0"),
        (
            {
                "url": "https://host/owner/fragdoctor.git",
                "vcs_info": {"vcs": "git", "commit_id": COMMIT, "requested_revision": "main"},
            },
            f"fragdoctor @ git+https://host/owner/fragdoctor.git@{COMMIT}",
        ),
        (
            {
                "url": "https://host/mono.git",
                "vcs_info": {"vcs": "git", "commit_id": COMMIT},
                "subdirectory": "tools/fragdoctor",
            },
            f"fragdoctor @ git+https://host/mono.git@{COMMIT}#subdirectory=tools/fragdoctor",
        ),
        (
            {"url": "https://host/f.whl", "archive_info": {"hashes": {"sha256": "ab12"}}},
            "fragdoctor @ https://host/f.whl#sha256=ab12",
        ),
        ({"url": "file:///home/me/fragdoctor", "dir_info": {"editable": True}}, None),
        ({"url": "file:///home/me/f.whl", "archive_info": {}}, None),
    ],
)
def test_requirement(
    origin: dict[str, Any] | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = None if origin is None else json.dumps(origin)
    found = SimpleNamespace(version="0.2.0", read_text=lambda _name: text)
    monkeypatch.setattr(installed, "distribution", lambda _name: found)

    assert installed.requirement() == expected


def test_sources_that_were_never_installed_have_no_requirement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installed, "distribution", missing)

    assert installed.requirement() is None


@pytest.mark.parametrize(
    ("remote", "expected"),
    [
        ("https://host/owner/fragdoctor.git", "git+https://host/owner/fragdoctor.git@"),
        ("https://me:secret@host/owner/fragdoctor", "git+https://host/owner/fragdoctor@"),
        ("git@host:owner/fragdoctor.git", None),
        ("../fragdoctor", None),
        ("", None),
    ],
)
def test_requirement_of_the_checkout_that_a_copy_was_built_from(
    remote: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=n@host"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "First"], check=True)
    if remote:
        subprocess.run([*git, "remote", "add", "origin", remote], check=True)
    text = json.dumps({"url": tmp_path.as_uri(), "dir_info": {}})
    found = SimpleNamespace(version="0.2.0", read_text=lambda _name: text)
    monkeypatch.setattr(installed, "distribution", lambda _name: found)

    told = installed.requirement_of_checkout()

    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert told == (expected and expected + head.stdout.strip())


def test_folder_that_is_no_checkout_has_no_requirement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"url": (tmp_path / "gone").as_uri(), "dir_info": {}})
    found = SimpleNamespace(version="0.2.0", read_text=lambda _name: text)
    monkeypatch.setattr(installed, "distribution", lambda _name: found)

    assert installed.requirement_of_checkout() is None
