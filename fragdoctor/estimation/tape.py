"""A list of allocations and frees, and what follows: peaks by phase, reserved memory, bounds.

Every estimate plays a training step as such a list, tensor by tensor, so that a peak is the sum of
what is alive at one moment and not the sum of separate maxima. Reserved memory comes from driving
the exact model of the caching allocator with the same list.

Whether a run fits is decided on bounds of its need alone (:class:`Needs`), never on what the
allocator happens to reserve where memory is plentiful: most of the latter is cache, which the
allocator gives back when a request would fail otherwise. Both bounds are maxima over the moments
of a step of sums whose terms grow with batch, length and width, so that a larger run never fits
where a smaller one does not. The shares below were measured on the 64 recorded runs of
``tests/estimation/recorded_peaks.json`` and on 40 settings of an 8B Llama.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fragdoctor.errors import OutOfMemory
from fragdoctor.frozen import frozen
from fragdoctor.model.memory_estimate import Doubt, PhaseName, PhasePeak, Share
from fragdoctor.model.workload import ModelShape, Workload
from fragdoctor.trace.allocator import Allocator
from fragdoctor.units import MIB

F64 = npt.NDArray[np.float64]

ROUNDING: Final = 512
# A mixture of experts has tens of thousands of equal tensors: beyond this many requests, equal
# tensors that come and go together are given to the allocator as one.
MAX_EXPANDED: Final = 20_000
# No device has a thousandth of it: the allocator's part does not matter then.
ABSURD_BYTES: Final = 2**50


class Event(NamedTuple):
    """One step of the list. A tuple: a step has tens of thousands of them.

    Attributes:
        kind: alloc, free, phase or moment.
        handle: which tensors.
        tag: what they are for; of a phase or a moment its name.
        n_bytes: of one tensor, before rounding.
        n_tensors: how many are equal.
        rounded_bytes: what the allocator hands out for all of them.
    """

    kind: str
    handle: int = 0
    tag: str = ""
    n_bytes: int = 0
    n_tensors: int = 1
    rounded_bytes: int = 0


_SIGN: Final = {"alloc": 1, "free": -1}


def rounded(n_bytes: int) -> int:
    """Return what the allocator hands out for a request: a multiple of 512 bytes."""
    return -(-n_bytes // ROUNDING) * ROUNDING


class Tape:
    """Collects events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._frees: list[Event] = []

    def alloc(self, tag: str, n_bytes: float, count: int = 1) -> int:
        """Allocate ``count`` equal tensors and return their handle; -1 for nothing."""
        size = int(n_bytes)
        if size <= 0 or count <= 0:
            return -1
        handle = len(self._frees)
        tensors = (handle, tag, size, count, rounded(size) * count)
        self._frees.append(Event("free", *tensors))
        self.events.append(Event("alloc", *tensors))
        return handle

    def free(self, *handles: int) -> None:
        """Free what the handles stand for, in this order."""
        for handle in handles:
            if handle >= 0:
                self.events.append(self._frees[handle])

    def phase(self, name: PhaseName) -> None:
        """Begin a phase."""
        self.events.append(Event("phase", tag=name.value))

    def moment(self, text: str) -> None:
        """Name what happens from here on."""
        self.events.append(Event("moment", tag=text))

    def live(self) -> tuple[Sequence[str], F64]:
        """Return the tags, and ``float64[n_events, n_tags]``: what each holds after each event.

        Sums of bytes are exact up to 8 PiB, and no device has a thousandth of it.
        """
        tags = list(dict.fromkeys(e.tag for e in self.events if e.kind == "alloc"))
        place = {tag: i for i, tag in enumerate(tags)}
        change = np.zeros((len(self.events), len(tags)))
        for i, event in enumerate(self.events):
            if event.kind in _SIGN:
                change[i, place[event.tag]] = _SIGN[event.kind] * event.rounded_bytes
        return tags, np.cumsum(change, axis=0)


def most_of_each(tape: Tape) -> Mapping[str, int]:
    """Return the most that each tag ever holds."""
    tags, live = tape.live()
    most = live.max(axis=0, initial=0).astype(int).tolist()
    return defaultdict(int, zip(tags, most, strict=True))


def phases_of(tape: Tape) -> list[PhasePeak]:
    """Return the peak of each phase, in the order in which they first begin."""
    tags, live = tape.live()
    total, events = live.sum(axis=1), tape.events
    starts = [i for i, event in enumerate(events) if event.kind == "phase"]
    tops: dict[str, int] = {}
    for low, high in pairwise([*starts, len(events)]):
        top, name = low + int(total[low:high].argmax()), events[low].tag
        if name not in tops or total[top] > total[tops[name]]:
            tops[name] = top
    return [
        PhasePeak(
            name=PhaseName(name),
            n_bytes=int(total[top]),
            shares=tuple(Share(tag, int(n)) for tag, n in zip(tags, live[top], strict=True) if n),
            moment=next((e.tag for e in events[top::-1] if e.kind == "moment"), ""),
        )
        for name, top in tops.items()
    ]


def reserved_of(tape: Tape) -> int:
    """Return the most that the caching allocator reserves for the list, with default settings."""
    requests = [e for e in tape.events if e.kind == "alloc"]
    if any(e.n_bytes * e.n_tensors > ABSURD_BYTES for e in requests):
        return max((phase.n_bytes for phase in phases_of(tape)), default=0)
    return _reserved_for(tape, {}, None)


