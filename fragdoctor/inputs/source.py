"""Bounded byte streams over paths, URLs, stdin, open files or bytes; gzip and zstd are unpacked.

Memory use stays small whatever the input claims, and two counters guard against bombs: bytes after
unpacking (``Limits.max_input_bytes``) and bytes unpacked per byte read (``max_expansion``).
The same bounds hold for texts and snapshots, because all readers read through such a stream.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import sys
import zlib
from contextlib import ExitStack
from os import PathLike, fspath
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, Final, Protocol, Self, cast

from fragdoctor.errors import InputError, LimitExceeded, RefusedSnapshot, TruncatedSnapshot
from fragdoctor.inputs.confinement import check_place
from fragdoctor.inputs.remote import is_remote, open_remote, without_secrets
from fragdoctor.limits import DEFAULT_LIMITS, Limits
from fragdoctor.model.hooks import report_progress
from fragdoctor.opening import is_text, open_readable
from fragdoctor.units import MIB, format_size

GZIP_MAGIC: Final = b"\x1f\x8b"
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
HEAD_BYTES: Final = 4096
_REPORT_EVERY_BYTES: Final = 4 * MIB


class _Readable(Protocol):
    def readinto(self, buffer: memoryview, /) -> int | None: ...


class _Counted(io.RawIOBase):
    """Counts the bytes read from the file itself, including the head that was read for peeking."""

    def __init__(self, raw: BinaryIO, head: bytes) -> None:
        self._raw = raw
        self._fill = raw.readinto if hasattr(raw, "readinto") else None
        self._head = memoryview(head)
        self.n_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if len(self._head):
            n = min(len(self._head), len(buffer))
            buffer[:n] = self._head[:n]
            self._head = self._head[n:]
        elif self._fill is not None:
            n = self._fill(buffer) or 0  # avoids a copy
        else:
            data = self._raw.read(len(buffer))
            n = len(data)
            buffer[:n] = data
        self.n_bytes += n
        return n


class _Terminal(io.RawIOBase):
    """A terminal, which ends at the first Ctrl-D; reading past it would ask for a second one."""

    def __init__(self, raw: io.BufferedReader) -> None:
        self._raw = raw
        self._is_over = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = b"" if self._is_over else self._raw.read1(len(buffer))
        self._is_over = not data
        buffer[: len(data)] = data
        return len(data)


class ByteStream(io.RawIOBase):
    """The unpacked bytes of one input, bounded.

    Attributes:
        name: name shown to the user; hostile text.
        compression: ``gzip``, ``zstd`` or ``""``.
        head: the first bytes (up to 4096), which can still be read from the stream.
    """

    def __init__(self, raw: BinaryIO, name: str, limits: Limits, stack: ExitStack) -> None:
        self.name = name
        self._limits = limits
        self._stack = stack
        try:
            packed_head = _read_full(raw, HEAD_BYTES)
        except OSError as error:
            raise _unreadable(name, error) from error
        self._packed = _Counted(raw, packed_head)
        self.compression = ""
        self._inner: _Readable = self._packed
        self._damage: tuple[type[Exception], ...] = (zlib.error, gzip.BadGzipFile)
        if packed_head.startswith(GZIP_MAGIC):
            self.compression = "gzip"
            self._inner = gzip.GzipFile(fileobj=self._packed)
        elif packed_head.startswith(ZSTD_MAGIC):
            self.compression = "zstd"
            zstd = zstd_module()
            self._inner, self._damage = zstd.ZstdFile(self._packed), (zstd.ZstdError,)
        self._file_bytes = _length(raw)
        self._reported_bytes = 0
        self.n_bytes = 0
        self._head = b""
        self.head = packed_head if not self.compression else self._peek()

    def _peek(self) -> bytes:
        parts = bytearray()
        buffer = bytearray(HEAD_BYTES)
        while len(parts) < HEAD_BYTES:
            try:
                n = self._read_inner(memoryview(buffer)[: HEAD_BYTES - len(parts)])
            except (TruncatedSnapshot, RefusedSnapshot):
                if not parts:
                    raise
                break  # the bytes so far can be classified; reading on raises the error again
            if n == 0:
                break
            parts += buffer[:n]
        self._head = bytes(parts)
        return self._head

    def __enter__(self) -> Self:
        return self

    def close(self) -> None:
        """Close the file, if it was opened here."""
        self._stack.close()
        super().close()

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the buffer as far as possible; 0 means the end.

        Raises:
            LimitExceeded: more bytes, or more bytes per compressed byte, than the limits allow.
            TruncatedSnapshot: the compressed stream ends in the middle.
            RefusedSnapshot: the compressed stream is damaged.
            InputError: the operating system reports a read error.
        """
        if self._head:
            n = min(len(self._head), len(buffer))
            buffer[:n] = self._head[:n]
            self._head = self._head[n:]
        else:
            n = self._read_inner(buffer)
        self.n_bytes += n
        self._check_limits()
        if self.n_bytes - self._reported_bytes >= _REPORT_EVERY_BYTES:
            self._reported_bytes = self.n_bytes
            report_progress("Reading", self._packed.n_bytes, self._file_bytes)
        return n

    def _read_inner(self, buffer: memoryview) -> int:
        try:
            return self._inner.readinto(buffer) or 0
        except EOFError:
            raise TruncatedSnapshot(
                f"The {self.compression} stream ends in the middle.",
                hint="Copy the file again, or record it again.",
                offset=self._packed.n_bytes,
            ) from None
        except self._damage:
            raise RefusedSnapshot(
                f"The {self.compression} stream is damaged.",
                hint="Copy the file again.",
                offset=self._packed.n_bytes,
            ) from None
        except OSError as error:
            raise _unreadable(self.name, error) from error

    def _check_limits(self) -> None:
        if self.n_bytes > self._limits.max_input_bytes:
            raise LimitExceeded(
                f"The input is longer than {format_size(self._limits.max_input_bytes)}.",
                hint="Record a shorter stretch: _record_memory_history(max_entries=100000).",
                offset=self.n_bytes,
            )
        if not self.compression or self.n_bytes <= self._limits.free_expansion_bytes:
            return
        if self.n_bytes > self._limits.max_expansion * self._packed.n_bytes:
            raise LimitExceeded(
                f"The {self.compression} stream unpacks to more than "
                f"{self._limits.max_expansion} times its size.",
                hint="Genuine files unpack to about 20 times their size. If you trust this one, "
                "unpack it and give the result.",
                offset=self.n_bytes,
            )


