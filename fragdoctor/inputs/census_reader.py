"""Read the census and the source lines of a bundle, which are JSON that anyone may have written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from fragdoctor.errors import InputError, LimitExceeded
from fragdoctor.inputs.bundles import READERS, Readers, checked, listed, mapping, number, text
from fragdoctor.model.census import Census, HoldingKind, Owner
from fragdoctor.model.finding import Location
from fragdoctor.units import MIB, format_size

MAX_BYTES: Final = 64 * MIB
"""A genuine census of 200,000 storages takes 10 MB, and a bundle holds at most three of them."""

_MAX_CENSUSES: Final = 8
_MAX_OWNERS: Final = 10_000
_MAX_PATHS: Final = 100_000
_MAX_STORAGES: Final = 1_000_000
_MAX_FILES: Final = 5_000
_MAX_LINES: Final = 50_000
_MAX_TEXT: Final = 400
_KINDS: Final = frozenset(str(k) for k in HoldingKind)


def read_censuses(file: BinaryIO) -> tuple[Census, ...]:
    """Return the censuses of a bundle, the earliest first.

    Raises:
        InputError: the file is not a census of this version, or is too long.
    """
    value = _document(file, "fragdoctor-census")
    found = [_census(e) for e in listed(value.get("censuses"), _MAX_CENSUSES)]
    return tuple(sorted((c for c in found if c is not None), key=lambda c: c.time_us))


def read_source_lines(file: BinaryIO) -> Mapping[str, Mapping[int, str]]:
    """Return the source lines in a bundle: file -> line number -> text.

    Raises:
        InputError: the file does not hold sources in this version's format, or is too long.
    """
    files = _document(file, "fragdoctor-sources").get("files")
    found: dict[str, dict[int, str]] = {}
    n_lines = 0
    for name, lines in list(mapping(files).items())[:_MAX_FILES]:
        kept = {
            int(n): said[:_MAX_TEXT]
            for n, said in mapping(lines).items()
            if n.isascii() and n.isdigit() and len(n) < 10 and isinstance(said, str)
        }
        n_lines += len(kept)
        if n_lines > _MAX_LINES:
            break
        found[name] = kept
    return found


def _document(file: BinaryIO, kind: str) -> Mapping[str, Any]:
    data = bytearray()
    while len(data) <= MAX_BYTES and (part := file.read(MIB)):
        data += part
    if len(data) > MAX_BYTES:
        raise LimitExceeded(f"It is longer than {format_size(MAX_BYTES)}.", hint="")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise InputError("It is not JSON.", hint="") from e
    if not isinstance(value, dict) or value.get("format") != kind or value.get("version") != 1:
        raise InputError("It was written by another version of fragdoctor.", hint="")
    return value


def _census(value: Any) -> Census | None:
    """Return a census, or None if its columns do not fit together."""
    if not isinstance(value, dict):
        return None
    owners = [
        checked(Owner, mapping(o), _READERS) for o in listed(value.get("owners"), _MAX_OWNERS)
    ]
    columns = [
        _column(value.get(name), kind)
        for name, kind in (("devices", np.int32), ("addresses", np.uint64), ("sizes", np.int64),
                           ("holders", np.int32))
    ]  # fmt: skip
    device, address, size, holder = columns
    if device is None or address is None or size is None or holder is None:
        return None
    if len({len(device), len(address), len(size), len(holder)}) != 1:
        return None
    known = (holder >= 0) & (holder < len(owners))
    texts = [text(p, _MAX_TEXT) for p in listed(value.get("paths"), _MAX_PATHS)]
    part = _column(value.get("parts"), np.int32)
    if part is None or len(part) != len(holder):
        part = np.full(len(holder), -1, np.int32)
    return Census(
        time_us=number(value.get("time_us")) or 0,
        step=number(value.get("step")) or 0,
        is_complete=value.get("is_complete") is True,
        owners=tuple(owners),
        device=device,
        address=address,
        size_bytes=np.maximum(size, 0),
        holder=np.where(known, holder, -1).astype(np.int32),
        paths=tuple(texts),
        part=np.where((part >= 0) & (part < len(texts)), part, -1).astype(np.int32),
    )


def _column(value: Any, kind: Any) -> npt.NDArray[Any] | None:
    if not isinstance(value, list) or len(value) > _MAX_STORAGES:
        return None
    if not all(type(n) is int for n in value):
        return None
    try:
        return np.array(value, kind)
    except OverflowError:
        return None


def _place(value: Any) -> Location | None:
    if not isinstance(value, list) or len(value) != 3:
        return None
    return Location(text(value[0], _MAX_TEXT), number(value[1]) or 0, text(value[2], _MAX_TEXT))


_READERS: Final[Readers] = {
    **READERS,
    str: partial(text, most=_MAX_TEXT),
    HoldingKind: lambda value: HoldingKind(value) if text(value) in _KINDS else HoldingKind.TENSOR,
    Location | None: _place,
}
