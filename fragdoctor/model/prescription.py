"""Changes of a program that were tried in rehearsals, and which of them let it fit."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from fragdoctor.model.hooks import drawn


class Numerics(StrEnum):
    """What a change does to the results of a program. The strings are a contract (JSON)."""

    EXACT = "exact"
    """The same, up to the order of sums."""
    ROUNDING = "rounding"
    """The same computation in another precision."""
    DIFFERENT = "different"
    """Another computation, such as another optimizer."""


class Place(StrEnum):
    """Where a change is written in a program. The strings are a contract (JSON)."""

    OPEN = "open"
    """It depends on the program."""
    BEFORE_OPTIMIZER = "before_optimizer"
    """Before the statement that makes the optimizer."""
    AFTER_OPTIMIZER = "after_optimizer"
    OPTIMIZER = "optimizer"
    """In the arguments of the optimizer."""


class Treatment(Struct, frozen=True):
    """A change of a program that is made from outside in a rehearsal.

    Attributes:
        code: names it: ``checkpoint``.
        title: in words.
        numerics: what it does to the results.
        extra_compute: further floating-point operations, as a share of those of training, counted
            by ``torch.utils.flop_counter``'s formulas. None = not known, as of copies to the host.
        lines: what the user writes for it.
        instead: what the user writes in the words of the framework in use, ""
        specs: how the engine makes it: ``checkpoint:6``.
        conf: settings of the allocator, "" = as they are.
        place: where its lines go.
        arguments: what is written into a call, for a place that is one.
        n_gpus: over how many it spreads the program.
        batch_divisor: by what the batch in the program's arguments is divided.
    """

    code: str
    title: str
    numerics: Numerics
    extra_compute: float | None = 0.0
    lines: Sequence[str] = ()
    instead: str = ""
    specs: Sequence[str] = ()
    conf: str = ""
    place: Place = Place.OPEN
    arguments: Sequence[str] = ()
    n_gpus: int = 1
    batch_divisor: int = 1


class Tried(Struct, frozen=True):
    """Treatments that were rehearsed together.

    Attributes:
        treatments: one, or several where single ones do not do.
        fits: whether the program fits with them.
        needs_bytes: the least that PyTorch must have, by replay; None where it failed.
        peak_allocated_bytes: of its tensors.
        error: why it could not be rehearsed, "".
    """

    treatments: Sequence[Treatment]
    fits: bool
    needs_bytes: int | None
    peak_allocated_bytes: int | None
    error: str = ""

    @property
    def title(self) -> str:
        """All of them in words."""
        return " + ".join(one.title for one in self.treatments)

    @property
    def numerics(self) -> Numerics:
        """The most that any of them changes."""
        order = list(Numerics)
        return max((one.numerics for one in self.treatments), key=order.index)

    @property
    def extra_compute(self) -> float | None:
        """Further operations of a step, as a share; None where one is not known."""
        each = [one.extra_compute for one in self.treatments]
        return None if None in each else sum(share or 0.0 for share in each)

    @property
    def n_gpus(self) -> int:
        """Over how many GPUs the program is spread; it needs what is said on each."""
        return max(one.n_gpus for one in self.treatments)

    @property
    def rank(self) -> tuple[int, int, int, float, int, bool, int]:
        """What comes first of those that fit: GPUs, results, compute, then what is easy to write.

        That is one change, then one whose place is known or which the framework has words for,
        then one of few lines.
        """
        known = self.extra_compute
        cost = float("inf") if known is None else known
        numerics = list(Numerics).index(self.numerics)
        parts = self.treatments
        is_open = any(one.place is Place.OPEN and not one.instead for one in parts)
        n_lines = sum(1 if one.instead else len(one.lines) for one in parts)
        return (self.n_gpus, numerics, int(known is None), cost, len(parts), is_open, n_lines)


class LeftOut(Struct, frozen=True):
    """A treatment that there is nothing for in a program, and why."""

    code: str
    reason: str


class Prescription(Struct, frozen=True):
    """What it takes to make a program fit.

    Attributes:
        target: the program.
        gpu: its name, as it was asked for.
        capacity_bytes: what PyTorch can have.
        needs_bytes: the least that PyTorch must have for the program as it is, by replay.
        is_partial: something of the program was not seen that may need more.
        tried: all that were rehearsed: those that fit first, the cheapest of them first.
        left_out: treatments that there is nothing for in this program, and why.
        is_cut_short: the time was over before all were tried.
        notes: sentences on the whole.
        diff: the cheapest change that fits, as a unified diff of the program; with it the program
            was rehearsed as a file of its own, and needs the same. Empty where its place is open.
    """

    target: str
    gpu: str
    capacity_bytes: int
    needs_bytes: int
    is_partial: bool
    tried: Sequence[Tried]
    left_out: Sequence[LeftOut]
    is_cut_short: bool = False
    notes: Sequence[str] = ()
    diff: Sequence[str] = ()

    @property
    def fits(self) -> bool:
        """Whether the program fits as it is."""
        return self.needs_bytes <= self.capacity_bytes

    def _repr_html_(self) -> str | None:
        """Return what Jupyter shows."""
        return drawn(self)

    @property
    def cure(self) -> Tried | None:
        """The cheapest change that fits; None where none does."""
        return next((one for one in self.tried if one.fits), None)
