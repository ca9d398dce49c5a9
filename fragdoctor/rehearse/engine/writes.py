"""Keeps the program's files as they are: what it writes goes to a scratch folder.

A file that the program writes, makes or removes is one below the scratch folder, under its whole
path; what it reads is looked for there first. Python's own functions are led there. What reaches
the disk in another way (from C, by a function taken before) is refused by an audit hook. Programs
that it starts are not held back.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, Self

import torch

from fragdoctor.rehearse.engine import put, session

_FREE: Final = ("/dev", "/proc")
_ONE_READ: Final = ("stat", "lstat", "access", "readlink", "chdir", "statvfs", "getxattr")
_ONE_CHANGED: Final = ("mkdir", "rmdir", "remove", "unlink", "chmod", "chown", "utime", "truncate")
_TWO_CHANGED: Final = ("rename", "replace", "link", "symlink")
_REMOVES: Final = ("rmdir", "remove", "unlink")
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events of changes: number of the argument that is the path.
_AUDITED: Final = {
    "os.mkdir": 0, "os.rmdir": 0, "os.remove": 0, "os.rename": 1, "os.truncate": 0, "os.link": 1,
    "os.symlink": 1, "os.chmod": 0, "sqlite3.connect": 0,
}  # fmt: skip


class Overlay:
    """Where the program's writes go.

    Attributes:
        home: the scratch folder.
    """

    def __init__(self, home: Path) -> None:
        self.home = str(home.resolve())
        self.top = f"{self.home}/files"
        self.removed: set[str] = set()
        self._stat, self._mkdir = os.stat, os.mkdir

    def is_free(self, path: str) -> bool:
        """Whether a path may be changed where it is."""
        return any(path == top or path.startswith(top + os.sep) for top in (self.home, *_FREE))

    def mapped(self, path: str) -> str:
        """Return the path below the scratch folder that stands for another."""
        return path if self.is_free(path) else self.top + path

    def is_there(self, path: str) -> bool:
        """Whether a path exists, asked past the patches."""
        with suppress(OSError):
            self._stat(path)
            return True
        return False

    def to_read(self, name: Any) -> Any:
        """Return the path to read instead of another."""
        path = _absolute(name)
        if path is None or self.is_free(path):
            return name
        if path in self.removed or self.is_there(self.top + path):
            return self.top + path
        return name

    def to_change(self, name: Any, *, keeps_content: bool = False) -> Any:
        """Return the path to change instead of another; its folders exist as they really do."""
        path = _absolute(name)
        if path is None or self.is_free(path):
            return name
        target = self.top + path
        self._make_folders(os.path.dirname(path))  # noqa: PTH120
        if keeps_content and path not in self.removed and not self.is_there(target):
            with suppress(OSError):
                if os.path.isdir(path):  # noqa: PTH112
                    self._make_folders(path)
                else:
                    shutil.copyfile(path, target)
        return target

    def _make_folders(self, path: str) -> None:
        if self.is_there(self.top + path) or not (path == os.sep or self.is_there(path)):
            return
        if path != os.sep:
            self._make_folders(os.path.dirname(path))  # noqa: PTH120
        with suppress(FileExistsError):
            if path == os.sep and not self.is_there(self.top):
                self._mkdir(self.top)
            self._mkdir(self.top + path)

    def is_removed_only_here(self, name: Any) -> bool:
        """Note that the program removes what is really there; whether it is nothing but that."""
        path = _absolute(name)
        if path is None or self.is_free(path):
            return False
        here = self.is_there(self.top + path)
        if self.is_there(path):
            self.removed.add(path)
            return not here
        return False

    def names(
        self, name: Any, listed: Callable[[Any], list[Any]], key: Callable[[Any], str]
    ) -> Any:
        """Return what a folder has: its own entries and those of the scratch folder."""
        path = _absolute(name)
        if path is None or self.is_free(path) or not self.is_there(self.top + path):
            return listed(name)
        found = {key(entry): entry for entry in listed(self.top + path)}
        if self.is_there(path):
            for entry in listed(name):
                if os.path.join(path, key(entry)) not in self.removed:  # noqa: PTH118
                    found.setdefault(key(entry), entry)
        return list(found.values())


def _absolute(name: Any) -> str | None:
    """Return a path as a whole; None for what is no path, such as an open file."""
    if isinstance(name, int) or name is None:
        return None
    with suppress(TypeError, ValueError):
        return os.path.abspath(os.fsdecode(name))  # noqa: PTH100 - lexical
    return None


class _Entries:
    """What ``os.scandir`` returns."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def close(self) -> None:
        """There is nothing to close."""


