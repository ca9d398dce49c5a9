"""What a run would have done next, where its recording ends with a failure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class OutlookState(StrEnum):
    """Whether the run goes on. The strings are a contract (JSON ``outlook.state``)."""

    HOLDS = "holds"
    """Served to the end of the step under way, and ``steps`` whole steps more."""
    FAILS = "fails"
    OPEN = "open"
    """It cannot be known; ``reason`` says what is missing."""


class OutlookBasis(StrEnum):
    """What the run was continued with. The strings are a contract (JSON ``outlook.basis``)."""

    COMPLETE = "complete"
    """Nothing had to be continued: the recording holds the whole run."""
    REPEATED = "repeated"
    """Complete steps, repeated as recorded."""
    SCALED = "scaled"
    """Complete steps, their sizes scaled to the step that was cut off."""
    LOWER_BOUND = "lower_bound"
    """No complete step: only what must still come."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Outlook:
    """The future of a run under one setting, capacity or change.

    Attributes:
        state: whether it goes on.
        steps: whole steps after the one under way over which that was seen.
        fails_after_steps: whole steps before it fails, 0 for the step that the recording cut off;
            None unless it fails.
        needs_bytes: the least capacity at which it would hold, None where that was not searched.
        peak_reserved_bytes: highest reserved memory of the continued run.
        growth_bytes_per_step: by how much allocated memory grows from step to step.
        basis: what the run was continued with.
        reason: what is missing, or why it fails, in one sentence; "".
        is_fragile: it goes on here, but not with slightly more or slightly less memory.
        n_complete_steps: recorded steps that those to come were made from; None where there were
            none. What a program does for the first time later is in none of them.
    """

    state: OutlookState
    basis: OutlookBasis = OutlookBasis.NONE
    steps: int | None = None
    fails_after_steps: int | None = None
    needs_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    growth_bytes_per_step: int | None = None
    reason: str = ""
    is_fragile: bool = False
    n_complete_steps: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether every request of whole further steps was known and served."""
        is_exact = self.basis in (OutlookBasis.COMPLETE, OutlookBasis.REPEATED)
        return self.state is OutlookState.HOLDS and is_exact and not self.is_fragile

    @property
    def ends_step(self) -> bool:
        """Whether the step that the recording cut off fails here too."""
        return self.state is OutlookState.FAILS and not self.fails_after_steps
