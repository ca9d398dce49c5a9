"""The answer of an estimate before a run: where memory goes, what fits, and how to make it fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct

from fragdoctor.model.gpus import GpuModel
from fragdoctor.model.recipe import RecipeUse
from fragdoctor.model.workload import Workload

MOST_GPUS: Final = 1024
"""The most GPUs that a plan may use."""


class FitState(StrEnum):
    """Whether a run fits, or is too close to call."""

    FITS = "fits"  # even at the upper bound
    TOO_CLOSE = "too_close_to_call"  # the usable memory lies between the bounds
    DOES_NOT_FIT = "does_not_fit"  # not even at the lower bound


def state_on(low_bytes: int, high_bytes: int, usable_bytes: int) -> FitState:
    """Return whether a run with these lower and upper bounds fits."""
    if low_bytes > usable_bytes:
        return FitState.DOES_NOT_FIT
    return FitState.FITS if high_bytes <= usable_bytes else FitState.TOO_CLOSE


class Doubt(Struct, frozen=True):
    """A part of the width between the bounds of an estimate.

    Attributes:
        id: ``formulas`` or ``allocator``.
        reason: where the doubt comes from, one phrase.
        n_bytes: how much of the width it accounts for.
        option: the option that settles it; "" means none does.
    """

    id: str
    reason: str
    n_bytes: int
    option: str = ""


class Combination(Struct, frozen=True):
    """One or several measures that save memory.

    Attributes:
        measures: ids of the measures, such as ``checkpointing``, cheapest first.
        title: the measures in one phrase, for people.
        option: the command-line options for all of them.
        slowdown: time per step relative to the run as asked for, as published; None means not
            known.
        cost: what the measures cost, one phrase for each measure that costs something.
        changes_training: whether other parameters are trained (adapters) or precision is lost.
        n_gpus: number of GPUs that it needs.
        needs_low_bytes, needs_high_bytes: bounds of the memory that it needs on each GPU.
    """

    measures: Sequence[str]
    title: str
    option: str
    slowdown: float | None
    cost: str
    changes_training: bool
    n_gpus: int
    needs_low_bytes: int
    needs_high_bytes: int


class Serving(Struct, frozen=True):
    """What a server with a pool of cache blocks can hold on one GPU.

    Attributes:
        utilization: share of the GPU's memory that the server takes.
        budget_bytes: that share, minus what is allocated outside PyTorch.
        weights_bytes: weights of this GPU's part of the model.
        activations_bytes: activations of the widest step, by the upper bound, plus the logits.
        cache_bytes: what is left for the pool.
        bytes_per_sequence: cache of one sequence at its full length.
        length: tokens in such a sequence.
        cached_tokens: tokens in the complete sequences that fit into the pool.
        sequences: how many sequences it serves at once, at most ``max_sequences``.
        max_batched_tokens: the most tokens that one step reads.
        sequences_read_whole: sequences if a step reads a whole prompt, as vLLM did before 0.8; the
            same as ``sequences`` if the tokens of a step were given.
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
    sequences_read_whole: int


class PlanRehearsal(Struct, frozen=True):
    """What the rehearsal of one rank of a plan found.

    Attributes:
        fits: whether it fits; None if it could not be rehearsed.
        peak_allocated_bytes: its peak, or that until the request that failed.
        reason: why it could not be rehearsed, or "".
    """

    fits: bool | None
    peak_allocated_bytes: int = 0
    reason: str = ""


class Plan(Struct, frozen=True):
    """A way to lay a run out on several GPUs.

    Attributes:
        layout: the layout in one phrase, for people.
        option: the command-line options for it.
        needs_low_bytes, needs_high_bytes: needs of the rank that needs the most.
        ranks: upper bound for each stage of a pipeline, in bytes; empty without one.
        seconds_per_token: for all GPUs together, by a roofline model.
        communication_share: share of that time spent waiting for other GPUs or the host.
        sequences: sequences that a server holds at once, in all replicas; 0 means training.
        price_per_hour, price_per_million_tokens: for all GPUs; None without a price.
        rehearsal: None if none was asked for, or the plan cannot be rehearsed.
    """

    n_gpus: int
    layout: str
    option: str
    needs_low_bytes: int
    needs_high_bytes: int
    ranks: Mapping[str, int]
    seconds_per_token: float
    communication_share: float
    sequences: int
    price_per_hour: float | None
    price_per_million_tokens: float | None
    rehearsal: PlanRehearsal | None = None


