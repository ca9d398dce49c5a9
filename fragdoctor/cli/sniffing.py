"""What kind of input some bytes are: a snapshot, statistics, text, or none of these.

Only the first kilobytes are looked at; the reader of the kind then says what is wrong in detail.
"""

from __future__ import annotations

import re
import zlib
from enum import Enum, auto
from typing import Final

HEAD_BYTES: Final = 64 * 1024
_MAX_HEAD: Final = 256 * 1024

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_ZIP: Final = b"PK\x03\x04"
_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")
_SNAPSHOT_KEYS: Final = re.compile(
    rb'"(?:segments|device_traces|allocator_settings|segment_pool_id|total_size|blocks|'
    rb'external_annotations|memory_snapshot)"'
)
_STATS_KEYS: Final = re.compile(
    rb'"(?:num_alloc_retries|num_ooms|num_device_alloc|num_sync_all_streams|'
    rb"(?:allocated_bytes|reserved_bytes|active_bytes|inactive_split_bytes|requested_bytes|"
    rb'allocation|segment|active|inactive_split)(?:\.(?:all|small_pool|large_pool))?[."])'
)
_SUMMARY: Final = re.compile(rb"PyTorch CUDA memory summary|\|\s*Allocated memory\s*\|", re.IGNORECASE)
_SPACE: Final = b" \t\r\n\x0b\x0c"


class Kind(Enum):
    """What an input is, as far as its first bytes say."""

    SNAPSHOT = auto()
    STATS = auto()
    TEXT = auto()
    ARCHIVE = auto()
    BINARY = auto()
    EMPTY = auto()


def kind_of(head: bytes) -> Kind:
    """Return what starts with these bytes, compressed or not."""
    if not head:
        return Kind.EMPTY
    is_packed = head.startswith((_GZIP, _ZSTD))
    plain = _unpacked(head) if is_packed else head
    if plain.startswith(_ZIP):
        return Kind.ARCHIVE
    if plain[:1] == b"\x80" and plain[1:2] <= b"\x0f" and len(plain) > 1:
        return Kind.SNAPSHOT
    kind = Kind.TEXT if plain.startswith(_BOMS) else _kind_of_text(plain)
    # What does not unpack is the snapshot reader's to explain: it knows all containers.
    return Kind.SNAPSHOT if is_packed and kind in (Kind.BINARY, Kind.EMPTY) else kind


def is_summary(text: bytes) -> bool:
    """Return whether a text holds the table of ``memory_summary()``."""
    return _SUMMARY.search(text) is not None


def _kind_of_text(head: bytes) -> Kind:
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip(_SPACE)
    if not start:
        return Kind.EMPTY
    if b"\x00" in head or _control_share(head) > 0.1:
        return Kind.BINARY
    if start[:1] == b"<" and re.match(rb"<(?:!doctype|html|head|script|!--)", start, re.IGNORECASE):
        return Kind.SNAPSHOT
    if start[:1] in b"{[":
        stats, snapshot = _STATS_KEYS.search(start), _SNAPSHOT_KEYS.search(start)
        if snapshot and not (stats and stats.start() < snapshot.start()):
            return Kind.SNAPSHOT
        if stats:
            return Kind.STATS
        if start.strip(_SPACE) in (b"[]", b"{}"):
            return Kind.SNAPSHOT
    return Kind.TEXT


def _control_share(head: bytes) -> float:
    # Escape sequences are welcome: logs are coloured.
    n_bad = sum(head.count(bytes([c])) for c in range(32) if c not in b"\t\n\r\x0b\x0c\x1b\x08")
    return n_bad / len(head)


def _unpacked(head: bytes) -> bytes:
    """Return the start of what a compressed head holds, b"" where that cannot be seen."""
    try:
        if head.startswith(_GZIP):
            return zlib.decompressobj(wbits=31).decompress(head, _MAX_HEAD)
        try:
            from compression import zstd  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            from backports import zstd
        return bytes(zstd.ZstdDecompressor().decompress(head, _MAX_HEAD))
    except (zlib.error, ImportError, ValueError, EOFError):
        return b""
    except Exception as e:
        if type(e).__name__ != "ZstdError":
            raise
        return b""
