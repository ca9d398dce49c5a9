"""Where this copy of fragdoctor came from, so that another machine can install the same copy."""

from __future__ import annotations

import json
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any, Final
from urllib.parse import unquote, urlsplit

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


def requirement_of_checkout() -> str | None:
    """Return the origin and commit of the folder that this copy was built from, for pip.

    The function does not check that the origin has the commit. It returns None if the folder is not
    a git checkout with an https origin, and drops a token before an ``@`` in the origin's URL.
    """
    try:
        text = distribution("fragdoctor").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    url = urlsplit(str(json.loads(text or "{}").get("url", "")))
    if url.scheme != "file":
        return None
    folder = unquote(url.path)
    origin = urlsplit(_git(folder, "remote", "get-url", "origin"))
    commit = _git(folder, "rev-parse", "HEAD")
    if origin.scheme != "https" or not origin.hostname or not commit:
        return None
    return f"git+https://{origin.netloc.rpartition('@')[2]}{origin.path}@{commit}"


def _git(folder: str, *words: str) -> str:
    """Return the output of a git command in a folder, or "" if it fails."""
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command, no shell
            ["git", "-C", folder, *words],  # noqa: S607
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


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
