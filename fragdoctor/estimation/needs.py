"""Between which bounds the memory of a run lies, and where the width between them comes from.

Whether a run fits is decided on these bounds alone, never on what the allocator happens to reserve
where memory is plentiful: most of the latter is cache, which the allocator gives back when a
request would fail otherwise. Both bounds are maxima over the moments of a step of sums whose terms
grow with batch, length and width, so that a larger run never fits where a smaller one does not.

The shares below were measured on the 66 recorded runs of ``tests/estimation/recorded_peaks.json``
and on 40 settings of an 8B Llama; ``tests/estimation/test_needs.py`` holds them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fragdoctor.estimation.tape import Tape, rounded
from fragdoctor.model.feasibility import Doubt
from fragdoctor.model.workload import ModelShape, Workload
from fragdoctor.units import MIB

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
BOUND_TAG: Final = "reductions"
"""Buffers of sums, at the most that they can be."""


@dataclass(frozen=True, slots=True)
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


def needs_of(tape: Tape, workload: Workload) -> Needs:
    """Return between which bounds the least capacity lies that serves a tape."""
    share = formula_share(workload.shape)
    churn = SERVING_CHURN_SHARE if workload.inference else CHURN_SHARE
    tags = {event.tag for event in tape.events if event.kind == "alloc"}
    doubt = {tag: COUNTED_SHARE if tag in COUNTED_TAGS else share for tag in tags}
    if BOUND_TAG in doubt:
        doubt[BOUND_TAG] = 0.0
    moves = {tag: 0.0 if tag in FIRST_TAGS else churn for tag in tags}
    low, _ = _highest(tape, {tag: 1 - doubt[tag] for tag in tags if tag != BOUND_TAG})
    high, at_high = _highest(tape, {tag: 1 + doubt[tag] + moves[tag] for tag in tags})
    largest = max(
        (
            e.n_bytes
            for e in tape.events
            if e.kind == "alloc" and e.tag not in COUNTED_TAGS and e.tag != BOUND_TAG
        ),
        default=0,
    )
    fixed = CHURN_TENSORS * largest + CHURN_PAGES
    formula = round(sum(2 * doubt[tag] * n for tag, n in at_high.items()))
    allocator = round(sum(moves[tag] * n for tag, n in at_high.items())) + fixed
    is_whole = workload.shape.has_layers or workload.model_route != ""
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
    live: defaultdict[str, int] = defaultdict(int)
    total, best, at_best = 0.0, 0.0, {}
    grew = False
    for event in tape.events:
        if event.kind == "alloc":
            size = rounded(event.n_bytes) * event.count
            live[event.tag] += size
            total, grew = total + weights.get(event.tag, 0.0) * size, True
        elif event.kind == "free":
            if grew and total > best:
                best, at_best = total, dict(live)
            grew = False
            size = rounded(event.n_bytes) * event.count
            live[event.tag] -= size
            total -= weights.get(event.tag, 0.0) * size
    if total > best:
        best, at_best = total, dict(live)
    return best, at_best
