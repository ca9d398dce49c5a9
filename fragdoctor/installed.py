"""Where this copy of fragdoctor came from, so that another machine can install the same copy."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any, Final
from urllib.parse import urlsplit

_REMOTE: Final = {"http", "https", "ssh"}


def requirement() -> str | None:
    """Return the requirement with which pip installs this copy of fragdoctor on another machine.

    A copy from a package index is named by its version, a copy from a URL by the URL and its
    commit or hash (``direct_url.json``, https://packaging.python.org/specifications/direct-url/).
    None for a copy from a folder or file on this machine, which no other machine has.
    """
    try:
        found = distribution("fragdoctor")
    except PackageNotFoundError:
        return None
    text = found.read_text("direct_url.json")
    if text is None:
        return f"fragdoctor=={found.version}"
    return _from_address(json.loads(text))


def _from_address(origin: dict[str, Any]) -> str | None:
    url = str(origin.get("url", ""))
    if urlsplit(url).scheme not in _REMOTE:
        return None
    folder = origin.get("subdirectory")
    end = f"#subdirectory={folder}" if folder else ""
    commit = origin.get("vcs_info")
    if commit:
        return f"fragdoctor @ {commit['vcs']}+{url}@{commit['commit_id']}{end}"
    digest = origin.get("archive_info", {}).get("hashes", {}).get("sha256")
    return f"fragdoctor @ {url}{end or (f'#sha256={digest}' if digest else '')}"
