"""Cutting strings of strangers to a size, so that a summary stays small whatever it is about."""

from __future__ import annotations

import hashlib
import json
from typing import Final

_DIGEST: Final = 12
_MARK: Final = "..."


def weight(text: str) -> int:
    """Return the bytes that a string takes at most: pickled, or in JSON with its escapes."""
    return len(json.dumps(text))


def clip(text: str, limit: int) -> str:
    """Return text of at most ``limit`` bytes in the sense of ``weight``; its end is cut."""
    if len(text) * 12 + 2 <= limit or weight(text) <= limit:
        return text
    return _prefix(text, limit - len(_MARK)) + _MARK


def clip_left(text: str, limit: int) -> str:
    """Return text of at most ``limit`` bytes; its start is cut: ends of paths tell most."""
    if len(text) * 12 + 2 <= limit or weight(text) <= limit:
        return text
    return _MARK + _prefix(text[::-1], limit - len(_MARK))[::-1]


def clip_name(text: str, limit: int) -> str:
    """Return a name of at most ``limit`` bytes; a digest keeps different long names different."""
    if len(text) * 12 + 2 <= limit or weight(text) <= limit:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]
    return f"{digest}{_MARK}{_prefix(text[::-1], limit - len(_MARK) - _DIGEST)[::-1]}"


def _prefix(text: str, limit: int) -> str:
    """Return the longest start of at most ``limit`` bytes."""
    text = text[: max(0, limit)]
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        if weight(text[:middle]) <= limit:
            low = middle
        else:
            high = middle - 1
    return text[:low]
