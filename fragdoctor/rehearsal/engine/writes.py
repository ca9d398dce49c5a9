"""Keeps the program's files as they are: what it writes goes to a scratch folder.

A file that the program writes, makes or removes is one below the scratch folder, under its whole
path with its links resolved; what it reads is looked for there first. Python's own functions are
led there, those that modules took before as well, and PyTorch's and SQLite's that open files
themselves. What reaches the disk in another way is refused: by an audit hook, and by the fence of
:mod:`fragdoctor.rehearsal.fence`, which holds for programs that it starts too.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import json
import os
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import unquote, urlsplit

import torch

from fragdoctor.rehearsal.engine import put, session
from fragdoctor.rehearsal.fence import FREE

_ONE_READ: Final = ("stat", "access", "chdir", "statvfs", "getxattr", "listxattr")
_ONE_READ_ITSELF: Final = ("lstat", "readlink")  # a link, not what it leads to
_ONE_CHANGED: Final = (
    "mkdir", "mkfifo", "mknod", "chmod", "chown", "utime", "truncate", "setxattr", "removexattr",
)  # fmt: skip
_ONE_CHANGED_ITSELF: Final = ("rmdir", "remove", "unlink", "lchown")
_OPEN_CHANGED: Final = ("fchmod", "fchown", "chmod", "chown", "utime", "setxattr", "removexattr")
_TWO_CHANGED: Final = ("rename", "replace", "link", "symlink")
_REMOVES: Final = ("rmdir", "remove", "unlink")
_MAKES: Final = ("mkdir", "mkfifo", "mknod")
_MOVES: Final = ("rename", "replace")
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MOST_LINKS: Final = 40  # as many as Linux follows
# Audit events of changes: numbers of the arguments that are paths.
_AUDITED: Final = {
    "os.mkdir": (0,), "os.rmdir": (0,), "os.remove": (0,), "os.rename": (0, 1),
    "os.truncate": (0,), "os.link": (0, 1), "os.symlink": (1,), "os.chmod": (0,),
    "os.chown": (0,), "os.utime": (0,), "os.setxattr": (0,), "os.removexattr": (0,),
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
        self._stat, self._lstat, self._mkdir = os.stat, os.lstat, os.mkdir
        self._readlink, self._symlink, self._scandir = os.readlink, os.symlink, os.scandir

    def is_free(self, path: str) -> bool:
        """Whether a path may be changed where it is."""
        return any(path == top or path.startswith(top + os.sep) for top in (self.home, *FREE))

    def is_there(self, path: str, *, itself: bool = False) -> bool:
        """Whether a path exists, or a link itself, asked past the patches."""
        with suppress(OSError, ValueError):
            (self._lstat if itself else self._stat)(path)
            return True
        return False

    def is_gone(self, path: str) -> bool:
        """Whether the program removed what is really there, or a folder around it."""
        while path not in self.removed:
            if path in {"", os.sep}:
                return False
            path = os.path.dirname(path)  # noqa: PTH120
        return True

    def resolved(self, name: Any, *, itself: bool = False, folder: int | None = None) -> str | None:
        """Return where a path leads in what the program sees, links resolved.

        With ``itself`` a link at its end stays. ``folder`` is an open folder that it begins from.
        None for what is no path, such as an open file.
        """
        path = _absolute(name)
        if path is None:
            return None
        if folder is not None and not os.path.isabs(os.fsdecode(name)):  # noqa: PTH117
            base = self._readlink(f"/proc/self/fd/{folder}")
            path = f"{base.removeprefix(self.top) or os.sep}/{os.fsdecode(name)}"
        rest, done, n_links = path.split("/")[::-1], "", 0
        while rest:
            part = rest.pop()
            if part in {"", "."}:
                continue
            if part == "..":
                done = os.path.dirname(done)  # noqa: PTH120
                continue
            here = f"{done}{os.sep}{part}"
            target = None if itself and not any(rest) else self._link(here)
            if target is None or n_links == _MOST_LINKS:
                done = here
                continue
            n_links += 1
            if target.startswith(os.sep):
                done = ""
            rest += target.split("/")[::-1]
        return done or os.sep

    def _link(self, path: str) -> str | None:
        """Return what a link leads to; None for anything else."""
        place = path
        if not self.is_free(path):
            if self.is_there(self.top + path, itself=True):
                place = self.top + path
            elif self.is_gone(path):
                return None
        try:
            target = self._readlink(place)
        except (OSError, ValueError):
            return None
        is_magic = path.startswith("/proc/") and not target.startswith(os.sep)
        return None if is_magic and not target.isdecimal() else target

    def to_read(self, name: Any, *, itself: bool = False, folder: int | None = None) -> Any:
        """Return the path to read instead of another."""
        path = self.resolved(name, itself=itself, folder=folder)
        if path is None or name in {b"", ""}:
            return name
        if self.is_free(path):
            return name if path == _absolute(name) else path
        if self.is_there(self.top + path, itself=itself) or self.is_gone(path):
            return self.top + path
        return name if folder is None and path == _absolute(name) else path

    def to_change(
        self,
        name: Any,
        *,
        keeps_content: bool = False,
        itself: bool = False,
        folder: int | None = None,
    ) -> Any:
        """Return the path to change instead of another; its folders exist as they really do."""
        path = self.resolved(name, itself=itself, folder=folder)
        if path is None or name in {b"", ""}:
            return name
        if self.is_free(path):
            return path
        target = self.top + path
        self._make_folders(os.path.dirname(path))  # noqa: PTH120
        if keeps_content and not self.is_gone(path) and not self.is_there(target, itself=True):
            with suppress(OSError):
                self._copy(path, target)
        return target

    def _copy(self, path: str, target: str) -> None:
        if itself := self._link(path):
            self._symlink(itself, target)
        elif os.path.isdir(path):  # noqa: PTH112
            self._make_folders(path)
        else:
            shutil.copyfile(path, target)

    def fill(self, name: Any) -> None:
        """Let a folder of the scratch folder have all that it really has: it moves."""
        path = self.resolved(name, itself=True)
        if path is None or self.is_free(path) or not self.is_there(path):
            return
        with suppress(OSError), self._scandir(path) as entries:
            for entry in entries:
                target = f"{self.top}{path}/{entry.name}"
                if self.is_gone(entry.path) or self.is_there(target, itself=True):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    self._make_folders(entry.path)
                    self.fill(entry.path)
                else:
                    self._copy(entry.path, target)

    def _make_folders(self, path: str) -> None:
        if self.is_there(self.top + path) or not (path == os.sep or self.is_there(path)):
            return
        if path != os.sep:
            self._make_folders(os.path.dirname(path))  # noqa: PTH120
        with suppress(FileExistsError):
            if path == os.sep and not self.is_there(self.top):
                self._mkdir(self.top)
            self._mkdir(self.top + path)

    def is_removed_only_here(self, name: Any, folder: int | None = None) -> bool:
        """Note that the program removes what is really there; whether it is nothing but that."""
        path = self.resolved(name, itself=True, folder=folder)
        if path is None or self.is_free(path):
            return False
        here = self.is_there(self.top + path, itself=True)
        if self.is_there(path, itself=True) and not self.is_gone(path):
            self.removed.add(path)
            return not here
        return False

    def is_open_elsewhere(self, fd: int) -> bool:
        """Whether an open file is none that may be changed."""
        with suppress(OSError):
            path = self._readlink(f"/proc/self/fd/{fd}")
            return path.startswith(os.sep) and not self.is_free(path)
        return False

    def names(
        self, name: Any, listed: Callable[[Any], list[Any]], key: Callable[[Any], str]
    ) -> Any:
        """Return what a folder has: its own entries and those of the scratch folder."""
        path = self.resolved(name)
        if path is None or self.is_free(path):
            return listed(self.to_read(name))
        is_here, is_gone = self.is_there(self.top + path), self.is_gone(path)
        if not is_here and (is_gone or not self.removed):
            return listed(self.top + path if is_gone else path)
        found = {key(e): e for e in listed(self.top + path)} if is_here else {}
        if not is_gone and (not is_here or self.is_there(path)):
            for entry in listed(path):
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


class _Entry:
    """An entry of a folder, under the path that the program sees."""

    def __init__(self, entry: Any, folder: Any) -> None:
        self._entry = entry
        name = os.fspath(folder)
        self.name = os.fsencode(entry.name) if isinstance(name, bytes) else entry.name
        self.path = os.path.join(name, self.name)  # noqa: PTH118

    def __fspath__(self) -> Any:
        return self.path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"


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
    replaced: list[tuple[Any, str, Any]] = [
        (builtins, "open", opener),
        (io, "open", opener),
        (io, "FileIO", _raw_file(overlay)),
        (os, "open", _os_opener(overlay, os.open)),
        (os, "listdir", _lister(overlay, os.listdir)),
        (os, "scandir", _scanner(overlay, os.scandir)),
        *((os, n, _reader(overlay, getattr(os, n))) for n in _ONE_READ if hasattr(os, n)),
        *((os, n, _reader(overlay, getattr(os, n), itself=True)) for n in _ONE_READ_ITSELF),
        *(
            (os, n, _changer(overlay, getattr(os, n), n))
            for n in (*_ONE_CHANGED, *_ONE_CHANGED_ITSELF, "fchmod", "fchown")
            if hasattr(os, n)
        ),
        *((os, n, _mover(overlay, getattr(os, n), n)) for n in _TWO_CHANGED),
        (torch, "save", _saver(overlay, torch.save)),
        *_of_pytorch(overlay),
    ]
    with suppress(ImportError):
        import sqlite3

        replaced.append((sqlite3, "connect", _connector(overlay, sqlite3.connect)))
    if importlib.util.find_spec("safetensors") is not None:
        import safetensors.torch  # type: ignore[import-not-found]

        replaced += [
            (safetensors.torch, "save_file", _safe_saver(overlay)),
            (safetensors, "serialize_file", _second(overlay, safetensors.serialize_file)),
            (safetensors, "safe_open", _reader(overlay, safetensors.safe_open)),
        ]
    taken = {id(getattr(owner, name)): value for owner, name, value in replaced}
    for owner, name, value in replaced:
        put(undo, owner, name, value)
    put(undo, shutil, "_use_fd_functions", False)
    _replace_taken(taken, undo)
    is_on = [True]
    undo.callback(is_on.clear)
    sys.addaudithook(_guard(overlay, is_on))


def _replace_taken(taken: dict[int, Any], undo: ExitStack) -> None:
    """Replace functions where modules that are loaded have taken them: ``bz2`` and ``tarfile``."""
    of_python = {"posix", "_io", "_sqlite3", "builtins", "os", "io", __name__}
    for module in [m for name, m in list(sys.modules.items()) if name not in of_python]:
        if not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in taken:
                put(undo, module, name, taken[id(value)])


def _of_pytorch(overlay: Overlay) -> Iterator[tuple[Any, str, Any]]:
    """Yield what opens files in C++: owner, name, what stands for it."""
    native: Any = torch._C
    script, function = native.ScriptModule, native.ScriptFunction
    for owner in (script, function):
        for name in ("save", "_save_for_mobile"):
            if hasattr(owner, name):
                yield owner, name, _second(overlay, getattr(owner, name))
    yield torch.jit, "load", _reader(overlay, torch.jit.load)
    yield native, "PyTorchFileWriter", _first(overlay, native.PyTorchFileWriter)
    yield native, "PyTorchFileReader", _reader(overlay, native.PyTorchFileReader)
    profiled: Any = native._autograd._ProfilerResult
    yield profiled, "save", _second(overlay, profiled.save)
    for owner in (torch.UntypedStorage, torch.TypedStorage, torch):
        yield owner, "from_file", _from_file(overlay, owner.from_file)


def _first(overlay: Overlay, original: Any) -> Any:
    def write(file: Any, *args: Any, **kwargs: Any) -> Any:
        path = overlay.to_change(file) if isinstance(file, str | os.PathLike) else file
        return original(path if path is file else os.fspath(path), *args, **kwargs)

    return write


def _second(overlay: Overlay, original: Any) -> Any:
    def write(self: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, os.fspath(overlay.to_change(file)), *args, **kwargs)

    return write


def _from_file(overlay: Overlay, original: Any) -> Any:
    def from_file(filename: Any, shared: bool | None = False, *args: Any, **kwargs: Any) -> Any:
        path = (
            overlay.to_change(filename, keeps_content=True) if shared else overlay.to_read(filename)
        )
        return original(os.fspath(path), shared, *args, **kwargs)

    return staticmethod(from_file) if original is not torch.from_file else from_file


def _connector(overlay: Overlay, original: Any) -> Any:
    def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
        """Open a database: in memory as it is, a copy of one that there is."""
        name = os.fsdecode(database)
        if kwargs.get("uri") and name.startswith("file:"):
            parts = urlsplit(name)
            is_in_memory = "mode=memory" in parts.query or not parts.path
            if not is_in_memory and ":memory:" not in parts.path:
                path = overlay.to_change(unquote(parts.path), keeps_content=True)
                database = parts._replace(path=path).geturl()
        elif name not in {"", ":memory:"}:
            database = overlay.to_change(database, keeps_content=True)
        return original(database, *args, **kwargs)

    return connect


def _changes(mode: str) -> bool:
    return any(letter in mode for letter in "wax+")


def _mapped(overlay: Overlay, file: Any, mode: str) -> Any:
    if _changes(mode):
        return overlay.to_change(file, keeps_content="w" not in mode)
    return overlay.to_read(file)


def _opener(overlay: Overlay, original: Any) -> Any:
    def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:  # noqa: A001
        return original(_mapped(overlay, file, mode), mode, *args, **kwargs)

    return open


def _raw_file(overlay: Overlay) -> Any:
    """Return ``io.FileIO`` for a program that makes one itself."""
    original = io.FileIO

    class _Kind(type(original)):  # type: ignore[misc]
        """Every raw file is one."""

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    class FileIO(original, metaclass=_Kind):  # type: ignore[misc, valid-type]
        """A raw file, where the program's files are."""

        def __init__(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
            super().__init__(_mapped(overlay, file, mode), mode, *args, **kwargs)

    return FileIO


def _os_opener(overlay: Overlay, original: Any) -> Any:
    def open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:  # noqa: A001
        if flags & _WRITES:
            keeps = not flags & os.O_TRUNC
            found = overlay.to_change(path, keeps_content=keeps, folder=dir_fd)
        else:
            found = overlay.to_read(path, folder=dir_fd)
        return original(found, flags, mode)

    return open


def _reader(overlay: Overlay, original: Any, *, itself: bool = False) -> Any:
    def read(path: Any, *args: Any, **kwargs: Any) -> Any:
        link = itself or kwargs.get("follow_symlinks") is False
        folder = kwargs.pop("dir_fd", None)
        found = overlay.to_read(path, itself=link, folder=folder)
        return original(found, *args, **kwargs)

    return read


def _changer(overlay: Overlay, original: Any, name: str) -> Any:
    def change(path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, int):
            is_kept = name in _OPEN_CHANGED and overlay.is_open_elsewhere(path)
            return None if is_kept else original(path, *args, **kwargs)
        folder = kwargs.pop("dir_fd", None)
        if name in _REMOVES and _is_removed(overlay, path, name, folder):
            return None
        itself = name in _ONE_CHANGED_ITSELF or kwargs.get("follow_symlinks") is False
        if name in _MAKES and overlay.is_there(
            os.fspath(overlay.to_read(path, itself=True, folder=folder)), itself=True
        ):
            raise FileExistsError(17, "File exists", str(path))
        keeps = name not in _MAKES
        found = overlay.to_change(path, keeps_content=keeps, itself=itself, folder=folder)
        return original(found, *args, **kwargs)

    return change


def _is_removed(overlay: Overlay, path: Any, name: str, folder: int | None) -> bool:
    """Whether what the program removes is really there and stays; it is gone for the program."""
    if name == "rmdir" and folder is None and os.listdir(path):  # noqa: PTH208 - as the program sees it
        raise OSError(39, "Directory not empty", str(path))
    return overlay.is_removed_only_here(path, folder)


def _mover(overlay: Overlay, original: Any, name: str) -> Any:
    def move(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        folders = [kwargs.pop(key, None) for key in ("src_dir_fd", "dst_dir_fd", "dir_fd")]
        source = src
        if name != "symlink":
            source = overlay.to_change(src, keeps_content=True, itself=True, folder=folders[0])
            if name in _MOVES:
                overlay.fill(src)
        target = overlay.to_change(dst, itself=True, folder=folders[1] or folders[2])
        result = original(source, target, *args, **kwargs)
        if name in _MOVES:
            overlay.is_removed_only_here(src, folders[0])
        return result

    return move


def _lister(overlay: Overlay, original: Any) -> Any:
    def listdir(path: Any = ".") -> Any:
        if isinstance(path, int):
            return original(path)
        return overlay.names(path, lambda p: list(original(p)), os.fsdecode)

    return listdir


def _scanner(overlay: Overlay, original: Any) -> Any:
    def scandir(path: Any = ".") -> Any:
        if isinstance(path, int):
            return original(path)
        found = overlay.names(path, lambda p: list(original(p)), lambda e: os.fsdecode(e.name))
        return _Entries([_Entry(entry, path) for entry in found])

    return scandir


def _saver(overlay: Overlay, original: Any) -> Any:
    """Return ``torch.save`` that writes everything but the values of tensors."""

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        session.note("Checkpoints are written without the values of tensors.")
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
            mode, flags = args[1], args[2]
            changes = isinstance(flags, int) and bool(flags & _WRITES)
            changes = changes or (isinstance(mode, str) and _changes(mode))
            paths = args[:1] if changes else ()
        elif event in _AUDITED:
            paths = tuple(args[i] for i in _AUDITED[event])
        elif event == "sqlite3.connect":
            paths = () if _is_no_file(args[0]) else args[:1]
        else:
            return
        if not is_on:
            return
        for name in paths:
            path = overlay.resolved(name, itself=event != "open")
            if path is not None and not overlay.is_free(path):
                raise PermissionError(
                    13, "a rehearsal changes no files; --allow-writes lets it", path
                )

    return hook


def _is_no_file(database: Any) -> bool:
    """Whether a database is in memory, or named by an address that was led elsewhere."""
    name = os.fsdecode(database)
    return name in {"", ":memory:"} or name.startswith("file:")
