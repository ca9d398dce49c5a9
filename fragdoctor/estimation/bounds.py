"""What follows from the moments of a run: peaks by phase, reserved memory, bounds of its needs.

Whether a run fits is decided by the bounds of its needs (:class:`Needs`), never by what the
allocator reserves when memory is plentiful: most of that is cache, which the allocator releases
before it lets a request fail. Each figure is the maximum, over the moments of a step, of a sum
whose terms grow with batch, length and width, so a larger run never fits where a smaller one does
not. The shares were measured on the 64 recorded runs of ``tests/estimation/recorded_peaks.json``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from fragdoctor.estimation.layer import units
from fragdoctor.estimation.states import local_part, states_of
from fragdoctor.estimation.step import Instant, Live, largest_of_step, largest_tensor
from fragdoctor.estimation.training_choices import precision_of
from fragdoctor.model.memory_estimate import Doubt, PhasePeak, Share
from fragdoctor.model.workload import Role, Workload
from fragdoctor.units import MIB

# Parts counted from shapes (parameters, gradients, optimizer states) are off only by alignment.
COUNTED_SHARE: Final = 0.005
# Activations, logits and temporaries of 211 steps on PyTorch's own allocator
# (``tests/estimation/trained_steps.json``) and of the recorded runs were at most 4.6% smaller than
# the formulas say, and up to 10.4% larger in nearly all: code keeps tensors that nobody counted,
# and hardly ever fewer.
LESS_SHARE: Final = 0.05
FORMULA_SHARE: Final = 0.11
# Decoders without experts and windows, with a usual activation, were at most 5.8% larger.
DENSE_SHARE: Final = 0.06
# Used if the shape itself is a guess.
GUESS_SHARE: Final = 0.25
# What the allocator takes beyond the peak: 6% of the memory that comes and goes, the size of the
# largest tensor in it, and some pages for small tensors. This is the median of the recorded runs
# when memory is plentiful; the upper bound covered everything reserved in 46 of the 56 runs, and
# 92% of it in all of them.
CHURN_SHARE: Final = 0.06
CHURN_PAGES: Final = 128 * MIB
# If batches differ in length, a free block is seldom large enough for the next longer batch, so
# freed blocks pile up. In 9 LoRA runs (``benchmarks/varying_lengths.py``), with and without
# checkpointing, with small and large vocabularies and the lengths of real texts, the cache grew to
# 5 to 13 times the largest tensor, and to 3 to 10 times when recorded steps were played 12 times
# with such lengths: the median was 7, or 6 if lengths vary less. The cache is released before a
# request fails, so a run needs only what its longest batch needs.
CACHED_LARGEST: Final = 6
# When serving, weights and the KV cache are allocated once, in pages.
SERVING_CHURN_SHARE: Final = 0.01
# PyTorch's c10/core/AllocatorConfig.h: tensors larger than 1 MiB are cut out of segments of 20 MiB;
# tensors of 10 MiB or more get a segment of their own, rounded up to 2 MiB.
OWN_SEGMENT, SHARED_SEGMENT, PAGE = 10 * MIB, 20 * MIB, 2 * MIB

COUNTED_TAGS: Final = frozenset(
    {"parameters", "master_weights", "gradients", "buckets", "optimizer_states", "workspaces",
     "kv_cache", "gathered_parameters", "inputs", "optimizer_temporaries",
     "communication", "weight_copies"}
)  # fmt: skip
"""Parts that follow from counts and dtypes alone."""
FIRST_TAGS: Final = frozenset({"parameters", "master_weights", "kv_cache", "workspaces"})
"""Parts that are allocated all at once before the first step and stay."""
STEP_TAGS: Final = frozenset({"gradients", "optimizer_states", "optimizer_temporaries"})
"""Parts with a tensor for each parameter: the same sizes in every step, so the blocks of one step
serve the next. What they lose are holes in segments that smaller activations leave to gradients. On
PyTorch's own allocator, eight runs whose peak is the optimizer's step needed 0.5 to 8.2% more than
that peak, and at most 0.4 times what the passes leave in shared segments."""
GROWING_TAGS: Final = frozenset({"activations", "temporaries", "logits"})
PASSING_TAGS: Final = GROWING_TAGS | {"weight_copies"}
"""Parts of the passes that are gone by the optimizer's step; the first ones grow with the batch."""


class Needs(Struct, frozen=True):
    """The least and the most memory that a run may need.

    Attributes:
        low_bytes: with less than this the run fails.
        high_bytes: with this much the run succeeds.
        doubts: what makes up the difference between the two.
    """

    low_bytes: int
    high_bytes: int
    doubts: tuple[Doubt, ...] = ()


def most_of_each(moments: Sequence[Instant]) -> Mapping[str, int]:
    """Return the most bytes ever held for each purpose."""
    names = dict.fromkeys(name for moment in moments for name in moment.live)
    return {name: round(max(m.live.get(name, 0) for m in moments)) for name in names}


