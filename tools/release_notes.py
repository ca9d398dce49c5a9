"""Print what the changelog says of a version, for the release of its tag.

    python tools/release_notes.py v0.2.0

Exit code 1 where the tag is not the version of ``pyproject.toml``, or the changelog lacks it. Needs
nothing but Python's own library.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes_of(version: str, changelog: str) -> str:
    """Return the section of a version; "" where there is none."""
    heading = rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## |\Z)"
    found = re.search(heading, changelog, re.DOTALL | re.MULTILINE)
    return found[1].strip() + "\n" if found else ""


def main(tag: str) -> int:
    """Print the notes of a tag."""
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
