"""Writing a bundle: a directory that appears whole or not at all, and overwrites nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

MANIFEST = "bundle.json"
SNAPSHOT = "snapshot.pickle"
STATS = "stats.json"
MESSAGE = "oom.txt"
CENSUS = "census.json"
SOURCES = "sources.json"
FORMAT = "fragdoctor-bundle"
VERSION = 1

_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_MAX_NAMES = 10_000


def write_bundle(
    directory: str,
    name: str,
    manifest: Mapping[str, Any],
    parts: Mapping[str, Callable[[str], None]],
) -> str:
    """Write a bundle and return its path; a taken name gets a number.

    Args:
        directory: where it goes; created if necessary.
        name: name of the bundle.
        manifest: content of ``bundle.json``; ``files`` and ``problems`` are added.
        parts: file name -> function that writes the file at a path. If one fails, its file is left
            out and named in ``problems``: half a story is better than none.

    Raises:
        OSError: if the bundle itself cannot be written; nothing of it remains.
    """
    os.makedirs(directory, exist_ok=True)
    temporary = os.path.join(directory, f".{name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    os.mkdir(temporary)
    try:
        files, problems = [], list(manifest.get("problems", ()))
        for file, write in parts.items():
            path = os.path.join(temporary, file)
            try:
                write(path)
                _sync(path)
                files.append(file)
            except Exception as e:  # the program must not notice, but the manifest does
                with contextlib.suppress(OSError):
                    os.unlink(path)
                problems.append(f"{file}: {type(e).__name__}: {e}"[:500])
        _check_room(files, problems, directory)
        write_json(
            os.path.join(temporary, MANIFEST), {**manifest, "files": files, "problems": problems}
        )
        _sync(temporary)
        return _move(temporary, os.path.join(directory, name))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def add_file(bundle: str, file: str, text: str) -> None:
    """Add a text to an existing bundle, or replace it, atomically."""
    path = os.path.join(bundle, file)
    temporary = os.path.join(bundle, f".{file}.{os.getpid()}.tmp")
    try:
        write_text(temporary, text)
        _sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def update_manifest(bundle: str, **changes: Any) -> None:
    """Change fields of a bundle's manifest, atomically."""
    with open(os.path.join(bundle, MANIFEST), encoding="utf-8") as f:
        manifest = json.load(f)
    manifest.update(changes)
    add_file(bundle, MANIFEST, _dumps(manifest))


def add_part(bundle: str, file: str, text: str) -> None:
    """Add a text to an existing bundle and name it in the manifest."""
    add_file(bundle, file, text)
    with open(os.path.join(bundle, MANIFEST), encoding="utf-8") as f:
        files = json.load(f)["files"]
    if file not in files:
        update_manifest(bundle, files=[*files, file])


def write_json(path: str, value: Any) -> None:
    """Write a value as readable JSON."""
    write_text(path, _dumps(value))


def write_text(path: str, text: str) -> None:
    """Write a text as it is."""
    with open(path, "w", encoding="utf-8", errors="surrogateescape", newline="\n") as f:
        f.write(text)


def _dumps(value: Any) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"


def _check_room(files: list[str], problems: list[str], directory: str) -> None:
    """Refuse a bundle that has no files for lack of space: a manifest alone is useless."""
    if not files and any(os.strerror(errno.ENOSPC) in problem for problem in problems):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), directory)


def _move(temporary: str, target: str) -> str:
    """Rename to the first free name: POSIX refuses to rename onto a directory with content."""
    for n in range(1, _MAX_NAMES):
        path = target if n == 1 else f"{target}-{n}"
        try:
            os.rename(temporary, path)
        except OSError as e:
            if e.errno not in _TAKEN:
                raise
        else:
            return path
    raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), target)


def _sync(path: str) -> None:
    """Flush a file or directory to disk: a machine that dies next must not leave half of one."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as e:  # some file systems cannot
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
    finally:
        os.close(descriptor)
