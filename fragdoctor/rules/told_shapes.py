"""Two shapes in a text that together make a far larger one by broadcasting.

A column beside a row makes the matrix of all pairs: (N, 1) with (N,) is (N, N). Each of the two
fits into memory, so nothing in the text looks large.
"""

from __future__ import annotations

from itertools import combinations, zip_longest
from math import prod
from typing import Final

from fragdoctor.lazy import regex
from fragdoctor.model.case import OomMessage
from fragdoctor.rules.failed_request import rounding_bytes
from fragdoctor.units import GIB, format_size

_SHAPE: Final = regex(r"[(\[]\s?(\d{1,10}(?:\s?,\s?\d{1,10}){0,5})\s?,?\s?[)\]]")
_MOST_SHAPES: Final = 12
_ITEM_BYTES: Final = 4
"""Bytes of PyTorch's default type."""


def told_broadcast(message: OomMessage | None) -> str:
    """Return a sentence on two shapes around a message whose result fills a GPU, or "".

    A request that the message prints must be no larger.
    """
    said, least = ("", 0) if message is None else (message.said, message.requested_bytes or 0)
    found = (tuple(map(int, m[1].split(","))) for m in _SHAPE.finditer(said))
    for one, other in combinations(list(dict.fromkeys(found))[:_MOST_SHAPES], 2):
        result = _broadcast(one, other)
        n_bytes = _ITEM_BYTES * prod(result)
        is_grown = prod(result) > prod(one) + prod(other)
        if is_grown and n_bytes > max(least - rounding_bytes(least), GIB):
            size = format_size(n_bytes)
            return f"Broadcasting {one} with {other} makes {result}, which takes {size} in 32 bits."
    return ""


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the result, or () if the two do not fit together."""
    sides = list(zip_longest(one[::-1], other[::-1], fillvalue=1))[::-1]
    is_fit = all(a == b or 1 in (a, b) for a, b in sides)
    return tuple(map(max, sides)) if is_fit else ()
