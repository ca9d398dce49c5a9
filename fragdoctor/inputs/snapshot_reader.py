"""Read memory snapshots: a pickle, JSON, or an HTML page that holds one; plain or compressed.

Nothing in the input is ever executed: see ``_native/pickle_reader.cpp`` for the allowlist. The
PyTorch version that wrote a snapshot is estimated from the snapshot's keys.

A page of PyTorch's memory viewer holds ``local_files = [{"name": "snapshot.pickle", "base64":
"..."}, ...]``. The page is read as a stream, and only these entries are interpreted.
"""

from __future__ import annotations

import binascii
import io
import os
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, BinaryIO, Final

import numpy as np

from fragdoctor._native import _ext
from fragdoctor.errors import (
    InputError,
    LimitExceeded,
    NotASnapshot,
    RefusedSnapshot,
    TruncatedSnapshot,
)
from fragdoctor.inputs.classify import InputKind, Wanted, classify, something_else
from fragdoctor.inputs.source import ByteStream, open_source, shown
from fragdoctor.inputs.zip_members import only_one, open_archive, open_member, parts_of
from fragdoctor.lazy import regex
from fragdoctor.limits import DEFAULT_LIMITS, Limits
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import (
    Action,
    Annotation,
    BlockTable,
    EventTable,
    FrameTable,
    HostSegment,
    Provenance,
    SegmentTable,
    Snapshot,
    StackTable,
)

_CHUNK_BYTES: Final = 1 << 16
_LONGEST_NAME_BYTES: Final = 4096
# White space and names have bounded lengths, and matching never backtracks: a page of white space
# costs no more than any other page.
_START: Final = regex(rb"local_files\s{0,64}+=\s{0,64}+\[")
_ENTRY: Final = regex(
    rb"\s{0,64}+,?+\s{0,64}+\{\s{0,64}+\"name\"\s{0,64}+:\s{0,64}+"
    rb'"((?>[^"\\]|\\.){0,4096}+)"\s{0,64}+,\s{0,64}+"base64"\s{0,64}+:\s{0,64}+"'
)
_LIST_END: Final = regex(rb"\s{0,64}+,?+\s{0,64}+\]")
_PAYLOAD_END: Final = regex(rb"\s{0,64}+\}")
_LONGEST_START_BYTES: Final = 256


class PageEntries(io.RawIOBase):
    """The entries of a page in order; reading gives the decoded bytes of the present one, once."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._at_end = False
        self._n_read = 0
        self.name = ""
        self._rest = b""  # base64 characters that do not yet fill a group of four
        self._ready = b""
        self._is_done = True

    @property
    def offset(self) -> int:
        """The position in the page, in bytes."""
        return self._n_read - len(self._buffer)

    def find_list(self) -> None:
        """Go to the list of entries.

        Raises:
            NotASnapshot: the page has none.
        """
        while True:
            if match := _START.search(self._buffer):
                del self._buffer[: match.end()]
                return
            del self._buffer[:-_LONGEST_START_BYTES]
            if not self._fill():
                raise NotASnapshot(
                    "The HTML page holds no memory snapshot.",
                    hint="Save it with torch.cuda.memory's viewer, or give the pickle itself.",
                    offset=self.offset,
                )

    def next_entry(self) -> bool:
        """Go to the next entry, past the rest of this one; return False after the last entry."""
        while not self._is_done:
            self._take()
        self._rest = self._ready = b""
        while True:
            if match := _ENTRY.match(self._buffer):
                self.name = match.group(1).decode("utf-8", "replace")
                del self._buffer[: match.end()]
                self._is_done = False
                return True
            if _LIST_END.match(self._buffer):
                return False
            if len(self._buffer) > 3 * _LONGEST_NAME_BYTES or not self._fill():
                return False

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the buffer with the decoded bytes at hand; 0 means the end of the entry."""
        while not self._ready and not self._is_done:
            self._decode_more()
        n = min(len(buffer), len(self._ready))
        buffer[:n] = self._ready[:n]
        self._ready = self._ready[n:]
        return n

    def _decode_more(self) -> None:
        text = self._rest + self._take().replace(b"\\/", b"/").replace(b"\\n", b"")
        n = len(text) if self._is_done else len(text) // 4 * 4
        self._rest = text[n:]
        try:
            self._ready = binascii.a2b_base64(text[:n], strict_mode=True) if n else b""
        except binascii.Error:
            raise RefusedSnapshot(
                "The snapshot in the HTML page is not valid base64.",
                hint="Save the page again.",
                offset=self.offset,
            ) from None

    def _take(self) -> bytes:
        """Return the next base64 characters; the closing quote ends the entry."""
        if not self._buffer and not self._fill():
            raise TruncatedSnapshot(
                "The HTML page ends in the middle of a snapshot.",
                hint="Save the page again.",
                offset=self.offset,
            )
        end = self._buffer.find(b'"')
        self._is_done = end >= 0
        text = bytes(self._buffer[: end if self._is_done else len(self._buffer)])
        del self._buffer[: len(text) + self._is_done]
        if self._is_done:
            while not self._buffer and self._fill():
                pass
            if match := _PAYLOAD_END.match(self._buffer):
                del self._buffer[: match.end()]
        return text

    def _fill(self) -> bool:
        chunk = bytearray(_CHUNK_BYTES)
        n = 0 if self._at_end else self._stream.readinto(memoryview(chunk))
        self._at_end = n == 0
        self._n_read += n
        self._buffer += chunk[:n]
        return n > 0


