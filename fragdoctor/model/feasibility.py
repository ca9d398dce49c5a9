"""Whether a run fits as far as that can be said, what would make it fit, what a server holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class FitState(StrEnum):
    """Whether a run fits, as far as that can be said."""

    FITS = "fits"  # even at the upper bound
    TOO_CLOSE = "too_close_to_call"  # the usable memory lies between the bounds
    DOES_NOT_FIT = "does_not_fit"  # not even at the lower bound


def state_on(low_bytes: int, high_bytes: int | None, usable_bytes: int) -> FitState:
    """Return whether what needs so much at least and at most fits."""
    if low_bytes > usable_bytes:
        return FitState.DOES_NOT_FIT
    if high_bytes is not None and high_bytes <= usable_bytes:
        return FitState.FITS
    return FitState.TOO_CLOSE


@dataclass(frozen=True, slots=True)
class Doubt:
    """A part of the width between the bounds of an estimate.

    Attributes:
        id: ``formulas``, ``allocator`` or ``trace``.
        reason: where it comes from, one phrase.
        n_bytes: how much of the width it makes up.
    """

    id: str
    reason: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Combination:
    """Measures that together make a run fit on the first GPU.

    Attributes:
        measures: ids of the measures, cheapest first; each is described among the savings' ids.
        title: for people, the measures in one phrase.
        option: how to ask for all of them here.
        slowdown: time a step takes in relation to the run as asked for, as far as published
            figures say; 1.0 = none, None = not known.
        cost: what it costs, one phrase for each measure that costs something.
        changes_training: whether other parameters are trained (adapters) or precision is lost.
        n_gpus: GPUs that it needs.
        needs_low_bytes, needs_high_bytes: what it needs of each.
    """

    measures: Sequence[str]
    title: str
    option: str
    slowdown: float | None
    cost: str
    changes_training: bool
    n_gpus: int
    needs_low_bytes: int
    needs_high_bytes: int | None


@dataclass(frozen=True, slots=True)
class Serving:
    """What a server with a pool of cache blocks can hold on one GPU.

    Attributes:
        utilization: share of the GPU's memory that the server takes.
        budget_bytes: that share, less the CUDA context.
        weights_bytes: of this GPU's part of the model.
        activations_bytes: of its widest step, by the upper bound, and the logits.
        cache_bytes: what is left for the pool.
        bytes_per_sequence: cache of one sequence at its full length.
        length: tokens of such a sequence.
        cached_tokens: tokens in the whole sequences that the pool holds.
        sequences: how many it serves at once, at most ``max_sequences``.
        max_batched_tokens: tokens that one step reads.
    """

    gpu: str
    utilization: float
    budget_bytes: int
    weights_bytes: int
    activations_bytes: int
    cache_bytes: int
    bytes_per_sequence: int
    length: int
    cached_tokens: int
    sequences: int
    max_sequences: int
    max_batched_tokens: int


@dataclass(frozen=True, slots=True)
class MapRow:
    """One sequence length of the map of what fits."""

    seq: int
    states: Sequence[FitState]


@dataclass(frozen=True, slots=True)
class FitMap:
    """Which batches fit at which lengths, on the first GPU."""

    gpu: str
    batches: Sequence[int]
    rows: Sequence[MapRow]
