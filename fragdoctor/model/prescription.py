"""Changes to a program that were tried in rehearsals, and which of them make it fit."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from fragdoctor.model.finding import Location
from fragdoctor.model.hooks import drawn
from fragdoctor.units import format_size


class Numerics(StrEnum):
    """What a change does to the results of a program. The strings are a contract (JSON)."""

    EXACT = "exact"
    """The same results, up to the order of sums."""
    ROUNDING = "rounding"
    """The same computation in another precision."""
    DIFFERENT = "different"
    """Another computation, such as another optimizer."""


class Place(StrEnum):
    """Where a change is written in a program. The strings are a contract (JSON)."""

    OPEN = "open"
    """The place depends on the program."""
    BEFORE_OPTIMIZER = "before_optimizer"
    """Before the statement that creates the optimizer, or the last of several."""
    AFTER_OPTIMIZER = "after_optimizer"
    OPTIMIZER = "optimizer"
    """In the arguments of the optimizer."""


class Treatment(Struct, frozen=True):
    """A change to a program that a rehearsal makes from outside.

    Attributes:
        code: name of the change: ``checkpoint``.
        title: the change in words.
        numerics: what it does to the results.
        extra_compute: additional floating-point operations as a share of training's, by the
            formulas of ``torch.utils.flop_counter``. None means not known, as for copies to the
            host.
        lines: the lines that the user writes for it.
        instead: how the user writes it in the framework in use, or "".
        specs: how the engine makes it: ``checkpoint:6``.
        conf: settings of the allocator, "" means unchanged.
        place: where its lines go.
        n_gpus: number of GPUs that it spreads the program over.
        batch_divisor: divisor of the batch in the program's arguments.
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
    n_gpus: int = 1
    batch_divisor: int = 1


def by_place(parts: Sequence[Treatment]) -> list[tuple[Place, list[Treatment]]]:
    """Return treatments that are written at the same known place together, others one by one."""
    together = ((place, [one for one in parts if one.place is place]) for place in list(Place)[1:])
    others = ((one.place, [one]) for one in parts if one.place is Place.OPEN)
    return [*((place, those) for place, those in together if those), *others]


def lines_of(parts: Sequence[Treatment]) -> list[str]:
    """Return the lines of treatments that are written at one place, each import only once."""
    lines: list[str] = []
    for part in parts:
        again = {line for line in lines if line.startswith(("import ", "from "))}
        lines += [line for line in part.lines if line not in again]
    return lines


class Tried(Struct, frozen=True):
    """Treatments that were rehearsed together.

    Attributes:
        treatments: one treatment, or several if a single one is not enough.
        fits: whether the program fits with them.
        needs_bytes: the least memory that PyTorch must have, by replay; None if that failed.
        peak_allocated_bytes: peak of the program's tensors.
        error: why it could not be rehearsed, or "".
        is_lower_bound: whether it was stopped early, as it had already more than it may: had it
            gone on, it could have needed even more.
    """

    treatments: Sequence[Treatment]
    fits: bool
    needs_bytes: int | None
    peak_allocated_bytes: int | None
    error: str = ""
    is_lower_bound: bool = False

    @property
    def title(self) -> str:
        """All treatments in words."""
        return " + ".join(one.title for one in self.treatments)

    @property
    def numerics(self) -> Numerics:
        """The largest effect on the results of any of the treatments."""
        order = list(Numerics)
        return max((one.numerics for one in self.treatments), key=order.index)

    @property
    def extra_compute(self) -> float | None:
        """Additional operations per step, as a share; None if one treatment's is not known."""
        each = [one.extra_compute for one in self.treatments]
        return None if None in each else sum(share or 0.0 for share in each)

    @property
    def n_gpus(self) -> int:
        """How many GPUs the program is spread over; the needs are for each GPU."""
        return max(one.n_gpus for one in self.treatments)

    @property
    def rank(self) -> tuple[int, int, bool, float, int, bool, int, int]:
        """Sort key among those that fit: GPUs, results, compute, then how easy it is to write.

        The easiest is a single change, then one whose place is known or that the framework has an
        option for, then one with few lines. Of equal ones, larger batches come first.
        """
        known, n_parts = self.extra_compute, len(self.treatments)
        numerics = list(Numerics).index(self.numerics)
        cost = 0.0 if known is None else known
        ease = (n_parts, self.is_open, self.n_lines, max(t.batch_divisor for t in self.treatments))
        return (self.n_gpus, numerics, known is None, cost, *ease)

    @property
    def is_open(self) -> bool:
        """Whether it depends on the program where a line goes, and no framework has an option."""
        return any(one.place is Place.OPEN and not one.instead for one in self.treatments)

    @property
    def n_lines(self) -> int:
        """How many lines the user writes; an option of a framework is one."""
        return sum(1 if one.instead else len(one.lines) for one in self.treatments)


class LeftOut(Struct, frozen=True):
    """A treatment that does not apply to a program, and why."""

    code: str
    reason: str


class Prescription(Struct, frozen=True):
    """What it takes to make a program fit.

    Attributes:
        target: the program.
        gpu: name of the GPU, as the user gave it.
        capacity_bytes: how much memory PyTorch can have.
        needs_bytes: the least that PyTorch must have for the unchanged program, by replay.
        is_partial: whether the rehearsal missed a part of the program that may need more.
        tried: everything that was rehearsed, starting with what fits, cheapest first.
        left_out: treatments that do not apply to this program, and why.
        is_cut_short: whether time ran out before everything was tried.
        notes: sentences about the whole prescription.
        diff: the cheapest change that fits, as a unified diff of the program. The changed program
            was rehearsed as a file of its own and needs the same. Empty if the place is open.
        optimizer_place: the line that makes the optimizer, the last of the user's own, or the last
            of several optimizers; None if it is not known.
        trains: whether the program ran a backward pass as far as it was rehearsed.
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
    optimizer_place: Location | None = None
    trains: bool = True

    @property
    def fits(self) -> bool:
        """Whether the program fits without a change."""
        return self.needs_bytes <= self.capacity_bytes

    def __repr__(self) -> str:
        """Return one line: what was tried fills screens."""
        cure = "fits as it is" if self.fits else "no change fits"
        if self.cure is not None:
            cure = self.cure.title
        needs = f"{format_size(self.needs_bytes)} of {format_size(self.capacity_bytes)}"
        return f"<Prescription {self.target!r} needs {needs}: {cure}>"

    def _repr_html_(self) -> str | None:
        """Return what Jupyter shows."""
        return drawn(self)

    @property
    def cure(self) -> Tried | None:
        """The cheapest change that fits, or None if none does."""
        return next((one for one in self.tried if one.fits), None)
