"""What is known about two runs when their difference is explained, and when a part of it counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fragdoctor.comparison.reading import DeviceReading
from fragdoctor.model.comparison import LineChange, SettingChange, SettingsProof
from fragdoctor.model.finding import Confidence, Location
from fragdoctor.units import MIB

MIN_SHARE: Final = 0.1
"""Of all that moved; smaller parts are in the table of lines and no cause."""

MIN_BYTES: Final = 1 * MIB
LIKELY_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about two runs beyond their lines.

    Attributes:
        last: what the newer run is called.
        is_series: one program is seen again and again; that it went on explains nothing.
    """

    before: DeviceReading
    after: DeviceReading
    changes: Sequence[LineChange]
    delta_bytes: int
    settings: Sequence[SettingChange] | None
    proof: SettingsProof | None
    requests_equal: float | None
    last: str = "B"
    is_series: bool = False

    @property
    def moved_bytes(self) -> int:
        """Bytes that lines gained or lost, whatever the sum."""
        return sum(abs(c.delta_bytes) for c in self.changes)


def place_text(place: Location | None) -> str:
    """Return ``train.py:88 in forward``: the file by its own name."""
    if place is None:
        return "requests without a Python stack"
    return place.short


def counts_enough(e: Evidence, part: int) -> bool:
    """Return whether a part is large enough among all that moved to be called a cause."""
    return abs(part) >= max(MIN_BYTES, MIN_SHARE * e.moved_bytes)


def confidence_of(e: Evidence, part: int, is_plain: bool) -> Confidence:
    """Likely is what makes up most of the difference, in its direction."""
    if not e.delta_bytes or (part > 0) != (e.delta_bytes > 0) or not is_plain:
        return Confidence.POSSIBLE
    is_most = abs(part) >= LIKELY_SHARE * abs(e.delta_bytes)
    return Confidence.LIKELY if is_most else Confidence.POSSIBLE
