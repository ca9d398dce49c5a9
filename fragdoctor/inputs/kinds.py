"""What kind of input some bytes are: a snapshot, statistics, text, or none of these.

Only the first kilobytes are looked at; the reader of the kind then says what is wrong in detail.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

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
    """Return what starts with these bytes (unpacked, a few kilobytes)."""
    if not head:
        return Kind.EMPTY
    if head.startswith(_ZIP):
        return Kind.ARCHIVE
    if head[:1] == b"\x80" and len(head) > 1 and head[1] < 16:
        return Kind.SNAPSHOT
    return Kind.TEXT if head.startswith(_BOMS) else _kind_of_text(head)


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
        from fragdoctor.inputs.stats_reader import looks_like_stats  # not for every snapshot

        if looks_like_stats(start[: snapshot.start()] if snapshot else start):
            return Kind.STATS
        if snapshot or start.strip(_SPACE) in (b"[]", b"{}"):
            return Kind.SNAPSHOT
    return Kind.TEXT


def _control_share(head: bytes) -> float:
    # Escape sequences are welcome: logs are coloured.
    n_bad = sum(head.count(bytes([c])) for c in range(32) if c not in b"\t\n\r\x0b\x0c\x1b\x08")
    return n_bad / len(head)
