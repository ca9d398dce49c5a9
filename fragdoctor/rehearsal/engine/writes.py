"""Keeps the program's files as they are: whatever it writes goes to a scratch folder.

A file that the program writes, creates or removes is one below the scratch folder, under its full
path with links resolved; files that it reads are looked for there first. Python's own functions are
redirected there, including those that modules imported earlier, and so are functions of PyTorch,
SQLite, safetensors, tokenizers and Arrow that open files themselves. Writes that reach the disk in
any other way are blocked: by an audit hook, and by the fence of :mod:`fragdoctor.rehearsal.fence`,
which also covers programs that the program starts.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import shutil
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import unquote, urlsplit

import torch

from fragdoctor.rehearsal.engine import (
    nothing,
    put,
    session,
    swap_all,
    when_imported,
    wrap,
    wrapped,
)
from fragdoctor.rehearsal.engine.host import LARGE_BYTES
from fragdoctor.rehearsal.fence import FREE

_ONE_READ: Final = ("stat", "access", "chdir", "statvfs", "getxattr", "listxattr")
_ONE_READ_ITSELF: Final = ("lstat", "readlink")  # the link itself, not its target
_ONE_CHANGED: Final = (
    "mkdir", "mkfifo", "mknod", "chmod", "chown", "utime", "truncate", "setxattr", "removexattr",
)  # fmt: skip
_ONE_CHANGED_ITSELF: Final = ("rmdir", "remove", "unlink", "lchown")
_TWO_CHANGED: Final = ("rename", "replace", "link", "symlink")
_REMOVES: Final = ("rmdir", "remove", "unlink")
_MAKES: Final = ("mkdir", "mkfifo", "mknod")
_MOVES: Final = ("rename", "replace")
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_OF_PYTHON: Final = frozenset({"posix", "_io", "_sqlite3", "builtins", "os", "io", __name__})
"""Modules whose own functions are needed behind those that take their place."""
_MOST_LINKS: Final = 40  # as many as Linux follows
# Audit events of changes: the positions of the arguments that are paths.
_AUDITED: Final = {
    "os.mkdir": (0,), "os.rmdir": (0,), "os.remove": (0,), "os.rename": (0, 1),
    "os.truncate": (0,), "os.link": (0, 1), "os.symlink": (1,), "os.chmod": (0,),
    "os.chown": (0,), "os.utime": (0,), "os.setxattr": (0,), "os.removexattr": (0,),
}  # fmt: skip


class Overlay:
    """Redirects the program's writes.

    Attributes:
        home: the scratch folder.
    """

    def __init__(self, home: Path) -> None:
        self.home = str(home.resolve())
        self.top = f"{self.home}/files"
        self.removed: set[str] = set()
        self._stat, self._lstat, self._mkdir = os.stat, os.lstat, os.mkdir
        self._readlink, self._symlink, self._scandir = os.readlink, os.symlink, os.scandir
        self._getcwd = os.getcwd

    def seen(self, path: str) -> str:
        """Return a path as the program sees it, which knows nothing of the scratch folder."""
        return path.removeprefix(self.top) or os.sep

    def here(self) -> str:
        """Return the current folder for ``os.getcwd``."""
        return self.seen(self._getcwd())

    def is_free(self, path: str) -> bool:
        """Return whether a path may be changed in place."""
        return any(path == top or path.startswith(top + os.sep) for top in (self.home, *FREE))

    def is_there(self, path: str, *, itself: bool = False) -> bool:
        """Return whether a path exists, or a link itself; bypasses the patches."""
        with suppress(OSError, ValueError):
            (self._lstat if itself else self._stat)(path)
            return True
        return False

    def is_gone(self, path: str) -> bool:
        """Return whether the program removed the real file or folder, or a folder above it."""
        while path not in self.removed:
            if path in {"", os.sep}:
                return False
            path = os.path.dirname(path)  # noqa: PTH120
        return True

    def resolved(self, name: Any, *, itself: bool = False, folder: int | None = None) -> str | None:
        """Return where a path leads from the program's point of view, with links resolved.

        With ``itself`` a link at its end is kept. ``folder`` is an open folder that a relative path
        starts from. Returns None for what is not a path, such as an open file.
        """
        path = _absolute(name)
        if path is None:
            return None
        if folder is not None and not os.path.isabs(os.fsdecode(name)):  # noqa: PTH117
            base = self._readlink(f"/proc/self/fd/{folder}")
            path = f"{self.seen(base)}/{os.fsdecode(name)}"
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
            done = "" if target.startswith(os.sep) else done
            rest += target.split("/")[::-1]
        return done or os.sep

    def _link(self, path: str) -> str | None:
        """Return the target of a link; None for anything else."""
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
        """Return the path to read in place of another."""
        if folder is None and not self.removed and not self.is_there(self.top):
            return name  # nothing was changed yet
        path = self.resolved(name, itself=itself, folder=folder)
        if path is None or name in {b"", ""}:
            return name
        if not self.is_free(path) and (
            self.is_there(self.top + path, itself=itself) or self.is_gone(path)
        ):
            return self.top + path
        is_relative = not os.path.isabs(os.fsdecode(name))  # noqa: PTH117
        is_moved = is_relative and (folder is not None or self.here() != self._getcwd())
        return name if path == _absolute(name) and not is_moved else path

    def to_change(
        self,
        name: Any,
        *,
        keeps_content: bool = False,
        itself: bool = False,
        folder: int | None = None,
    ) -> Any:
        """Return the path to change in place of another; its folders are created if they exist."""
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
        """Give a folder in the scratch folder all of its real contents before it is moved."""
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
        if self.is_there(self.top + path) or not self.is_there(path):
            return
        if path != os.sep:
            self._make_folders(os.path.dirname(path))  # noqa: PTH120
        with suppress(FileExistsError):
            self._mkdir(self.top + path)

    def is_removed_only_here(self, name: Any, folder: int | None) -> bool:
        """Note that the program removes a real file; return whether only the real file exists."""
        path = self.resolved(name, itself=True, folder=folder)
        if path is None or self.is_free(path):
            return False
        if not self.is_there(path, itself=True) or self.is_gone(path):
            return False
        self.removed.add(path)
        return not self.is_there(self.top + path, itself=True)

    def is_open_elsewhere(self, fd: int) -> bool:
        """Return whether an open file is one that must not be changed."""
        with suppress(OSError):
            path = self._readlink(f"/proc/self/fd/{fd}")
            return path.startswith(os.sep) and not self.is_free(path)
        return False

    # ---- new paths for functions that open a file, from all of their arguments ------------------

    def to_stat(
        self, path: Any, *_: Any, folder: int | None = None, follow_symlinks: bool = True, **__: Any
    ) -> Any:
        """Return the path whose file is examined, or opened for reading."""
        return self.to_read(path, itself=not follow_symlinks, folder=folder)

    def to_write(self, path: Any, *_: Any, **__: Any) -> Any:
        """Return the path of a file that is rewritten."""
        return self.to_change(path)

    def to_fill(self, path: Any, *_: Any, **__: Any) -> Any:
        """Return the folder into which files are written."""
        return os.path.dirname(self.to_change(os.path.join(path, "file")))  # noqa: PTH118, PTH120

    def to_open(self, file: Any, mode: str = "r", *_: Any, **__: Any) -> Any:
        """Return the path for Python's ``open``."""
        if _changes(mode):
            return self.to_change(file, keeps_content="w" not in mode)
        return self.to_read(file)

    def to_open_by_flags(
        self, path: Any, flags: int, *_: Any, folder: int | None = None, **__: Any
    ) -> Any:
        """Return the path for ``os.open``."""
        if flags & _WRITES:
            return self.to_change(path, keeps_content=not flags & os.O_TRUNC, folder=folder)
        return self.to_read(path, folder=folder)

    def to_map(self, filename: Any, shared: bool | None = False, *_: Any, **__: Any) -> str:
        """Return the path of the file that backs a tensor's memory."""
        return os.fspath(self.to_open(filename, "r+" if shared else "r"))  # type: ignore[no-any-return]

    def to_connect(self, database: Any, *_: Any, uri: bool = False, **__: Any) -> Any:
        """Return the database for SQLite: unchanged if in memory, else a copy of the real one."""
        name = os.fsdecode(database)
        if not uri or not name.startswith("file:"):
            is_file = name not in {"", ":memory:"}
            return self.to_change(database, keeps_content=True) if is_file else database
        parts = urlsplit(name)
        if "mode=memory" in parts.query or not parts.path or ":memory:" in parts.path:
            return database
        path = self.to_change(unquote(parts.path), keeps_content=True)
        return parts._replace(path=path).geturl()

    def names(
        self, listed: Callable[[Any], list[Any]], key: Callable[[Any], str], path: Any = "."
    ) -> Any:
        """Return a folder's contents: its real entries and those in the scratch folder."""
        name, path = path, self.resolved(path)
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
    """Return a path as an absolute path; None for what is not a path, such as an open file."""
    if isinstance(name, int) or name is None:
        return None
    with suppress(TypeError, ValueError):
        return os.path.abspath(os.fsdecode(name))  # noqa: PTH100 - must stay lexical
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


