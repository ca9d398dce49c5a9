"""Sizes: parsing what people and messages write, printing what people read.

All units are powers of 1024, as in PyTorch; ``KB``/``MB``/``GB`` mean the same as
``KiB``/``MiB``/``GiB`` because the tools that print them (older MPS builds, 1.x
``memory_summary``) mean powers of 1024 too.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from fragdoctor.errors import ConfigError

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3
TIB: Final = 1024**4

_FACTORS: Final = {
    "": 1,
    "b": 1,
    "byte": 1,
    "bytes": 1,
    "k": KIB,
    "kb": KIB,
    "kib": KIB,
    "m": MIB,
    "mb": MIB,
    "mib": MIB,
    "g": GIB,
    "gb": GIB,
    "gib": GIB,
    "t": TIB,
    "tb": TIB,
    "tib": TIB,
}
_SIZE = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]{0,5})\s*", re.ASCII)


def parse_size(text: str) -> int:
    """Return the bytes that a size such as ``24GiB``, ``512 MB`` or ``1073741824`` means.

    Raises:
        ConfigError: the text is not a size, or exceeds 2**63 - 1 bytes.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f"{text!r} is not a size.",
            hint="Write a number with a unit, for example 24GiB or 512MiB.",
        )
    value = int((Decimal(match.group(1)) * factor).to_integral_value())
    if value > 2**63 - 1:
        raise ConfigError(
            f"The size {text!r} is too large.", hint="The largest size is 2^63 - 1 bytes."
        )
    return value


def format_size(n_bytes: float | None) -> str:
    """Return a size for people: two decimals above 1 KiB, ``unknown`` for None.

    Unlike PyTorch's own ``format_size`` the unit steps at 1000 of the smaller unit, so that a
    column of figures never holds ``1024.00 MiB`` beside ``1.00 GiB``.
    """
    if n_bytes is None:
        return "unknown"
    sign = "-" if n_bytes < 0 else ""
    size = abs(n_bytes)
    if size < KIB:
        return f"{sign}{int(size)} B"
    for factor, unit in ((KIB, "KiB"), (MIB, "MiB"), (GIB, "GiB")):
        if size < 1000 * factor:
            return f"{sign}{size / factor:.2f} {unit}"
    return f"{sign}{size / TIB:.2f} TiB"


def format_mebibytes(n_bytes: int) -> str:
    """Return a size in MiB whatever its magnitude, to tell figures a few pages apart."""
    return f"{n_bytes / MIB:,.0f} MiB"


def format_count(n: int) -> str:
    """Return an integer with thousands separators."""
    return f"{n:,}"


def plural(n: int, one: str, many: str = "") -> str:
    """Return a count with its noun: ``1 block``, ``3 blocks``."""
    return f"{format_count(n)} {one if n == 1 else many or one + 's'}"


def format_share(part: float, whole: float) -> str:
    """Return ``part / whole`` in per cent, or a dash where the whole is zero."""
    if whole <= 0:
        return "-"
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 10 or share == 0 else f"{share:.1f} %"
