"""Two shapes in a text that together make a far larger one by broadcasting.

A column beside a row makes the matrix of all pairs: (N, 1) with (N,) is (N, N). The two fit into
memory, so nothing in the text looks large.
"""

from __future__ import annotations

from itertools import combinations, zip_longest
from math import prod
from typing import Final

from msgspec import Struct

from fragdoctor.lazy import regex
from fragdoctor.model.case import OomMessage
from fragdoctor.units import GIB, format_size

_SHAPE: Final = regex(r"[(\[]\s?(\d{1,10}(?:\s?,\s?\d{1,10}){0,5})\s?,?\s?[)\]]")
_MOST_SHAPES: Final = 12
_ITEM_BYTES: Final = 4
"""Bytes of PyTorch's default type."""
_GROWN: Final = 100
"""How much larger than both the result is: a bias or a mask makes a layer's result no larger."""


class ToldBroadcast(Struct, frozen=True):
    """Two shapes and what they are broadcast to."""

    one: tuple[int, ...]
    other: tuple[int, ...]
    result: tuple[int, ...]

    @property
    def text(self) -> str:
        """A sentence about the sizes."""
        size = format_size(_ITEM_BYTES * prod(self.result))
        return (
            f"Broadcasting {self.one} with {self.other} makes {self.result}, which takes {size} in "
            "32 bits."
        )


def told_broadcast(message: OomMessage | None) -> ToldBroadcast | None:
    """Return the two shapes around a message whose result alone is what no memory holds, or None.

    A request that the message prints must be as large.
    """
    if message is None:
        return None
    found = (tuple(map(int, m[1].split(","))) for m in _SHAPE.finditer(message.said))
    shapes = list(dict.fromkeys(s for s in found if prod(s)))[:_MOST_SHAPES]
    for one, other in combinations(shapes, 2):
        result = _broadcast(one, other)
        n = prod(result)
        is_grown = n > _GROWN * max(prod(one), prod(other)) and _ITEM_BYTES * n > GIB
        if is_grown and _ITEM_BYTES * n >= (message.requested_bytes or 0):
            return ToldBroadcast(one, other, result)
    return None


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the result, or () if the two do not fit together."""
    sides = list(zip_longest(one[::-1], other[::-1], fillvalue=1))[::-1]
    if any(a != b and 1 not in (a, b) for a, b in sides):
        return ()
    return tuple(max(side) for side in sides)
