"""Tells what kind of input a file is from its first bytes, so that any file can be routed."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """What the first bytes look like. A JSON may be a snapshot or statistics."""

    PICKLE = "pickle"
    JSON = "json"
    HTML = "html"
    ZIP = "zip"
    TEXT = "text"
    EMPTY = "empty"
    BINARY = "binary"


_UTF8_BOM: Final = b"\xef\xbb\xbf"
# Protocols 0 and 1 have no header: a global (`cos\nsystem\n`), or a container that goes on as
# the pickle module writes it, `(lp0`, `(dq\x00`, `]q\x00`.
_OLD_PICKLE: Final = re.compile(
    rb"c[A-Za-z_][\w.]{0,80}\n[A-Za-z_][\w.]{0,80}\n|\([ldti][pq.(]|[\]})][q.(]\x00?|\(\]|\(c"
)
_HTML: Final = re.compile(rb"<(?:!doctype|!--|html|head|body|script|meta|title)", re.IGNORECASE)


def sniff(head: bytes) -> Kind:  # noqa: PLR0911 - one return a kind
    """Return what kind of input begins with these (unpacked) bytes; 4 KiB are plenty."""
    if not head:
        return Kind.EMPTY
    if head.startswith(b"\x80") and (len(head) == 1 or head[1] < 32):
        return Kind.PICKLE
    if head.startswith(b"PK\x03\x04"):
        return Kind.ZIP
    text = head.removeprefix(_UTF8_BOM).lstrip(b" \t\r\n")
    if _OLD_PICKLE.match(head) and not _looks_like_json(text):
        return Kind.PICKLE
    if _HTML.match(text):
        return Kind.HTML
    if _looks_like_json(text):
        return Kind.JSON
    return Kind.BINARY if b"\x00" in head else Kind.TEXT


def _looks_like_json(text: bytes) -> bool:
    """Return whether it opens as JSON does; ``[rank0]: ...`` of a log does not."""
    return (
        re.match(rb'\{\s*["}]|\{\s*\Z|\[\s*[\[{"\]0-9.-]|\[\s*\Z', text) is not None
        and re.match(rb"\[[0-9]+\]?[ :]|\[[0-9]{4}-|\[[0-9]{2}/", text) is None
    )