def _reserved_for(tape: Tape, factors: Mapping[str, float], capacity_bytes: int | None) -> int:
    """Return what the allocator reserves for a list whose sizes are multiplied, by tag.

    Raises:
        OutOfMemory: the capacity does not serve it.
    """
    allocator = Allocator(capacity_bytes=capacity_bytes)
    merges = sum(e.n_tensors for e in tape.events if e.kind == "alloc") > MAX_EXPANDED
    addresses: dict[int, Sequence[int]] = {}
    for event in tape.events:
        if event.kind == "alloc":
            size, n = round(event.n_bytes * factors.get(event.tag, 1.0)), event.n_tensors
            if merges and n > 1:
                size, n = rounded(size) * n, 1
            addresses[event.handle] = [allocator.malloc(size) for _ in range(n)]
        elif event.kind == "free":
            for address in addresses.pop(event.handle):
                allocator.free(address)
    return allocator.peak_reserved_bytes


def served_bytes(tape: Tape, workload: Workload, needs: Needs) -> int | None:
    """Return a capacity with which the exact allocator serves a list, at the largest sizes.

    The upper bound holds for any order of requests; this one for the order of the list. It is the
    least capacity to within an eighth of what lies between the highest sum and the upper bound.
    """
    high = needs.high_bytes
    if high is None or high > ABSURD_BYTES:
        return high
    factors = {tag: 1 + doubt for tag, doubt in _doubts(tape, workload).items()}
    low = int(_highest(tape, factors)[0])
    step = max(1, (high - low) // SERVED_STEPS)
    for capacity in range(low + step, high, step):
        try:
            _reserved_for(tape, factors, capacity)
        except OutOfMemory:
            continue
        return capacity
    return high


# Counted from shapes: parameters, gradients, optimizer states. Alignment makes up the rest.
COUNTED_SHARE: Final = 0.005
# Activations, logits and temporaries of the recorded runs lay within 10.4 % of the formulas.
CHECKED_SHARE: Final = 0.11
# No recordings of the architecture: code may keep other tensors.
UNCHECKED_SHARE: Final = 0.25
# Least capacity at which the exact allocator serves a step, less the peak: at most 6 % of what
# comes and goes, two of the largest such tensors, and some pages for small ones.
CHURN_SHARE: Final = 0.06
CHURN_TENSORS: Final = 2
CHURN_PAGES: Final = 128 * MIB
SERVED_STEPS: Final = 8
# Weights and cache are allocated once.
SERVING_CHURN_SHARE: Final = 0.01

COUNTED_TAGS: Final = frozenset(
    {"parameters", "master_weights", "gradients", "buckets", "optimizer_states", "workspaces",
     "kv_cache", "gathered_parameters", "inputs", "optimizer_temporaries",
     "communication", "weight_copies"}
)  # fmt: skip
"""What follows from counts and dtypes alone."""
FIRST_TAGS: Final = frozenset({"parameters", "master_weights", "kv_cache", "workspaces"})
"""What is allocated before the first step, in one run, and stays."""


@frozen
class Needs:
    """What a run needs at least and at most.

    Attributes:
        low_bytes: below it the run cannot be served.
        high_bytes: with it the run is served; None where a part of the run is not known.
        doubts: what lies between the two.
    """

    low_bytes: int
    high_bytes: int | None
    doubts: tuple[Doubt, ...] = ()


def formula_share(shape: ModelShape) -> float:
    """Return how far activations may be off the formulas, as a share of them."""
    return CHECKED_SHARE if shape.is_checked and not shape.is_guess else UNCHECKED_SHARE


def _doubts(tape: Tape, workload: Workload) -> Mapping[str, float]:
    """Return how far what is allocated for each purpose may be off, as a share of it."""
    share = formula_share(workload.shape)
    tags = {event.tag for event in tape.events if event.kind == "alloc"}
    return {tag: COUNTED_SHARE if tag in COUNTED_TAGS else share for tag in tags}


def needs_of(tape: Tape, workload: Workload) -> Needs:
    """Return between which bounds the least capacity lies that serves a tape."""
    share = formula_share(workload.shape)
    churn = SERVING_CHURN_SHARE if workload.inference else CHURN_SHARE
    doubt = _doubts(tape, workload)
    moves = {tag: 0.0 if tag in FIRST_TAGS else churn for tag in doubt}
    low, _ = _highest(tape, {tag: 1 - doubt[tag] for tag in doubt})
    high, at_high = _highest(tape, {tag: 1 + doubt[tag] + moves[tag] for tag in doubt})
    largest = max(
        (e.n_bytes for e in tape.events if e.kind == "alloc" and e.tag not in COUNTED_TAGS),
        default=0,
    )
    fixed = CHURN_TENSORS * largest + CHURN_PAGES
    formula = round(sum(2 * doubt[tag] * n for tag, n in at_high.items()))
    allocator = round(sum(moves[tag] * n for tag, n in at_high.items())) + fixed
    is_whole = workload.shape.has_layers
    return Needs(
        low_bytes=int(low),
        high_bytes=int(high) + fixed if is_whole else None,
        doubts=(
            Doubt(
                "formulas",
                f"activations and temporaries within {share:.0%}, counted parts within "
                f"{COUNTED_SHARE:.1%}".replace("%", " %"),
                formula,
            ),
            Doubt(
                "allocator",
                "space lost between blocks, depending on the order of requests; less with "
                "expandable_segments:True",
                allocator,
            ),
        ),
    )


def _highest(tape: Tape, weights: Mapping[str, float]) -> tuple[float, Mapping[str, int]]:
    """Return the highest weighted sum of what is alive at one moment, and what it consists of."""
    tags, live = tape.live()
    if not live.size:
        return 0.0, {}
    weighted = live @ np.array([weights.get(tag, 0.0) for tag in tags])
    top = int(weighted.argmax())
    return float(weighted[top]), dict(zip(tags, live[top].astype(int).tolist(), strict=True))
