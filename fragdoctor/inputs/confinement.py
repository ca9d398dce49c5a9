"""Confine reading to files below some folders, for when the one who names files is not trusted.

A pattern, a folder or a link can lead anywhere, so checking names is not enough: each path is
resolved when it is opened or listed. An environment variable holds the folders, because child
processes that read for this one inherit it. The check keeps names from leading out of the folders;
it does not stop someone who can change links while they are being followed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from fragdoctor.errors import InputError

VARIABLE: Final = "_FRAGDOCTOR_READ_BELOW"
"""The resolved folders, separated by ``os.pathsep``; if unset, all files may be read."""


def confined_to(folders: Iterable[str | os.PathLike[str]]) -> dict[str, str]:
    """Return the environment variable that confines a process to some folders."""
    return {VARIABLE: os.pathsep.join(str(Path(folder).resolve()) for folder in folders)}


def is_allowed(path: str | os.PathLike[str]) -> bool:
    """Return whether a file or a folder may be read; never raises."""
    folders = os.environ.get(VARIABLE)
    if folders is None:
        return True
    try:
        place = Path(path).resolve()
    except (OSError, ValueError, RuntimeError):  # an impossible name, or links in a circle
        return False
    return any(place.is_relative_to(folder) for folder in folders.split(os.pathsep))


def check_place(path: str | os.PathLike[str]) -> None:
    """Refuse a path that may not be read.

    Raises:
        InputError: the path is outside the allowed folders, whether it exists or not.
    """
    if not is_allowed(path):
        raise InputError(
            f"{os.fspath(path)} leads out of the folder that may be read.",
            hint="Give files below it, not links to others.",
        )
