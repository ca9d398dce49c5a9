"""Numbers of a program that are divided, or multiplied, where they stand, for smaller batches."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

ARGUMENT: Final = "@"
"""Comes before the position of an argument."""


def divided(source: bytes, n: Fraction | int, places: list[str]) -> bytes:
    """Return a program with the numbers at some places (line and column, ``7.8``) divided by n.

    None gets less than 1.
    A number that says into how many batches something is split is divided by ``1/n``.
    """
    lines = source.split(b"\n")
    for row, column in sorted((tuple(map(int, one.split("."))) for one in places), reverse=True):
        line = lines[row - 1]
        found = re.match(rb"\d[\d_]*", line[column:])
        if found:
            rest = line[column + found.end() :]
            less = max(int(int(found[0]) / Fraction(n)), 1)
            lines[row - 1] = line[:column] + str(less).encode() + rest
    return b"\n".join(lines)
