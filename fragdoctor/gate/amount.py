"""A limit as people write it: a size or a percentage."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from fragdoctor.errors import ConfigError
from fragdoctor.units import format_size, parse_size

_SHARE: Final = re.compile(r"\s*([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Amount:
    """A size in bytes, or a share (0..1) of something that the budget names."""

    n_bytes: int | None = None
    share: float | None = None

    def of(self, whole_bytes: int | None) -> int | None:
        """Return the bytes that it means; None for a share of something unknown."""
        if self.n_bytes is not None:
            return self.n_bytes
        if whole_bytes is None or self.share is None:
            return None
        return round(self.share * whole_bytes)

    def __str__(self) -> str:
        """Return it as people write it: ``5 %`` or ``70.00 GiB``."""
        return format_size(self.n_bytes) if self.share is None else f"{100 * self.share:g} %"


def parse_amount(text: str) -> Amount:
    """Return what ``5%``, ``70GiB`` or ``0`` means.

    Raises:
        ConfigError: it is neither a size nor a percentage of at most 100.
    """
    match = _SHARE.fullmatch(text)
    if match is None:
        try:
            return Amount(n_bytes=parse_size(text))
        except ConfigError as e:
            raise ConfigError(
                f"{text!r} is neither a size nor a percentage.",
                hint="Write for example 70GiB, 512MiB or 5%.",
            ) from e
    share = float(match.group(1)) / 100
    if share > 1:
        raise ConfigError(f"{text!r} is more than 100 %.", hint="Write for example 5%.")
    return Amount(share=share)
