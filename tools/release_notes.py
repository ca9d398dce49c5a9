"""Print the changelog's section on a version, for the release of the version's tag.

    python tools/release_notes.py v0.2.0

The exit code is 1 if the tag does not match the version in ``pyproject.toml``, or the changelog
lacks the version. Needs only Python's standard library.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes_of(version: str, changelog: str) -> str:
    """Return the section on a version, or "" if there is none."""
    heading = rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## |\Z)"
    found = re.search(heading, changelog, re.DOTALL | re.MULTILINE)
    return found[1].strip() + "\n" if found else ""


def main(tag: str) -> int:
    """Print the notes for a tag."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    if tag != f"v{version}":
        sys.stderr.write(f"The tag is {tag}, but pyproject.toml says {version}.\n")
        return 1
    notes = notes_of(version, (ROOT / "CHANGELOG.md").read_text("utf-8"))
    if not notes:
        sys.stderr.write(f"CHANGELOG.md has no section [{version}].\n")
        return 1
    sys.stdout.write(notes)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