_Readable = ByteStream | PageEntries
_Reader = Callable[..., dict[str, Any]]
_ERRORS: Final[dict[str, type[InputError]]] = {
    "not_a_snapshot": NotASnapshot,
    "truncated": TruncatedSnapshot,
    "refused": RefusedSnapshot,
    "limit": LimitExceeded,
}
_JSON: Final = (InputKind.SNAPSHOT_JSON, InputKind.STATS, InputKind.MODEL_CONFIG, InputKind.JSON)
_HAS_ADDRESS, _HAS_SIZE, _HAS_ALLOCATED, _ALLOCATED = 1, 2, 4, 8


def read_snapshot(
    source: str | PathLike[str] | BinaryIO | bytes, *, limits: Limits = DEFAULT_LIMITS
) -> Snapshot:
    """Return the snapshot that a path, ``-`` (stdin), an open file, or bytes hold.

    Raises:
        NotASnapshot: the source is something else, or empty.
        TruncatedSnapshot: the source ends in the middle.
        RefusedSnapshot: it holds something that no genuine snapshot holds; nothing was executed.
        LimitExceeded: reading it would take more than ``limits`` allow.
        InputError: the source cannot be opened or read.
    """
    with open_source(source, limits=limits) as stream:
        kind = classify(stream.head)
        if kind in (InputKind.PICKLE, InputKind.OLD_PICKLE):
            tables = _call(_ext.read_pickle, stream, shown(stream.name), limits)
            return _to_snapshot(tables, stream, limits, container="pickle")
        if kind in _JSON:
            tables = _call(_ext.read_json, stream, shown(stream.name), limits)
            return _to_snapshot(tables, stream, limits, container="json")
        if kind is InputKind.PAGE:
            return _read_page(stream, limits)
        if kind is InputKind.SAVED:
            return _read_saved(source, stream, limits)
        raise something_else(shown(stream.name), kind, Wanted.SNAPSHOT, offset=0)


def _call(reader: _Reader, stream: _Readable, name: str, limits: Limits) -> dict[str, Any]:
    """Run a native reader, and turn its error into one of ours that names the input."""
    try:
        return reader(
            stream,
            max_depth=limits.max_depth,
            max_string_bytes=limits.max_string_bytes,
            max_unknown_keys=limits.max_unknown_keys,
        )
    except _ext.ReadError as error:
        kind, message, hint, offset = error.args
        raise _ERRORS[kind](_with_name(name, kind, message), hint=hint, offset=offset) from None


def _with_name(name: str, kind: str, message: str) -> str:
    """Return a native reader's message as a sentence about the named input."""
    said = message[:1].lower() + message[1:]
    if kind == "not_a_snapshot":
        return f"{name} is not a memory snapshot: {said.partition(': ')[2] or said}"
    if kind == "refused":
        return f"{name} is not a memory snapshot: {said}"
    if kind == "truncated":
        return f"{name} ends in the middle."
    return f"{name} is beyond a limit: {said}"


