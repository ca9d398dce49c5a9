"""Finds the extension of the installed package for a folder of sources that shadows it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

from fragdoctor.errors import NativeCoreMissing

SUMS: Final = "core.sha256"
"""Written by the build next to the extension: for each source, a line with its name and SHA-256."""


def folder_of_core(here: Path | None = None, path: Sequence[str] | None = None) -> str:
    """Return the folder with the extension that was built from the sources in this one.

    ``here`` is the folder of the sources (this one if None); ``path`` is where to look for packages
    (``sys.path`` if None).

    Raises:
        NativeCoreMissing: if there is none, or it was built from other sources.
    """
    here = Path(__file__).parent if here is None else here
    root = here.parents[1].resolve()
    found = [
        folder
        for entry in (sys.path if path is None else path)
        if (folder := Path(entry or ".", "fragdoctor", "_native")).resolve() != here.resolve()
        and any((folder / f"_ext{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)
    ]
    for folder in found:
        if _sums_of_build(folder) == sums_of_sources(here):
            return str(folder)
    if found:
        raise NativeCoreMissing(
            f"The installed core of fragdoctor was built from other sources than those in {root}.",
            hint=f"Run: pip install {root}  Or start Python in another folder.",
        )
    raise NativeCoreMissing(
        "The core of fragdoctor is not built for this Python.", hint=f"Run: pip install {root}"
    )


def sums_of_sources(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each source of the core, by its name."""
    sources = (p for p in folder.iterdir() if p.suffix in (".cpp", ".h"))
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sources}


def _sums_of_build(folder: Path) -> dict[str, str]:
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return {}
    return dict(line.split(" ", 1) for line in lines if " " in line)