def zstd_module() -> ModuleType:
    """Return the module that unpacks zstd; loading it takes milliseconds, so only if needed."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


def _unreadable(name: str, error: OSError) -> InputError:
    return InputError(
        f"{shown(name)} cannot be read: {error.strerror or 'input/output error'}.",
        hint="Check the file and its permissions.",
    )


def _length(raw: BinaryIO) -> int:
    """Return the length of a file, or 0 if it has none, like a pipe."""
    try:
        status = os.fstat(raw.fileno())
    except (AttributeError, OSError, ValueError):
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _read_full(raw: BinaryIO, n: int) -> bytes:
    parts = bytearray()
    while len(parts) < n:
        data = raw.read(n - len(parts))
        if not data:
            break
        parts += data
    return bytes(parts)


def _standard_input() -> BinaryIO:
    raw = sys.stdin.buffer
    if sys.stdin.isatty() and isinstance(raw, io.BufferedReader):
        return cast("BinaryIO", _Terminal(raw))
    return raw


def open_source(
    source: str | PathLike[str] | BinaryIO | bytes,
    *,
    limits: Limits = DEFAULT_LIMITS,
    name: str | None = None,
) -> ByteStream:
    """Open a path, a URL, ``-`` (stdin), an open binary file or bytes for bounded reading.

    ``name`` is the display name of an open file or bytes; if None, an open file's own name is used.

    Raises:
        InputError: the source cannot be opened, or its first bytes cannot be read.
    """
    stack = ExitStack()
    if isinstance(source, bytes):
        return ByteStream(io.BytesIO(source), name or "<bytes>", limits, stack)
    if isinstance(source, str | PathLike):
        path = fspath(source)
        if path == "-":
            return ByteStream(_standard_input(), "-", limits, stack)
        with stack:  # closes the file again if its first bytes cannot be read
            if is_remote(path):
                raw = stack.enter_context(open_remote(path))
                return ByteStream(raw, without_secrets(path), limits, stack.pop_all())
            return ByteStream(_opened(path, stack), path, limits, stack.pop_all())
    return ByteStream(source, name or str(getattr(source, "name", "<stream>")), limits, stack)


def _opened(path: str, stack: ExitStack) -> BinaryIO:
    """Open a file; refuse early and clearly if opening it would fail or never finish."""
    check_place(path)
    try:
        mode = Path(path).stat().st_mode
        if stat.S_ISDIR(mode):
            raise InputError(f"{path} is a directory.", hint="Give a file in it.")
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
            raise InputError(f"{path} is not a file.", hint="Give a file, or - for a pipe.")
        return cast("BinaryIO", stack.enter_context(open_readable(path)))
    except (OSError, ValueError) as error:
        if is_text(path):
            raise InputError(
                "This is text, not a file.", hint="Run: fragdoctor oom 'the message'"
            ) from error
        if isinstance(error, FileNotFoundError):
            near = _near(path)
            hint = f"Did you mean {near}?" if near else "Check the path."
            raise InputError(f"{path} does not exist.", hint=hint) from error
        reason = (isinstance(error, OSError) and error.strerror) or "not a file name"
        raise InputError(
            f"{path} cannot be opened: {reason[:1].lower()}{reason[1:]}.",
            hint="Check the path and its permissions.",
        ) from error


def _near(path: str) -> str:
    """Return the file next to a missing one with the most similar name, or "" if none is close."""
    from difflib import get_close_matches
    from itertools import islice

    folder, base = os.path.split(path)
    try:
        with os.scandir(folder or ".") as entries:
            # A link to nowhere is listed, though nothing is there.
            names = [entry.name for entry in islice(entries, 2000) if entry.name != base]
    except OSError:
        return ""
    longer = sorted(name for name in names if base and name.startswith(f"{base}."))
    found = longer[:1] or get_close_matches(base[:200], names, 1, 0.85)
    return str(Path(folder, found[0])) if found else ""


def shown(name: str) -> str:
    """Return an input's display name: hostile text, without passwords."""
    return _CALLED.get(name) or without_secrets(name)


_CALLED: Final = {"-": "standard input", "<bytes>": "the data", "<stream>": "the data"}