def _read_saved(
    source: str | PathLike[str] | BinaryIO | bytes, stream: ByteStream, limits: Limits
) -> Snapshot:
    """Return the snapshot in the ``data.pkl`` of an archive that ``torch.save`` wrote.

    Only that member is read, as a bounded stream, by our pickle reader, which refuses the opcodes
    that a tensor needs (globals, persistent ids).
    """
    name = shown(stream.name)
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    if not _can_seek(file):  # a zip lists its members at its end
        raise NotASnapshot(
            f"{name} is a file of torch.save(), which cannot be read from a pipe.",
            hint="Give it by its file name.",
        )
    with open_archive(file, name, _MAX_ENTRIES, "A saved snapshot holds five.") as archive:
        entries = archive.infolist()
        found = [e for e in entries if len(p := parts_of(e.filename)) == 2 and p[1] == _PICKLE]
        if not found:
            raise NotASnapshot(
                f"{name} is a zip archive, not a memory snapshot.",
                hint=f"torch.save() puts a {_PICKLE} into its archives; this one has none.",
            )
        entry = only_one(found, _PICKLE, name, "torch.save() writes no such file.")
        with (
            open_member(archive, entry, name) as packed,
            open_source(packed, limits=limits, name=stream.name) as inner,
        ):
            try:
                tables = _call(_ext.read_pickle, inner, name, limits)
            except RefusedSnapshot as e:
                raise RefusedSnapshot(e.message, hint=_CHECKPOINT, offset=e.offset) from e
            return _to_snapshot(tables, inner, limits, container="torch.save")


_PICKLE: Final = "data.pkl"
_MAX_ENTRIES: Final = 100_000
"""A checkpoint has one member for each storage; a saved snapshot has about five in total."""

_CHECKPOINT: Final = (
    "It looks like a checkpoint. A snapshot is written by torch.cuda.memory._dump_snapshot()."
)


def _can_seek(file: str | PathLike[str] | BinaryIO) -> bool:
    if isinstance(file, str | PathLike):
        return os.path.isfile(file)  # noqa: PTH113 - never raises, unlike Path
    return not isinstance(file, ByteStream) and file.seekable()


def _read_page(stream: ByteStream, limits: Limits) -> Snapshot:
    """Return the first snapshot of a page."""
    page = PageEntries(stream)
    page.find_list()
    first_error: NotASnapshot | None = None
    while page.next_entry():
        name = f"{page.name} in {shown(stream.name)}"
        try:
            tables = _call(_ext.read_pickle, page, name, limits)
            return _to_snapshot(tables, stream, limits, container="html", entry=page.name)
        except NotASnapshot as error:
            first_error = first_error or error
    raise first_error or NotASnapshot(
        "The HTML page lists no snapshot.", hint="Give the pickle itself.", offset=page.offset
    )


def _to_snapshot(
    tables: dict[str, Any],
    stream: ByteStream,
    limits: Limits,
    *,
    container: str,
    entry: str = "",
) -> Snapshot:
    settings = tables["settings"]
    low, high = estimate_versions(tables)
    snapshot = Snapshot(
        strings=tuple(tables["strings"]),
        frames=FrameTable(tables["frame_filename"], tables["frame_line"], tables["frame_name"]),
        stacks=StackTable(tables["stack_offsets"], tables["stack_frames"]),
        streams=tables["streams"],
        pools=tables["pools"].reshape(-1, 2),
        segments=SegmentTable(**tables["segments"]),
        blocks=BlockTable(**tables["blocks"]),
        events=EventTable(**tables["events"]),
        oom_free_bytes=dict(
            zip(tables["oom_rows"].tolist(), tables["oom_free_bytes"].tolist(), strict=True)
        ),
        settings=AllocatorSettings()
        if settings is None
        else AllocatorSettings.from_recorded(settings),
        annotations=_annotations(tables),
        host_segments=_host_segments(tables),
        host_events=EventTable(**tables["host_events"])
        if len(tables["host_events"]["action"])
        else None,
        provenance=Provenance(
            source=f"{stream.name}: {entry}" if entry else stream.name,
            container=container,
            compression=stream.compression,
            protocol=tables["protocol"],
            writer=tables["writer"],
            is_list=tables["is_list"],
            n_bytes=tables["n_bytes"],
            version_low=low,
            version_high=high,
            unknown_keys=tables["unknown_keys"],
            unknown_values=tables["unknown_values"],
            n_replaced_strings=tables["n_replaced_strings"],
            has_trailing_bytes=tables["has_trailing_bytes"],
        ),
    )
    n_devices = len(snapshot.devices)
    if n_devices > limits.max_devices:
        raise LimitExceeded(
            f"{shown(stream.name)} is beyond a limit: it covers {n_devices} devices.",
            hint=f"A process has at most {limits.max_devices}.",
            offset=tables["n_bytes"],
        )
    return snapshot


