"""What another machine has to install to have this copy of fragdoctor."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
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
