"""Sizes: parsing what people and messages write, and printing what people read.

All units are powers of 1024, as in PyTorch; ``KB``/``MB``/``GB`` mean the same as
``KiB``/``MiB``/``GiB`` because the tools that print them (older MPS builds, 1.x
``memory_summary``) mean powers of 1024 too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fragdoctor.errors import ConfigError
from fragdoctor.lazy import regex

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3
TIB: Final = 1024**4

_STEP: Final = 1023.995  # from here on, two decimals would show 1024.00
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE: Final = regex(
    r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(([kmgt])(?:i?b|i)?|b|bytes?)?\s*",
    re.ASCII | re.IGNORECASE,
)
_SHARE: Final = regex(r"\s*([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%\s*", re.ASCII)


def parse_size(text: str) -> int:
    """Return the bytes that a size such as ``24GiB``, ``24 gb``, ``24g`` or ``512B`` means.

    A number without a unit is refused, unless it is 0: 24 may mean 24 GiB or 24 bytes.

    Raises:
        ConfigError: the text is not a size, has no unit, or exceeds 2**63 - 1 bytes.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{text!r} is not a size.",
            hint="Write a number with a unit, for example 24GiB or 512MiB.",
        )
    number, unit, prefix = match.groups()
    from decimal import Decimal  # noqa: PLC0415 - most runs parse no size, and it takes milliseconds

    value = Decimal(number) * 1024 ** _POWERS[(prefix or "").lower()]
    if value and unit is None:
        raise ConfigError(
            f"{number} has no unit.",
            hint=f"Write {number}GiB or {number}MiB, or {number}B for bytes.",
        )
    if value > 2**63 - 1:
        raise ConfigError(
            f"The size {text!r} is too large.", hint="The largest size is 2^63 - 1 bytes."
        )
    return int(value.to_integral_value())


@dataclass(frozen=True, slots=True)
class Amount:
    """A limit: a size in bytes, or a share (0..1) of something that the budget names."""

    n_bytes: int | None = None
    share: float | None = None

    def of(self, whole_bytes: int | None) -> int | None:
        """Return the amount in bytes, or None for a share of something unknown."""
        if self.n_bytes is not None:
            return self.n_bytes
        if whole_bytes is None or self.share is None:
            return None
        return round(self.share * whole_bytes)

    def __str__(self) -> str:
        """Return the amount as people write it: ``5%`` or ``70.00 GiB``."""
        return format_size(self.n_bytes) if self.share is None else f"{100 * self.share:g}%"


def parse_amount(text: str) -> Amount:
    """Return what ``5%``, ``70GiB`` or ``0`` means.

    Raises:
        ConfigError: the text is neither a size nor a percentage of at most 100.
    """
    match = _SHARE.fullmatch(text)
    if match is None:
        try:
            return Amount(n_bytes=parse_size(text))
        except ConfigError as e:
            is_bare = text.strip().replace(".", "", 1).isdigit()
            raise ConfigError(
                e.message if is_bare else f"{text!r} is neither a size nor a percentage.",
                hint=f"Write {text.strip()}GiB, {text.strip()}MiB or {text.strip()}%."
                if is_bare
                else "Write for example 70GiB, 512MiB or 5%.",
            ) from e
    share = float(match.group(1)) / 100
    if share > 1:
        raise ConfigError(f"{text!r} is more than 100%.", hint="Write for example 5%.")
    return Amount(share=share)


def format_size(n_bytes: float | None) -> str:
    """Return a size for people: two decimals above 1 KiB, ``unknown`` for None.

    The unit changes at 1024 of the smaller unit, as in PyTorch's messages (``format_size`` in c10's
    CUDACachingAllocator.cpp), so that a message's size looks the same in the report on it.
    """
    if n_bytes is None:
        return "unknown"
    sign = "-" if n_bytes < 0 else ""
    size = abs(n_bytes)
    if size < KIB:
        return f"{sign}{int(size)} B"
    for factor, unit in ((KIB, "KiB"), (MIB, "MiB"), (GIB, "GiB")):
        if size < _STEP * factor:
            return f"{sign}{size / factor:.2f} {unit}"
    return f"{sign}{size / TIB:.2f} TiB"


def signed_size(n_bytes: float) -> str:
    """Return a size with its sign."""
    return f"{'+' if n_bytes > 0 else ''}{format_size(n_bytes)}"


def format_mebibytes(n_bytes: int) -> str:
    """Return a size in MiB at any magnitude, so that figures that differ by a few MiB look it."""
    return f"{n_bytes / MIB:,.0f} MiB"


def format_count(n: int) -> str:
    """Return an integer with thousands separators."""
    return f"{n:,}"


def plural(n: int, one: str, many: str = "") -> str:
    """Return a count with its noun: ``1 block``, ``3 blocks``."""
    return f"{format_count(n)} {one if n == 1 else many or one + 's'}"


def listed(words: Sequence[str]) -> str:
    """Return words as a list: ``A``, ``A and B``, ``A, B and C``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def format_share(part: float, whole: float) -> str:
    """Return ``part / whole`` in percent, or a dash if the whole is zero."""
    if whole <= 0:
        return "-"
    share = 100 * part / whole
    return f"{share:.0f}%" if share >= 10 or share == 0 else f"{share:.1f}%"


def parse_seconds(text: str) -> float:
    """Return the seconds of ``90s``, ``5m`` or ``1h``.

    Raises:
        ConfigError: the text has another form.
    """
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    number = text[:-1].strip() if unit else text
    try:
        seconds = float(number) * (unit or 1.0)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise ConfigError(f"{text!r} is no time.", hint="Write for example 5m or 90s.")
    return seconds