class _Entries(chain[_Entry]):
    """The return value of ``os.scandir``."""

    def __enter__(self) -> Self:
        return self

    __exit__ = close = nothing


def install(home: Path) -> None:
    """Redirect writes to a scratch folder."""
    overlay = Overlay(home)
    wrap(torch._C.PyTorchFileWriter, "write_record_metadata", _write_record)
    replaced: list[tuple[Any, str, Any]] = [
        *((*row[:2], _led(getattr(*row[:2]), *row[2:])) for row in _opening(overlay)),
        (io, "FileIO", _raw_file(overlay)),
        (os, "getcwd", overlay.here),
        (os, "getcwdb", lambda: os.fsencode(overlay.here())),
        (os, "listdir", partial(overlay.names, os.listdir, os.fsdecode)),
        (os, "scandir", partial(_scan, overlay, os.scandir)),
        *(
            (os, n, partial(_change, overlay, n, getattr(os, n)))
            for n in (*_ONE_CHANGED, *_ONE_CHANGED_ITSELF, "fchmod", "fchown")
            if hasattr(os, n)
        ),
        *((os, n, partial(_move, overlay, n, getattr(os, n))) for n in _TWO_CHANGED),
        (torch, "save", wrapped(torch.save, partial(_save, overlay))),
        *(
            (kind, "from_file", staticmethod(_led(kind.from_file, overlay.to_map, "filename")))
            for kind in (torch.UntypedStorage, torch.TypedStorage)
        ),
    ]
    taken = {id(getattr(owner, name)): value for owner, name, value in replaced}
    for owner, name, value in replaced:
        put(owner, name, value)
    put(shutil, "_use_fd_functions", False)
    # Modules loaded earlier have them already: ``bz2`` and ``tarfile``.
    swap_all(taken, but=_OF_PYTHON)
    _lead_imports(overlay)
    save_file = partial(_save_safe, overlay)
    when_imported({name: partial(_lead_library, overlay, name) for name in _LIBRARIES})
    when_imported({"safetensors.torch": lambda module: wrap(module, "save_file", save_file)})
    sys.addaudithook(partial(_guard, overlay))


