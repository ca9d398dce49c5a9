"""``compare --fail-on-growth``: which peaks grew by more than is accepted.

Judged are peak allocated and peak active memory of every device: what the program itself needs.
Reserved, cached and pinned memory also depend on the allocator and on when the snapshot was taken;
they are reported, and judged by ``check --max-pinned``. Out-of-memory failures that the first run
did not have count too: the peak of such a run is what it reached, not what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fragdoctor.gate.amount import Amount
from fragdoctor.model.comparison import Comparison
from fragdoctor.units import format_size


@dataclass(frozen=True, slots=True)
class Growth:
    """One judged figure of one device, first run against last; ``unit`` is bytes or count."""

    measure: str
    device: int
    before: int
    after: int
    allowed: int
    unit: str = "bytes"

    @property
    def is_exceeded(self) -> bool:
        """Whether it grew by more than is accepted."""
        return self.after - self.before > self.allowed

    @property
    def text(self) -> str:
        """One sentence with the numbers."""
        what, grown = f"{self.measure} of GPU {self.device}", self.after - self.before
        if self.unit == "count":
            return (
                f"{what} rose from {self.before} to {self.after}: the peak is what the run "
                "reached, not what it needs."
            )
        if grown <= 0:
            return f"{what} did not grow."
        word = "more than" if self.is_exceeded else "within"
        return (
            f"{what} grew by {format_size(grown)}, {word} the {format_size(self.allowed)} accepted."
        )


def judge_growth(comparison: Comparison, accepted: Amount) -> tuple[Growth, ...]:
    """Return every peak that both runs tell, judged; empty where there is none."""
    found: list[Growth] = []
    for peaks in comparison.device_peaks:
        for measure, (old, new) in (
            ("Peak allocated memory", peaks.allocated_bytes),
            ("Peak active memory", peaks.active_bytes),
        ):
            if old is not None and new is not None:
                found.append(Growth(measure, peaks.device, old, new, accepted.of(old) or 0))
        before, after = peaks.ooms
        if before is not None and after is not None and after > before:
            failures = "Out-of-memory failures"
            found.append(Growth(failures, peaks.device, before, after, 0, "count"))
    return tuple(found)


def has_grown(judged: Sequence[Growth]) -> bool:
    """Return whether any peak grew by more than is accepted."""
    return any(g.is_exceeded for g in judged)
