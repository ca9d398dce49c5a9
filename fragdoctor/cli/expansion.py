"""The inputs of a check: files as they are, directories and patterns expanded."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from fragdoctor.errors import ConfigError, InputError
from fragdoctor.inputs.cases import STDIN
from fragdoctor.inputs.kinds import Kind, kind_of
from fragdoctor.inputs.source import open_source

MAX_FILES: Final = 10_000

_SNAPSHOT_SUFFIXES: Final = (".pickle", ".pkl", ".pickle.gz", ".pkl.gz", ".pickle.zst", ".pkl.zst")
_TEXT_SUFFIXES: Final = (".txt", ".log", ".out", ".err", ".stderr", ".stdout")


def expand(names: Sequence[str]) -> tuple[list[str], list[tuple[str, InputError]]]:
    """Return the inputs in the order given, and the names that led to none, with the reason.

    A directory is searched through for snapshots, statistics, texts and logs; hidden files are
    left out, and so are links to directories. A pattern that the shell left alone is expanded.

    Raises:
        ConfigError: standard input is given twice, or there are more files than anyone means.
    """
    if list(names).count(STDIN) > 1:
        raise ConfigError("Standard input is given twice.", hint="Give - once.")
    found: dict[str, None] = {}
    missing: list[tuple[str, InputError]] = []
    for name in names:
        paths = _expanded(name)
        for path in paths:
            found.setdefault(path)
        if not paths:
            missing.append((name, _nothing(name)))
        if len(found) > MAX_FILES:
            raise ConfigError(
                f"These are more than {MAX_FILES} files.", hint="Check a part of them at a time."
            )
    return list(found), missing


def _expanded(name: str) -> list[str]:
    if name == STDIN or os.path.isfile(name):  # noqa: PTH113 - never raises, unlike Path
        return [name]
    if os.path.isdir(name):  # noqa: PTH112 - same
        return list(_inputs_under(name))
    if glob.has_magic(name) and not os.path.lexists(name):
        hits = sorted(glob.glob(name, recursive=True))  # noqa: PTH207 - keeps the spelling
        return [path for hit in hits for path in _expanded(hit)]
    return [name]


def _inputs_under(directory: str) -> Iterator[str]:
    for root, folders, files in os.walk(directory):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for path in _paths(root, sorted(files)):
            if _is_input(path):
                yield str(path)


def _paths(root: str, files: Iterable[str]) -> Iterator[Path]:
    return (Path(root, name) for name in files if not name.startswith("."))


def _is_input(path: Path) -> bool:
    """Return whether a file of a directory is meant: by its suffix, or by what it holds."""
    name = path.name.lower()
    if name.endswith(_SNAPSHOT_SUFFIXES):
        return True  # an unreadable snapshot must be heard of, not left out
    if not path.is_file():
        return False
    try:
        with open_source(path) as stream:
            kind = kind_of(stream.head)
    except (InputError, OSError):
        return False
    return kind in (Kind.SNAPSHOT, Kind.STATS) or (
        kind is Kind.TEXT and name.endswith(_TEXT_SUFFIXES)
    )


def _nothing(name: str) -> InputError:
    if os.path.isdir(name):  # noqa: PTH112 - never raises, unlike Path
        return InputError(
            f"{name} holds no snapshot, statistics, message or log.", hint="Check the directory."
        )
    return InputError(f"Nothing matches {name}.", hint="Check the pattern.")