def _lead_imports(overlay: Overlay) -> None:
    """Let imports find modules that the program wrote: libraries copy a checkpoint's code."""
    machinery: Any = sys.modules["_frozen_importlib_external"]
    led = {
        "stat": os.stat,
        "listdir": os.listdir,
        "open_code": _led(machinery._io.open_code, overlay.to_stat, "path"),
    }
    for name in ("_os", "_io"):
        functions = vars(getattr(machinery, name)) | led
        put(machinery, name, types.SimpleNamespace(**functions))


def _opening(overlay: Overlay) -> Iterator[tuple[Any, ...]]:
    """Yield functions that open a file: owner, name, redirection, name and position of the path.

    C++ code opens files itself: PyTorch's and SQLite's.
    """
    for owner in (builtins, io):
        yield owner, "open", overlay.to_open, "file"
    yield os, "open", overlay.to_open_by_flags, "path"
    itself = partial(overlay.to_stat, follow_symlinks=False)
    for names, lead in ((_ONE_READ, overlay.to_stat), (_ONE_READ_ITSELF, itself)):
        yield from ((os, name, lead, "path") for name in names if hasattr(os, name))
    native: Any = torch._C
    for owner in (native.ScriptModule, native.ScriptFunction):
        for name in ("save", "_save_for_mobile"):
            if hasattr(owner, name):
                yield owner, name, overlay.to_write, "filename", 1
    yield native._autograd._ProfilerResult, "save", overlay.to_write, "path", 1
    yield native, "PyTorchFileWriter", overlay.to_write, "file"
    yield native, "PyTorchFileReader", overlay.to_stat, "file"
    yield torch.jit, "load", overlay.to_stat, "f"
    yield torch, "from_file", overlay.to_map, "filename"
    with suppress(ImportError):
        import sqlite3

        yield sqlite3, "connect", overlay.to_connect, "database"


_LIBRARIES: Final[Mapping[str, Sequence[tuple[Any, ...]]]] = {
    "pyarrow": [("memory_map", Overlay.to_open, "path")],
    "safetensors": [
        ("serialize_file", Overlay.to_write, "filename", 1),
        ("safe_open", Overlay.to_stat, "filename"),
    ],
    "tokenizers": [
        ("Tokenizer.save", Overlay.to_write, "path", 1),
        ("Tokenizer.from_file", Overlay.to_stat, "path"),
        ("models.Model.save", Overlay.to_fill, "folder", 1),
    ],
}
"""Functions of libraries that open files in native code: name, redirection, the path argument."""


def _lead_library(overlay: Overlay, library: str, module: Any) -> None:
    for place, lead, *argument in _LIBRARIES[library]:
        *owners, name = place.split(".")
        owner = reduce(getattr, owners, module)
        call = _led(getattr(owner, name), partial(lead, overlay), *argument)
        put(owner, name, call if len(argument) > 1 or not owners else staticmethod(call))


