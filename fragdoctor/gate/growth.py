"""``compare --fail-on-growth``: which peaks grew by more than is accepted.

Judged are peak allocated and peak active memory of every device: what the program itself needs.
Reserved, cached and pinned memory also depend on the allocator and on when the snapshot was taken;
they are reported, and judged by ``check --max-pinned``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fragdoctor.gate.amount import Amount
from fragdoctor.model.comparison import Comparison
from fragdoctor.units import format_size


@dataclass(frozen=True, slots=True)
class Growth:
    """One judged peak of one device, first run against last."""

    measure: str
    device: int
    before_bytes: int
    after_bytes: int
    allowed_bytes: int

    @property
    def is_exceeded(self) -> bool:
        """Whether it grew by more than is accepted."""
        return self.after_bytes - self.before_bytes > self.allowed_bytes

    @property
    def text(self) -> str:
        """One sentence with the numbers."""
        grown = self.after_bytes - self.before_bytes
        told = f"{self.measure} of GPU {self.device} grew by {format_size(grown)}"
        if grown <= 0:
            return f"{self.measure} of GPU {self.device} did not grow."
        word = "more than" if self.is_exceeded else "within"
        return f"{told}, {word} the {format_size(self.allowed_bytes)} that are accepted."


def judge_growth(comparison: Comparison, accepted: Amount) -> tuple[Growth, ...]:
    """Return every peak that both runs tell, judged; empty where there is none."""
    found: list[Growth] = []
    for peaks in comparison.device_peaks:
        for measure, (old, new) in (
            ("Peak allocated memory", peaks.allocated_bytes),
            ("Peak active memory", peaks.active_bytes),
        ):
            if old is not None and new is not None:
                allowed = accepted.of(old) or 0
                found.append(Growth(measure, peaks.device, old, new, allowed))
    return tuple(found)


def has_grown(judged: Sequence[Growth]) -> bool:
    """Return whether any peak grew by more than is accepted."""
    return any(g.is_exceeded for g in judged)