def phases_of(moments: Sequence[Instant]) -> list[PhasePeak]:
    """Return the peak of each phase, in the order in which they begin."""
    found = []
    for phase in dict.fromkeys(moment.phase for moment in moments):
        top = max((m for m in moments if m.phase == phase), key=lambda m: sum(m.live.values()))
        shares = tuple(Share(name, round(n)) for name, n in top.live.items() if round(n))
        found.append(PhasePeak(phase, sum(s.n_bytes for s in shares), shares, top.text))
    return found


def reserved_of(moments: Sequence[Instant], workload: Workload) -> int:
    """Return how many bytes the caching allocator reserves if memory is plentiful."""
    top = max((moment.live for moment in moments), key=lambda live: sum(live.values()))
    moving = sum(n for name, n in top.items() if name not in FIRST_TAGS)
    grows = workload.varying_lengths and not workload.expandable_segments
    cache = _churn(workload) * moving + (CACHED_LARGEST if grows else 1) * largest_tensor(workload)
    return round(sum(top.values()) + cache) + _lost_in_pages(workload)


def _lost_in_pages(workload: Workload) -> int:
    """Return how many bytes of segments stay unused after weights are loaded one by one.

    In training, gradients, states and activations fill these gaps, and expandable segments have
    none. MXFP4 checkpoints keep all experts of a layer in one tensor.
    """
    is_filled = not workload.inference or workload.expandable_segments
    states = () if is_filled else states_of(local_part(workload))
    joined = {Role.EXPERT: workload.shape.n_experts} if workload.dtype == "mxfp4" else {}
    tensors = ((joined.get(g.role, 1), g.stored_bytes, g.count) for g in states)
    return sum((_in_segments(n * size) - n * size) * (count // n) for n, size, count in tensors)


def _in_segments(n_bytes: int) -> int:
    """Return a tensor's share of a segment filled with tensors of its size, in bytes."""
    if n_bytes >= OWN_SEGMENT:
        return -(-n_bytes // PAGE) * PAGE
    return n_bytes if n_bytes <= MIB else SHARED_SEGMENT // (SHARED_SEGMENT // n_bytes)


def _churn(workload: Workload) -> float:
    return SERVING_CHURN_SHARE if workload.inference else CHURN_SHARE


def shares_of(workload: Workload) -> tuple[float, float]:
    """Return by which shares activations may be smaller and larger than the formulas say."""
    shape = workload.shape
    if shape.is_guess:
        return GUESS_SHARE, GUESS_SHARE
    if workload.degrees:  # no step of such code was measured
        return FORMULA_SHARE, FORMULA_SHARE
    is_dense = not (
        shape.is_encoder or shape.n_experts or shape.n_sliding_layers or shape.activation == "relu2"
    )
    # Layers of replicas are those of one GPU; FSDP does more if it wraps frozen weights.
    is_like_one = workload.world_size == 1 or not workload.lora_rank
    return LESS_SHARE, DENSE_SHARE if is_dense and is_like_one else FORMULA_SHARE


def _left_in_shared_segments(moments: Sequence[Instant], workload: Workload) -> float:
    """Return how many bytes the passes leave in segments that small tensors share."""
    stream = units(local_part(workload))["B*S*H"] * precision_of(workload.dtype).residual
    shared = min(1.0, OWN_SEGMENT / max(1.0, stream))
    return max(
        sum(m.live.get(name, 0) * (shared if name in GROWING_TAGS else 1) for name in PASSING_TAGS)
        for m in moments
    )


def needs_of(moments: Sequence[Instant], workload: Workload) -> Needs:
    """Return the bounds of the smallest capacity that is enough for a run."""
    less, more = shares_of(workload)
    churn, holes = _churn(workload), _left_in_shared_segments(moments, workload) / 2

    def doubt(name: str, share: float) -> float:
        return COUNTED_SHARE if name in COUNTED_TAGS else share

    def lost(live: Live) -> float:
        moving = sum(n for name, n in live.items() if name not in FIRST_TAGS | STEP_TAGS)
        return churn * moving + min(churn * sum(live.get(name, 0) for name in STEP_TAGS), holes)

    def highest(live: Live) -> float:
        return sum(n * (1 + doubt(name, more)) for name, n in live.items()) + lost(live)

    low = max(sum(n * (1 - doubt(name, less)) for name, n in m.live.items()) for m in moments)
    top = max((moment.live for moment in moments), key=highest)
    fixed = CHURN_PAGES + _lost_in_pages(workload)
    if not workload.expandable_segments:  # they map the pages of free blocks where they are needed
        fixed += max(largest_tensor(workload), largest_of_step(workload))
    formula = round(sum((doubt(name, less) + doubt(name, more)) * n for name, n in top.items()))
    allocator = round(lost(top)) + fixed
    return Needs(
        low_bytes=int(low),
        high_bytes=int(highest(top)) + fixed,
        doubts=(
            Doubt(
                "formulas",
                f"activations and temporaries from {100 * less:.3g}% less to {100 * more:.3g}% "
                f"more, counted parts within {100 * COUNTED_SHARE:.3g}%",
                formula,
            ),
            Doubt(
                "allocator",
                "space lost between blocks, depending on the order of requests"
                + "; less with expandable_segments:True" * (not workload.expandable_segments),
                allocator,
            ),
        ),
    )
