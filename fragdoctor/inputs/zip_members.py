"""Read members of zip files as bounded streams, never to disk and never whole into memory."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Sequence
from os import PathLike
from pathlib import PurePosixPath
from typing import IO, BinaryIO, Final

from fragdoctor.errors import InputError, LimitExceeded, RefusedSnapshot, TruncatedSnapshot
from fragdoctor.limits import DEFAULT_LIMITS
from fragdoctor.units import MIB, format_size

_GRACE_BYTES: Final = 64 * MIB
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
DAMAGE: Final = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    OSError,  # offsets before the file's start or past its end
    ValueError,
    OverflowError,
    RuntimeError,  # encrypted; its subclass NotImplementedError: an unknown compression method
)
"""The exceptions that ``zipfile`` raises on damaged or forged archives, found by fuzzing."""


def open_archive(
    source: str | PathLike[str] | BinaryIO, name: str, most: int, usual: str
) -> zipfile.ZipFile:
    """Open a zip file; ``name`` is its display name, ``usual`` what a genuine one holds.

    Raises:
        InputError: the archive is damaged, or has more than ``most`` members.
    """
    try:
        archive = zipfile.ZipFile(source)
    except DAMAGE as e:
        raise damaged(name) from e
    n = len(archive.infolist())
    if n > most:
        archive.close()
        raise LimitExceeded(f"{name} holds {n} members.", hint=usual)
    return archive


def only_one(
    entries: Sequence[zipfile.ZipInfo], file: str, name: str, hint: str
) -> zipfile.ZipInfo:
    """Return the member that is this file of an archive, packed like genuine ones.

    Raises:
        RefusedSnapshot: it is there twice, encrypted, or neither stored nor deflated.
    """
    if len(entries) > 1 or entries[0].flag_bits & 1 or entries[0].compress_type not in _METHODS:
        raise RefusedSnapshot(
            f"{name} holds {file} twice, encrypted or packed in an unusual way.", hint=hint
        )
    return entries[0]


def open_member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str) -> BinaryIO:
    """Open a member; ``name`` is the archive's display name.

    Raises:
        InputError: the archive is damaged. Reading raises it too, and ``LimitExceeded`` for a bomb.
    """
    try:
        raw = archive.open(entry)
    except DAMAGE as e:
        raise damaged(name) from e
    return io.BufferedReader(_Member(raw, entry, name), 1 << 16)


def damaged(name: str) -> InputError:
    """Return the error for an archive that cannot be read."""
    return TruncatedSnapshot(f"{name} is a damaged zip file.", hint="Copy it again.")


def parts_of(name: str) -> tuple[str, ...]:
    """Return the parts of a member's path, or () if it is absolute or contains ``..``."""
    path = PurePosixPath(name.replace("\\", "/"))
    return () if path.is_absolute() or ".." in path.parts else path.parts


class _Member(io.RawIOBase):
    """One member of a zip, unpacked as it is read, and bounded by what genuine members need."""

    def __init__(self, raw: IO[bytes], entry: zipfile.ZipInfo, name: str) -> None:
        self._raw = raw
        self._entry = entry
        self._name = name
        self._n_bytes = 0

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._raw.close()  # otherwise the archive stays open as long as its members
        super().close()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            data = self._raw.read(len(buffer))
        except DAMAGE as e:
            raise damaged(self._name) from e
        buffer[: len(data)] = data
        self._n_bytes += len(data)
        limits = DEFAULT_LIMITS
        packed = max(1, self._entry.compress_size)
        is_bomb = self._n_bytes > max(_GRACE_BYTES, limits.max_expansion * packed)
        if is_bomb or self._n_bytes > limits.max_input_bytes:
            raise LimitExceeded(
                f"A member of {self._name} unpacks to more than {format_size(self._n_bytes - 1)}.",
                hint="Genuine bundles unpack to about 20 times their size.",
            )
        return len(data)
