"""Which files may be read, where whoever names them is not trusted: those below some folders.

A pattern, a folder or a link can lead anywhere, so names are no place to check it: each place is
resolved when it is opened or listed. A variable says where, as processes that read for this one
have it too. It keeps names from leading out; whoever can change links while they are followed is
not held by it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from fragdoctor.errors import InputError

VARIABLE: Final = "_FRAGDOCTOR_READ_BELOW"
"""The folders, resolved, with ``os.pathsep`` between them; unset, all files may be read."""


def confined_to(folders: Iterable[str | os.PathLike[str]]) -> dict[str, str]:
    """Return the environment variable that keeps a process to some folders."""
    return {VARIABLE: os.pathsep.join(str(Path(folder).resolve()) for folder in folders)}


def is_allowed(path: str | os.PathLike[str]) -> bool:
    """Return whether a file or a folder may be read; never raises."""
    folders = os.environ.get(VARIABLE)
    if folders is None:
        return True
    try:
        place = Path(path).resolve()
    except (OSError, ValueError, RuntimeError):  # a name that none can have; links in a circle
        return False
    return any(place.is_relative_to(folder) for folder in folders.split(os.pathsep))


def check_place(path: str | os.PathLike[str]) -> None:
    """Refuse what may not be read.

    Raises:
        InputError: it is elsewhere, whether it exists or not.
    """
    if not is_allowed(path):
        raise InputError(
            f"{os.fspath(path)} leads out of the folder that may be read.",
            hint="Give files below it, not links to others.",
        )
