"""Read the census and the source lines of a bundle, which are JSON that anyone may have written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from fragdoctor.errors import InputError, LimitExceeded
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
    entries = value.get("censuses")
    found = [_census(e) for e in entries[:_MAX_CENSUSES]] if isinstance(entries, list) else []
    return tuple(sorted((c for c in found if c is not None), key=lambda c: c.time_us))


def read_source_lines(file: BinaryIO) -> Mapping[str, Mapping[int, str]]:
    """Return the source lines in a bundle: file -> line number -> text.

    Raises:
        InputError: the file does not hold sources in this version's format, or is too long.
    """
    files = _document(file, "fragdoctor-sources").get("files")
    found: dict[str, dict[int, str]] = {}
    n_lines = 0
    for name, lines in list(files.items())[:_MAX_FILES] if isinstance(files, dict) else ():
        kept = {
            int(n): text[:_MAX_TEXT]
            for n, text in (lines.items() if isinstance(lines, dict) else ())
            if n.isascii() and n.isdigit() and len(n) < 10 and isinstance(text, str)
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
    listed = value.get("owners")
    owners = [_owner(o) for o in listed[:_MAX_OWNERS]] if isinstance(listed, list) else []
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
    paths = value.get("paths")
    texts = [_text(p) for p in paths[:_MAX_PATHS]] if isinstance(paths, list) else []
    part = _column(value.get("parts"), np.int32)
    if part is None or len(part) != len(holder):
        part = np.full(len(holder), -1, np.int32)
    return Census(
        time_us=_number(value.get("time_us")),
        step=_number(value.get("step")),
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


def _owner(value: Any) -> Owner:
    fields: Mapping[str, Any] = value if isinstance(value, dict) else {}
    kind = _text(fields.get("kind"))
    return Owner(
        name=_text(fields.get("name")),
        kind=HoldingKind(kind) if kind in _KINDS else HoldingKind.TENSOR,
        n_items=_number(fields.get("n_items")),
        class_name=_text(fields.get("class_name")),
        scope=_text(fields.get("scope")),
        place=_place(fields.get("place")),
        through=_text(fields.get("through")),
        max_items=_number(fields.get("max_items")),
    )


def _place(value: Any) -> Location | None:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 3:
        return None
    return Location(_text(value[0]), _number(value[1]), _text(value[2]))


def _number(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 1 << 62 else 0


def _text(value: Any) -> str:
    return value[:_MAX_TEXT] if isinstance(value, str) else ""
