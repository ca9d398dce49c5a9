"""What follows from the moments of a run: peaks by phase, reserved memory, bounds of the need.

Whether a run fits is decided on bounds of its need (:class:`Needs`), never on what the allocator
reserves where memory is plentiful: most of the latter is cache, which the allocator gives back when
a request would fail otherwise. All are maxima over the moments of a step of sums whose terms grow
with batch, length and width, so that a larger run never fits where a smaller one does not. The
shares below were measured on the 64 recorded runs of ``tests/estimation/recorded_peaks.json``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from fragdoctor.estimation.states import local_part, states_of
from fragdoctor.estimation.step import Live, Moment, largest_tensor
from fragdoctor.model.memory_estimate import Doubt, PhasePeak, Share
from fragdoctor.model.workload import Workload
from fragdoctor.units import MIB

# Counted from shapes: parameters, gradients, optimizer states. Alignment makes up the rest.
COUNTED_SHARE: Final = 0.005
# Activations, logits and temporaries of the recorded runs lay within 10.4 % of the formulas.
FORMULA_SHARE: Final = 0.11
# The shape itself is a guess.
GUESS_SHARE: Final = 0.25
# What the allocator takes beyond the peak: 6 % of what comes and goes, one of the largest such
# tensors, and some pages for small ones. Where memory is plentiful it is that in the middle of the
# recorded runs; the upper bound held what was reserved in 50 of 56 of them, and 95 % of it in all.
CHURN_SHARE: Final = 0.06
CHURN_PAGES: Final = 128 * MIB
# Where batches differ in length a block that is free is seldom as large as the next longer batch
# asks for: freed ones pile up. In 9 runs of LoRA (``benchmarks/varying_lengths.py``), with and
# without checkpointing, of small and large vocabularies and lengths as texts have them, the cache
# grew to 5 to 13 of the largest tensors, and to 3 to 10 where recorded steps were played 12 times
# with such lengths: to 7 in the middle of all, to 6 where they are less spread. It is given back
# when a request would fail otherwise: what a run needs is that of its longest batch.
CACHED_LARGEST: Final = 6
# Weights and cache are allocated once, in pages.
SERVING_CHURN_SHARE: Final = 0.01
# PyTorch's c10/core/AllocatorConfig.h: tensors beyond 1 MiB are cut out of segments of 20 MiB,
# those of 10 MiB and more have their own, in steps of 2 MiB.
OWN_SEGMENT, SHARED_SEGMENT, PAGE = 10 * MIB, 20 * MIB, 2 * MIB

COUNTED_TAGS: Final = frozenset(
    {"parameters", "master_weights", "gradients", "buckets", "optimizer_states", "workspaces",
     "kv_cache", "gathered_parameters", "inputs", "optimizer_temporaries",
     "communication", "weight_copies"}
)  # fmt: skip
"""What follows from counts and dtypes alone."""
FIRST_TAGS: Final = frozenset({"parameters", "master_weights", "kv_cache", "workspaces"})
"""What is allocated before the first step, in one run, and stays."""


class Needs(Struct, frozen=True):
    """What a run needs at least and at most.

    Attributes:
        low_bytes: below it the run cannot be served.
        high_bytes: with it the run is served; None where a part of the run is not known.
        doubts: what lies between the two.
    """

    low_bytes: int
    high_bytes: int | None
    doubts: tuple[Doubt, ...] = ()


def most_of_each(moments: Sequence[Moment]) -> Mapping[str, int]:
    """Return the most that is ever held for each purpose."""
    names = dict.fromkeys(name for moment in moments for name in moment.live)
    return {name: round(max(m.live.get(name, 0) for m in moments)) for name in names}


def phases_of(moments: Sequence[Moment]) -> list[PhasePeak]:
    """Return the peak of each phase, in the order in which they begin."""
    tops: dict[str, Moment] = {}
    for moment in moments:
        if moment.phase not in tops or _sum(moment.live) > _sum(tops[moment.phase].live):
            tops[moment.phase] = moment
    found = []
    for top in tops.values():
        shares = tuple(Share(name, round(n)) for name, n in top.live.items() if round(n))
        found.append(PhasePeak(top.phase, sum(s.n_bytes for s in shares), shares, top.text))
    return found


def _sum(live: Live) -> float:
    return sum(live.values())


def reserved_of(moments: Sequence[Moment], workload: Workload) -> int:
    """Return what the caching allocator reserves where memory is plentiful."""
    top = max((moment.live for moment in moments), key=_sum)
    moving = sum(n for name, n in top.items() if name not in FIRST_TAGS)
    n_largest = CACHED_LARGEST if workload.varying_lengths else 1
    cache = _churn(workload) * moving + n_largest * largest_tensor(workload)
    return round(_sum(top) + cache) + _lost_in_pages(workload)


def _lost_in_pages(workload: Workload) -> int:
    """Return what segments hold beyond weights that are loaded one by one, and stay.

    In training gradients, states and activations fill such gaps.
    """
    states = states_of(local_part(workload)) if workload.inference else ()
    return sum((_in_segments(g.stored_bytes) - g.stored_bytes) * g.count for g in states)


def _in_segments(n_bytes: int) -> int:
    """Return what a tensor takes of segments, among others of its size."""
    if n_bytes >= OWN_SEGMENT:
        return -(-n_bytes // PAGE) * PAGE
    return n_bytes if n_bytes <= MIB else SHARED_SEGMENT // (SHARED_SEGMENT // n_bytes)


def _churn(workload: Workload) -> float:
    return SERVING_CHURN_SHARE if workload.inference else CHURN_SHARE


def needs_of(moments: Sequence[Moment], workload: Workload) -> Needs:
    """Return between which bounds the least capacity lies that serves a run."""
    share = GUESS_SHARE if workload.shape.is_guess else FORMULA_SHARE

    def doubt(name: str) -> float:
        return COUNTED_SHARE if name in COUNTED_TAGS else share

    def moves(name: str) -> float:
        return 0.0 if name in FIRST_TAGS else _churn(workload)

    def highest(live: Live) -> float:
        return sum(n * (1 + doubt(name) + moves(name)) for name, n in live.items())

    low = max(sum(n * (1 - doubt(name)) for name, n in m.live.items()) for m in moments)
    top = max((moment.live for moment in moments), key=highest)
    fixed = largest_tensor(workload) + CHURN_PAGES + _lost_in_pages(workload)
    formula = round(sum(2 * doubt(name) * n for name, n in top.items()))
    allocator = round(sum(moves(name) * n for name, n in top.items())) + fixed
    return Needs(
        low_bytes=int(low),
        high_bytes=int(highest(top)) + fixed if workload.shape.has_layers else None,
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
