"""Bundles of ``fragdoctor run``: a directory or a zip file, read as one case.

A zip is never unpacked to disk. Only members with known names are read, as bounded streams.

Anyone may have written a bundle's manifest, so it is checked field by field.
"""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike, fspath
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, Final, TypeAlias, TypeVar, cast

from msgspec import Struct
from msgspec.structs import fields, replace

from fragdoctor.errors import InputError, LimitExceeded, NotASnapshot, RefusedSnapshot
from fragdoctor.inputs.confinement import check_place, is_allowed
from fragdoctor.inputs.remote import is_remote, list_remote, open_remote, without_secrets
from fragdoctor.inputs.zip_members import DAMAGE, only_one, open_archive, open_member, parts_of
from fragdoctor.limits import DEFAULT_LIMITS
from fragdoctor.model.case import BundleDevice, BundleFacts, OtherProcess, Overrides
from fragdoctor.model.finding import Location
from fragdoctor.units import MIB, format_size

T = TypeVar("T", bound=Struct)
Readers: TypeAlias = Mapping[Any, Callable[[Any], Any]]

MANIFEST: Final = "bundle.json"
SNAPSHOT: Final = "snapshot.pickle"
MEMBERS: Final[tuple[str, ...]] = (SNAPSHOT, "stats.json", "oom.txt")
"""The files of a bundle that are read besides its manifest, in this order."""

CENSUS: Final = "census.json"
SOURCES: Final = "sources.json"
ADDED: Final = (CENSUS, SOURCES)
"""Files that add detail to a snapshot and mean nothing without one."""

_MAX_MANIFEST_BYTES: Final = 4 * MIB
_MAX_ENTRIES: Final = 1000
FORMAT: Final = "fragdoctor-bundle"
VERSION: Final = 1
REASONS: Final = ("oom", "exit", "signal", "block", "request")
_MAX_TEXT: Final = 4096
_MAX_LISTED: Final = 1024
_MAX_NUMBER: Final = 1 << 60


class BundleFiles:
    """An open bundle, whether it is a directory, a zip file or a remote folder.

    Attributes:
        open: opens one of the bundle's files.
        facts: what the manifest says.
        names, added: which of ``MEMBERS`` and ``ADDED`` the bundle has.

    Args:
        name: the bundle's name in messages.
        there: the names of the files in the bundle.
        opener: opens one of these files.
    """

    def __init__(self, name: str, there: Container[str], opener: Callable[[str], BinaryIO]) -> None:
        self.open = opener
        self.names = tuple(n for n in MEMBERS if n in there)
        self.added = tuple(n for n in ADDED if n in there)
        with opener(MANIFEST) as file:
            data = file.read(_MAX_MANIFEST_BYTES + 1)
        if len(data) > _MAX_MANIFEST_BYTES:
            raise LimitExceeded(
                f"The manifest of {name} is longer than {format_size(_MAX_MANIFEST_BYTES)}.",
                hint="A genuine one takes a few kilobytes.",
            )
        self.facts = read_manifest(data, name)


def is_bundle(path: str | PathLike[str]) -> bool:
    """Return whether a path is a directory or a zip file with a manifest; never raises.

    A URL is judged by its name alone, without a request: a URL of a folder can only be a bundle.
    """
    if is_remote(fspath(path)):
        return fspath(path).partition("?")[0].lower().endswith(("/", ".zip"))
    try:
        place = Path(path)
        if place.is_dir():
            return is_allowed(place) and (place / MANIFEST).is_file()
        if not place.is_file() or not is_allowed(place):
            return False
        with place.open("rb") as file:
            if file.read(4) != b"PK\x03\x04":
                return False
        with zipfile.ZipFile(place) as archive:
            return any(parts_of(i.filename)[-1:] == (MANIFEST,) for i in archive.infolist())
    except DAMAGE:
        return False