class PhaseName(StrEnum):
    """The phases of a training step, or of inference."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer_step"
    INFERENCE = "inference"


class Item(Struct, frozen=True):
    """One row of an estimate.

    Attributes:
        id: stable name, such as ``gradients``.
        title: the row's name for people.
        n_bytes: the most that this item ever takes; at the peak it may take less
            (:attr:`PhasePeak.shares`).
        formula: the formula with symbols, ``P x 4 B``.
        source: where the formula comes from.
        note: anything else to know, one sentence, or "".
    """

    id: str
    title: str
    n_bytes: int
    formula: str = ""
    source: str = ""
    note: str = ""


class Share(Struct, frozen=True):
    """What one item holds at the peak of a phase."""

    item: str
    n_bytes: int


class PhasePeak(Struct, frozen=True):
    """The peak of one phase; ``n_bytes`` is the sum of its shares.

    Attributes:
        moment: where in the phase the peak lies, for people.
    """

    name: PhaseName
    n_bytes: int
    shares: Sequence[Share] = ()
    moment: str = ""


class KeptTensor(Struct, frozen=True):
    """What one operation of a layer keeps for its backward pass."""

    operation: str
    what: str
    formula: str
    n_bytes: int


class Footprint(Struct, frozen=True):
    """Memory of one workload at one batch size.

    Attributes:
        items: rows in the order to print them; ``Share.item`` names them.
        phases: phases in the order in which they happen.
        reserved_bytes: what the caching allocator takes from the driver; at least the peak.
        n_parameters: all parameters, including frozen parameters and adapters.
        n_trainable: parameters that get gradients.
        notes: what was assumed, one sentence each.
        layer: what one layer keeps, by operation; empty if the layers are not known.
        needs_low_bytes: with less memory, the run cannot be served.
        needs_high_bytes: with this much memory, the run is served.
        published_low_bytes, published_high_bytes: range in which nine of ten published figures for
            such a run would lie.
        doubts: what makes up the width between the lower and the upper bound.
    """

    items: Sequence[Item]
    phases: Sequence[PhasePeak]
    reserved_bytes: int
    n_parameters: int
    n_trainable: int
    notes: Sequence[str] = ()
    layer: Sequence[KeptTensor] = ()
    needs_low_bytes: int = 0
    needs_high_bytes: int = 0
    published_low_bytes: int = 0
    published_high_bytes: int = 0
    doubts: Sequence[Doubt] = ()

    @property
    def peak(self) -> PhasePeak:
        """The phase that holds the peak."""
        return max(self.phases, key=lambda phase: phase.n_bytes)

    @property
    def peak_allocated_bytes(self) -> int:
        """The most that is allocated at once, as ``max_memory_allocated()`` counts it."""
        return self.peak.n_bytes


class KnownModel(Struct, frozen=True):
    """A model that is known by name.

    Attributes:
        hub: its repository on the Hugging Face hub, which users may give instead.
        n_parameters: number of parameters, as published there.
    """

    name: str
    hub: str
    n_parameters: int


class Fit(Struct, frozen=True):
    """Whether a footprint fits on one GPU, and how large the batch may be there.

    Attributes:
        fits: whether it surely fits: the state is ``fits``.
        margin_bytes: usable memory minus the upper bound, at least 0 if and only if it fits.
        largest_batch: the most sequences per step (micro batch) that surely fit on one GPU; 0 if
            not even one does; None means the batch does not matter or could not be varied.
        state: fits, too close to call, or does not fit.
    """

    gpu: GpuModel
    fits: bool
    margin_bytes: int
    largest_batch: int | None
    state: FitState = FitState.TOO_CLOSE


class Estimate(Struct, frozen=True):
    """The answer to "will it fit?".

    Attributes:
        fits: one for each GPU that was named; empty without ``--gpu``.
        savings: measures that each alone save memory, the most first.
        combinations: the cheapest measures, alone or together, that make the run fit on the first
            GPU; empty if it already fits, or if nothing makes it fit.
        serving: what a server holds, if a server was asked for.
        recipe: what was read from configuration files; None if there were none.
        plans: layouts on the fewest GPUs and on twice as many, fastest first; None if not wanted.
    """

    workload: Workload
    footprint: Footprint
    fits: Sequence[Fit] = ()
    savings: Sequence[Combination] = ()
    combinations: Sequence[Combination] = ()
    serving: Serving | None = None
    recipe: RecipeUse | None = None
    plans: Sequence[Plan] | None = None