def install(home: Path, undo: ExitStack) -> None:
    """Lead writes to a scratch folder, until ``undo`` is closed."""
    overlay = Overlay(home)
    opener = _opener(overlay, io.open)
    for owner, name, value in [
        (builtins, "open", opener),
        (io, "open", opener),
        (os, "open", _os_opener(overlay, os.open)),
        (os, "listdir", _lister(overlay, os.listdir)),
        (os, "scandir", _scanner(overlay, os.scandir)),
        (shutil, "_use_fd_functions", False),
        *((os, n, _reader(overlay, getattr(os, n))) for n in _ONE_READ if hasattr(os, n)),
        *((os, n, _changer(overlay, getattr(os, n), n)) for n in _ONE_CHANGED),
        *((os, n, _mover(overlay, getattr(os, n), n)) for n in _TWO_CHANGED),
        (torch, "save", _saver(overlay, torch.save)),
        (torch.serialization, "save", _saver(overlay, torch.save)),
    ]:
        put(undo, owner, name, value)
    if importlib.util.find_spec("safetensors") is not None:
        import safetensors.torch  # type: ignore[import-not-found]

        put(undo, safetensors.torch, "save_file", _safe_saver(overlay))
        for module in (safetensors, safetensors.torch):
            put(undo, module, "safe_open", _reader(overlay, safetensors.safe_open))
    is_on = [True]
    undo.callback(is_on.clear)
    sys.addaudithook(_guard(overlay, is_on))


def _opener(overlay: Overlay, original: Any) -> Any:
    def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:  # noqa: A001
        if any(letter in mode for letter in "wax+"):
            path = overlay.to_change(file, keeps_content="w" not in mode)
        else:
            path = overlay.to_read(file)
        return original(path, mode, *args, **kwargs)

    return open


def _os_opener(overlay: Overlay, original: Any) -> Any:
    def open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:  # noqa: A001
        if dir_fd is None:
            changes = bool(flags & _WRITES)
            path = (
                overlay.to_change(path, keeps_content=not flags & os.O_TRUNC)
                if changes
                else overlay.to_read(path)
            )
        return original(path, flags, mode, dir_fd=dir_fd)

    return open


def _reader(overlay: Overlay, original: Any) -> Any:
    def read(path: Any, *args: Any, **kwargs: Any) -> Any:
        return original(overlay.to_read(path), *args, **kwargs)

    return read


def _changer(overlay: Overlay, original: Any, name: str) -> Any:
    def change(path: Any, *args: Any, **kwargs: Any) -> Any:
        if name in _REMOVES and overlay.is_removed_only_here(path):
            return None
        if name == "mkdir" and overlay.is_there(str(overlay.to_read(path))):
            raise FileExistsError(17, "File exists", str(path))
        return original(overlay.to_change(path, keeps_content=name != "mkdir"), *args, **kwargs)

    return change


def _mover(overlay: Overlay, original: Any, name: str) -> Any:
    def move(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        source = src if name == "symlink" else overlay.to_change(src, keeps_content=True)
        if name in {"rename", "replace"}:
            overlay.is_removed_only_here(src)
        return original(source, overlay.to_change(dst), *args, **kwargs)

    return move


def _lister(overlay: Overlay, original: Any) -> Any:
    def listdir(path: Any = ".") -> Any:
        return overlay.names(path, lambda p: list(original(p)), os.fsdecode)

    return listdir


def _scanner(overlay: Overlay, original: Any) -> Any:
    def scandir(path: Any = ".") -> Any:
        return _Entries(overlay.names(path, lambda p: list(original(p)), lambda e: str(e.name)))

    return scandir


def _saver(overlay: Overlay, original: Any) -> Any:
    """Return ``torch.save`` that writes everything but the values of tensors."""

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        session.current().assumptions.note("Checkpoints are written without the values of tensors.")
        if kwargs.get("_use_new_zipfile_serialization", True):
            with torch.serialization.skip_data():
                original(obj, overlay.to_change(f), *args, **kwargs)

    return save


def _safe_saver(overlay: Overlay) -> Any:
    """Return ``safetensors.torch.save_file`` that writes the header, and room for the values."""
    from safetensors.torch import _TYPES

    names = {dtype: name for name, dtype in _TYPES.items()}

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        end = 0
        for name, tensor in tensors.items():
            begin, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": names[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(overlay.to_change(filename), "wb") as file:  # noqa: PTH123
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)

    return save_file


def _guard(overlay: Overlay, is_on: list[bool]) -> Any:
    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path = _absolute(args[0])
            mode, flags = args[1], args[2]
            changes = isinstance(flags, int) and bool(flags & _WRITES)
            changes = changes or (isinstance(mode, str) and not set(mode).isdisjoint("wax+"))
        elif event in _AUDITED:
            path, changes = _absolute(args[_AUDITED[event]]), True
        else:
            return
        if changes and is_on and path is not None and not overlay.is_free(path):
            raise PermissionError(13, "a rehearsal changes no files; --allow-writes lets it", path)

    return hook