def with_facts(overrides: Overrides, facts: BundleFacts) -> Overrides:
    """Return the user's overrides, completed with what holds for all devices of the bundle."""
    sizes = {d.total_bytes for d in facts.devices}
    fractions = {d.memory_fraction for d in facts.devices}
    fraction = fractions.pop() if len(fractions) == 1 else None
    return replace(
        overrides,
        capacity_bytes=overrides.capacity_bytes
        or (sizes.pop() if len(sizes) == 1 and None not in sizes else None),
        memory_fraction=overrides.memory_fraction
        if overrides.memory_fraction is not None
        else fraction,
        torch_version=overrides.torch_version or _release(facts.versions.get("torch", "")),
    )


@contextmanager
def open_bundle(path: str) -> Iterator[BundleFiles]:
    """Open a bundle for reading.

    Raises:
        InputError: the bundle cannot be read, or is refused.
    """
    if is_remote(path) and path.endswith("/"):
        there = {file.rsplit("/", 1)[-1] for file in list_remote(path, most=_MAX_ENTRIES)}
        yield BundleFiles(without_secrets(path), there, lambda file: open_remote(f"{path}{file}"))
        return
    check_place(path)
    if Path(path).is_dir():
        yield _directory(Path(path))
        return
    with ExitStack() as stack:
        name = without_secrets(path)
        file = stack.enter_context(_seekable(path)) if is_remote(path) else path
        archive = open_archive(file, name, _MAX_ENTRIES, "A bundle holds six.")
        members = _members(stack.enter_context(archive), name)
        yield BundleFiles(name, members, lambda file: open_member(archive, members[file], name))


def _seekable(url: str) -> BinaryIO:
    """Open a remote file for reading in any order; a file on a web server is downloaded first.

    The download goes to an unnamed temporary file, which is gone when this process ends.
    """
    raw = open_remote(url)
    if raw.seekable():
        return raw
    with raw, ExitStack() as stack:
        copy = cast("BinaryIO", stack.enter_context(TemporaryFile()))
        _fetch(raw, copy, without_secrets(url))
        stack.pop_all()
        return copy


def _fetch(raw: BinaryIO, copy: BinaryIO, name: str) -> None:
    limit = DEFAULT_LIMITS.max_input_bytes
    n_bytes = 0
    while chunk := raw.read(MIB):
        n_bytes += len(chunk)
        if n_bytes > limit:
            raise LimitExceeded(
                f"{name} is longer than {format_size(limit)}.",
                hint="A bundle holds one snapshot and a few texts.",
            )
        try:
            copy.write(chunk)
        except OSError as e:
            raise InputError(
                f"{name} cannot be fetched: {e.strerror or e}.",
                hint="Set TMPDIR to a folder with room for it.",
            ) from e
    copy.seek(0)


def _directory(path: Path) -> BundleFiles:
    def opened(file: str) -> BinaryIO:
        check_place(path / file)
        return (path / file).open("rb")

    return BundleFiles(str(path), {n for n in (*MEMBERS, *ADDED) if _is_regular(path / n)}, opened)


def _members(archive: zipfile.ZipFile, name: str) -> dict[str, zipfile.ZipInfo]:
    """Return the files of a bundle in a zip file, at the zip's root or in a single folder."""
    entries = archive.infolist()
    parts = [parts_of(e.filename) for e in entries]
    homes = {p[:-1] for p in parts if p[-1:] == (MANIFEST,)}
    if len(homes) != 1 or any(len(home) > 1 for home in homes):
        raise RefusedSnapshot(
            f"{name} holds several bundles." if homes else f"{name} is not a bundle.",
            hint="Unpack it and give one of them.",
        )
    home, again = homes.pop(), "Pack the bundle again: zip -r bundle.zip BUNDLE"
    found: dict[str, list[zipfile.ZipInfo]] = {}
    for entry, path in zip(entries, parts, strict=True):
        if path[:-1] == home and path[-1:] and path[-1] in (MANIFEST, *MEMBERS, *ADDED):
            found.setdefault(path[-1], []).append(entry)
    return {file: only_one(same, file, name, again) for file, same in found.items()}


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _release(version: str) -> str | None:
    """Return ``2.12.1`` for ``2.12.1+cu130``, or None if the text is not a version."""
    release = version.split("+", 1)[0]
    numbers = release.split(".")
    if len(numbers) < 2 or not all(n.isascii() and n.isdigit() for n in numbers[:2]):
        return None
    return ".".join(n for n in numbers[:3] if n.isascii() and n.isdigit())