def _annotations(tables: dict[str, Any]) -> tuple[Annotation, ...]:
    strings = tables["strings"]
    return tuple(
        Annotation(device, time_us, strings[name], strings[stage])
        for device, time_us, name, stage in zip(
            tables["annotation_device"].tolist(),
            tables["annotation_time_us"].tolist(),
            tables["annotation_name"].tolist(),
            tables["annotation_stage"].tolist(),
            strict=True,
        )
    )


def _host_segments(tables: dict[str, Any]) -> tuple[HostSegment, ...]:
    flags: np.ndarray[Any, Any] = tables["host_flags"]
    return tuple(
        HostSegment(
            address if flag & _HAS_ADDRESS else -1,
            size if flag & _HAS_SIZE else -1,
            bool(flag & _ALLOCATED) if flag & _HAS_ALLOCATED else None,
        )
        for address, size, flag in zip(
            tables["host_address"].tolist(),
            tables["host_size_bytes"].tolist(),
            flags.tolist(),
            strict=True,
        )
    )


_VERSIONS: Final = (
    "1.4", "1.12", "1.13", "2.0", "2.1", "2.2", "2.3", "2.4", "2.5", "2.6", "2.7", "2.8", "2.9",
    "2.10", "2.11", "2.12", "2.13", "2.14", "2.15",
)  # fmt: skip

# (table, key, first version that writes it)
_SINCE: Final = (
    ("block", "history", "1.12"),
    ("segment", "requested_size", "2.0"),
    ("block", "requested_size", "2.0"),
    ("top", "device_traces", "2.0"),
    ("segment", "is_expandable", "2.1"),
    ("segment", "segment_pool_id", "2.1"),
    ("segment", "frames", "2.1"),
    ("block", "address", "2.1"),
    ("top", "allocator_settings", "2.1"),
    ("event", "time_us", "2.2"),
    ("event", "compile_context", "2.6"),
    ("top", "external_annotations", "2.6"),
    ("event", "user_metadata", "2.10"),
    ("frame", "fx_node_op", "2.10"),
    ("event", "pool_id", "2.12"),
    ("event", "internal_metadata", "2.15"),
    ("top", "host_segments", "2.15"),
    ("top", "host_traces", "2.15"),
)
# (table, key, last version that does not write it); checked only if the table has rows.
_UNTIL: Final = (
    ("block", "requested_size", "1.13"),
    ("segment", "is_expandable", "2.0"),
    ("top", "allocator_settings", "2.3"),
    ("event", "time_us", "2.1"),
    ("top", "external_annotations", "2.6"),
    ("event", "user_metadata", "2.9"),
    ("event", "pool_id", "2.11"),
    ("top", "host_segments", "2.14"),
)
_SETTINGS_SINCE: Final = (
    ("graph_capture_record_stream_reuse", "2.10"),
    ("max_round_threshold", "2.15"),
)


def estimate_versions(tables: Mapping[str, Any]) -> tuple[str, str]:
    """Return the lowest and the highest PyTorch version that fits; "" is an open end.

    ``tables`` are the native reader's; ``keys_seen``, ``settings`` and ``actions_seen`` are used.
    """
    seen: Mapping[str, list[str]] = tables["keys_seen"]
    since = [version for table, key, version in _SINCE if key in seen[table]]
    since += [version for key, version in _SETTINGS_SINCE if key in (tables["settings"] or {})]
    if tables["actions_seen"] & (1 << Action.SEGMENT_MAP | 1 << Action.SEGMENT_UNMAP):
        since.append("2.1")
    until = [version for table, key, version in _UNTIL if seen[table] and key not in seen[table]]
    if "history" in seen["block"]:
        until.append("2.0")
    low = max(map(_VERSIONS.index, since), default=0)
    high = max(min(map(_VERSIONS.index, until), default=len(_VERSIONS)), low)
    return (
        _VERSIONS[low] if low else "",
        _VERSIONS[high] if high < len(_VERSIONS) - 1 else "",
    )
