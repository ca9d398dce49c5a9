"""What was assumed where values would have decided, and what is not modelled."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Assumption:
    """One thing assumed at one line.

    Attributes:
        filename, line: of the program's own code, or of a library where it has none.
        operation: what asked.
        assumed: in words.
    """

    filename: str
    line: int
    operation: str
    assumed: str


@dataclass(slots=True)
class Assumptions:
    """Everything assumed in a rehearsal, each once.

    Attributes:
        made: in the order of first occurrence, with how often.
        shares: how much is kept by operations whose results depend on values, by kind; 1 = all.
        notes: sentences on the rehearsal as a whole.
    """

    made: dict[Assumption, int] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)

    def make(self, assumption: Assumption) -> None:
        """Note an assumption."""
        self.made[assumption] = self.made.get(assumption, 0) + 1

    def note(self, sentence: str) -> None:
        """Note something on the rehearsal as a whole."""
        self.notes[sentence] = None