def read_manifest(data: bytes, name: str) -> BundleFacts:
    """Return the facts in a manifest; a field that makes no sense counts as unknown.

    Raises:
        NotASnapshot: the data is not a bundle's manifest.
        InputError: another version of fragdoctor wrote the manifest.
    """
    import json

    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise NotASnapshot(
            f"The manifest of {name} is not JSON.", hint="Give the snapshot in it by name."
        ) from e
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise NotASnapshot(
            f"The manifest of {name} is not fragdoctor's.",
            hint="Give the snapshot in it by name.",
        )
    if value.get("version") != VERSION:
        raise InputError(
            f"{name} was written by another version of fragdoctor.",
            hint="Update fragdoctor, or give the snapshot in it by name.",
        )
    return _facts(value)


def _facts(value: Mapping[str, Any]) -> BundleFacts:
    told = {
        **value,
        "command": value.get("command") or value.get("argv"),
        "exception": mapping(value.get("exception")).get("type"),
        "oom_device": mapping(value.get("oom")).get("device"),
        "unusable": None,
    }
    facts = checked(BundleFacts, told, READERS)
    return facts if facts.reason in REASONS else replace(facts, reason="")


def checked(kind: type[T], told: Mapping[str, Any], readers: Readers) -> T:
    """Return a struct made of what is told of each of its fields, by the field's type."""
    return kind(**{f.name: readers[f.type](told.get(f.name)) for f in fields(kind)})


def number(value: Any) -> int | None:
    """Return a number from 0 on, or None for anything else."""
    is_number = type(value) is int and 0 <= value < _MAX_NUMBER
    return value if is_number else None


def _fraction(value: Any) -> float | None:
    return value if isinstance(value, float) and 0.0 < value < 1.0 else None  # 1 means "not set"


def text(value: Any, most: int = _MAX_TEXT) -> str:
    """Return the beginning of a text, or "" for anything else."""
    return value[:most] if isinstance(value, str) else ""


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(text(word) for word in listed(value) if isinstance(word, str))


def _table(value: Any) -> dict[str, str]:
    pairs = list(mapping(value).items())[:_MAX_LISTED]
    return {text(k): text(v) for k, v in pairs if isinstance(v, str)}


def _devices(value: Any) -> tuple[BundleDevice, ...]:
    found: dict[int, BundleDevice] = {}
    for entry in map(mapping, listed(value)):
        if (index := number(entry.get("index"))) is not None:
            told = {**entry, "total_bytes": entry.get("total_bytes") or None}
            found.setdefault(index, checked(BundleDevice, told, READERS))
    return tuple(found.values())


def _processes(value: Any) -> tuple[OtherProcess, ...]:
    entries = map(mapping, listed(value))
    told = ((number(entry.get("pid")), number(entry.get("bytes"))) for entry in entries)
    return tuple(OtherProcess(pid, n) for pid, n in told if pid is not None and n is not None)


def _lines(value: Any) -> tuple[Location, ...]:
    told = (listed(entry, 3) for entry in listed(value))
    return tuple(Location(text(e[0]), number(e[1]) or 0, text(e[2])) for e in told if len(e) == 3)


def mapping(value: Any) -> Mapping[str, Any]:
    """Return an object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def listed(value: Any, most: int = _MAX_LISTED) -> Sequence[Any]:
    """Return the first items of a list, or () for anything else."""
    return value[:most] if isinstance(value, list) else ()


READERS: Final[Readers] = {
    bool: lambda value: value is True,
    int: lambda value: number(value) or 0,
    int | None: number,
    float | None: _fraction,
    str: text,
    Sequence[str]: _texts,
    Mapping[str, str]: _table,
    Sequence[BundleDevice]: _devices,
    Sequence[OtherProcess]: _processes,
    Sequence[Location]: _lines,
}
"""What is left of a value of JSON that does not fit the type of its field."""