def _led(original: Any, lead: Callable[..., Any], name: str, place: int = 0) -> Any:
    """Return a function with one of its arguments, a path, redirected."""

    def call(*args: Any, **kwargs: Any) -> Any:
        path, *rest = args[place:] or [kwargs.pop(name)]
        folder = kwargs.pop("dir_fd", None)
        found = lead(path, *rest, folder=folder, **kwargs)
        return original(*args[:place], found, *rest, **kwargs)

    return call


def _changes(mode: str) -> bool:
    return any(letter in mode for letter in "wax+")


def _raw_file(overlay: Overlay) -> Any:
    """Return ``io.FileIO`` for programs that create raw files themselves."""
    original = io.FileIO

    class _Kind(type(original)):  # type: ignore[misc]
        """Makes every raw file count as an instance."""

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    class FileIO(original, metaclass=_Kind):  # type: ignore[misc, valid-type]
        """A raw file at its redirected path."""

        def __init__(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
            super().__init__(overlay.to_open(file, mode), mode, *args, **kwargs)

    return FileIO


def _change(
    overlay: Overlay, name: str, original: Any, path: Any, *args: Any, **kwargs: Any
) -> Any:
    if isinstance(path, int):
        return None if overlay.is_open_elsewhere(path) else original(path, *args, **kwargs)
    folder = kwargs.pop("dir_fd", None)
    if name == "rmdir" and folder is None and os.listdir(path):  # noqa: PTH208 - as the program sees it
        raise OSError(39, "Directory not empty", str(path))
    if name in _REMOVES and overlay.is_removed_only_here(path, folder):
        return None
    itself = name in _ONE_CHANGED_ITSELF or kwargs.get("follow_symlinks") is False
    if name in _MAKES and overlay.is_there(
        os.fspath(overlay.to_read(path, itself=True, folder=folder)), itself=True
    ):
        raise FileExistsError(17, "File exists", str(path))
    found = overlay.to_change(path, keeps_content=name not in _MAKES, itself=itself, folder=folder)
    return original(found, *args, **kwargs)


def _move(
    overlay: Overlay, name: str, original: Any, src: Any, dst: Any, *args: Any, **kwargs: Any
) -> Any:
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


def _scan(overlay: Overlay, original: Any, path: Any = ".") -> Any:
    if isinstance(path, int):
        return original(path)
    found = overlay.names(lambda p: list(original(p)), lambda e: os.fsdecode(e.name), path)
    return _Entries([_Entry(entry, path) for entry in found])


def _save(overlay: Overlay, original: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    """``torch.save`` that writes the values of small tensors on the CPU only.

    A storage is pickled in memory, in the old format; what is loaded from there has its values.
    """
    if isinstance(f, io.BytesIO) and not kwargs.get("_use_new_zipfile_serialization", True):
        original(obj, f, *args, **kwargs)
        return
    session.note("Checkpoints are written without values, except of small tensors on the CPU.")
    kwargs["_use_new_zipfile_serialization"] = True  # which torch.load recognizes
    with torch.serialization.skip_data():
        original(obj, overlay.to_change(f), *args, **kwargs)


def _write_record(left_out: Any, self: Any, name: str, n_bytes: int) -> None:
    """Write what ``skip_data`` leaves out if it has values, such as states of generators."""
    storage = sys._getframe(2).f_locals["storage"]  # of ``torch.serialization._save``
    if n_bytes < LARGE_BYTES and storage.device.type == "cpu":
        self.write_record(name, storage, n_bytes)
    else:
        left_out(self, name, n_bytes)


def _save_safe(overlay: Overlay, _: Any, tensors: Any, filename: Any, metadata: Any = None) -> None:
    """``safetensors.torch.save_file`` that writes the header, and space for the values."""
    kinds = sys.modules["safetensors.torch"]._TYPES.items()
    names = {dtype: name for name, dtype in kinds}
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


def _guard(overlay: Overlay, event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        mode, flags = args[1], args[2]
        changes = isinstance(flags, int) and bool(flags & _WRITES)
        changes = changes or (isinstance(mode, str) and _changes(mode))
        paths = args[:1] if changes else ()
    elif event in _AUDITED:
        paths = tuple(args[i] for i in _AUDITED[event])
    elif event == "sqlite3.connect":
        name = os.fsdecode(args[0])  # in memory, or a redirected URI
        paths = () if name in {"", ":memory:"} or name.startswith("file:") else args[:1]
    else:
        return
    for name in paths:
        path = overlay.resolved(name, itself=event != "open")
        if path is not None and not overlay.is_free(path):
            raise PermissionError(13, "a rehearsal changes no files; --allow-writes lets it", path)
