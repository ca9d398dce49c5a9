"""The phases of training: which part of a step a trace is in, and what memory is live then."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from msgspec import Struct

from fragdoctor.model.finding import Confidence, Location


class _Named(IntEnum):
    """An enum whose members are numbers in columns and words in reports."""

    @property
    def word(self) -> str:
        """The word for the value in reports."""
        return self.name.lower()


class TrainingPhase(_Named):
    """A part of a training step. FORWARD includes data loading, the loss and evaluation.

    SETUP is everything before the first step; OPTIMIZER includes gradient clipping and
    ``zero_grad``; UNKNOWN if the phase cannot be determined.
    """

    SETUP = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    UNKNOWN = 4


class Category(_Named):
    """What a block of memory is for.

    PARAMETERS includes a module's buffers. ACTIVATIONS are made by a forward pass, or made again
    under checkpointing, and wait for the backward pass. KEPT outlives its step and is in no other
    category: caches, workspaces of libraries, or a leak.
    """

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER_STATE = 2
    ACTIVATIONS = 3
    INPUTS = 4
    TEMPORARIES = 5
    KEPT = 6
    UNKNOWN = 7


class LineBytes(Struct, frozen=True):
    """Memory made by one line of the user's program; no location if no stack was recorded."""

    location: Location | None
    n_bytes: int


class CategoryShare(Struct, frozen=True):
    """Allocated memory of one category at one moment, by block sizes.

    ``confidence`` holds for at least nine tenths of its bytes; ``lines`` are the lines that hold
    most of it.
    """

    category: Category
    n_bytes: int
    n_blocks: int
    confidence: Confidence
    lines: Sequence[LineBytes] = ()


class PhaseFigures(Struct, frozen=True):
    """One phase over all its passes: allocated bytes at the peak of each pass.

    ``n_passes`` is None if nothing marks where one pass ends and the next begins, as in inference;
    then the figures are for all passes together. ``held`` is what the worst pass holds at its peak,
    most bytes first.
    """

    phase: TrainingPhase
    n_passes: int | None
    median_peak_bytes: int
    worst_peak_bytes: int
    held: Sequence[CategoryShare] = ()


class PhaseReport(Struct, frozen=True):
    """The phases of one device and what they hold.

    Attributes:
        method: ``stacks`` (by source line and lifetime), or ``none``.
        reason: why nothing, or not everything, could be determined.
        phases: phases in the order of a step; empty if the trace shows no training step.
        peak_phase: the phase with the highest allocated bytes of the trace.
        at_peak: what is allocated at that peak, most bytes first.
        at_rest: what is allocated between two steps; empty if the trace has no such moment.
    """

    device: int
    method: str
    reason: str = ""
    phases: Sequence[PhaseFigures] = ()
    peak_phase: TrainingPhase = TrainingPhase.UNKNOWN
    peak_bytes: int = 0
    at_peak: Sequence[CategoryShare] = ()
    at_rest: Sequence[CategoryShare] = ()
    rest_bytes: int | None = None


class HeldBytes(Struct, frozen=True):
    """The allocated blocks of one line of the program, or of one category, at a moment."""

    location: Location | None
    category: Category | None
    n_bytes: int
    n_blocks: int


class MomentReport(Struct, frozen=True):
    """What was allocated at one moment of a device's trace.

    Attributes:
        asked: which moment was asked for, in words: ``the peak of step 3``.
        event: events of the device's trace before the moment, out of ``n_events``.
        step: the step of the moment, 1 to ``n_steps``; None before the first, or without steps.
        lines: memory by line of the program, most bytes first; their ``category`` is None.
        categories: memory by category, empty if none is known; their ``location`` is None.
        since: the moment to compare with, in words; None if only one moment was asked for.
        since_allocated_bytes: what was allocated then.
        changes: changes by line from that moment to this one, largest first; negative for less.
    """

    device: int
    asked: str
    event: int
    n_events: int
    step: int | None
    n_steps: int
    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    lines: Sequence[HeldBytes] = ()
    categories: Sequence[HeldBytes] = ()
    since: str | None = None
    since_allocated_bytes: int | None = None
    changes: Sequence[HeldBytes] = ()
