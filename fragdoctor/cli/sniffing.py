"""What kind of input some bytes are: a snapshot, statistics, text, or none of these.

Only the first kilobytes are looked at; the reader of the kind then says what is wrong in detail.
"""

from __future__ import annotations

import re
import zlib
from enum import Enum, auto
from typing import Final

from fragdoctor.readers.stats import looks_like_stats

HEAD_BYTES: Final = 64 * 1024
_MAX_HEAD: Final = 256 * 1024

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_ZIP: Final = b"PK\x03\x04"
_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")
# Keys with the values they have in a snapshot: "segments": 39 stands in many other files.
_SNAPSHOT_KEYS: Final = re.compile(
    rb'"(?:segments|device_traces|external_annotations|blocks)"\s*:\s*\['
    rb'|"allocator_settings"\s*:\s*\{|"segment_type"\s*:\s*"'
)
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


def _kind_of_text(head: bytes) -> Kind:
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip(_SPACE)
    if not start:
        return Kind.EMPTY
    if b"\x00" in head or _control_share(head) > 0.1:
        return Kind.BINARY
    if start[:1] == b"<" and re.match(rb"<(?:!doctype|html|head|script|!--)", start, re.IGNORECASE):
        return Kind.SNAPSHOT
    if start[:1] in b"{[":
        snapshot = _SNAPSHOT_KEYS.search(start)
        # Statistics may quote anything in a label: what comes first decides.
        if looks_like_stats(start[: snapshot.start()] if snapshot else start):
            return Kind.STATS
        if snapshot or start.strip(_SPACE) in (b"[]", b"{}"):
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
