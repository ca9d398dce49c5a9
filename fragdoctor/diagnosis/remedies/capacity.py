"""Remedies that make live memory smaller."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar, Final

from fragdoctor.diagnosis.remedies.remedy import (
    HELPS,
    MAY_HELP,
    Attempt,
    JudgedCase,
    Proposal,
    Remedy,
)
from fragdoctor.diagnosis.remedies.workload import (
    Workload,
    fails_in_optimizer_step,
    only_builds,
    workload_of,
)
from fragdoctor.model.diagnosis import Cause, Predicted
from fragdoctor.model.finding import Confidence, Evidence
from fragdoctor.model.simulation import ReplayResult
from fragdoctor.rules.capacity.optimizer_state import optimizer_holders, step_memory
from fragdoctor.trace.edits import batch_scaled
from fragdoctor.units import format_share, format_size

MIN_BATCH_SHARE: Final = 0.01
"""Of the present batch; less is no batch at all."""

EXAMPLE_LAYERS: Final = 24
"""Layers of the worked example; the real number is in the program, not in a memory file."""

MIN_TEMPORARIES: Final = 0.05
"""Share of the step's peak from which its temporaries are worth a change."""


class SmallerBatch(Remedy):
    """A smaller batch or sequence, and by how much."""

    code: ClassVar[str] = "smaller-batch"
    title: ClassVar[str] = "Use a smaller batch or shorter sequences"
    computes_less: ClassVar[bool] = True

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it for capacity, peaks and limits, with the share that must go."""
        r = case.failed_request
        if not case.is_allocator_case or r is None:
            return
        if case.cause not in (Cause.CAPACITY, Cause.TRANSIENT_PEAK, Cause.MEMORY_LIMIT):
            return
        if fails_in_optimizer_step(case):
            why = (
                "The failure is in the optimizer's step, when the activations of the batch are "
                "freed already; weights, gradients and state do not shrink with the batch."
            )
            yield self.rejection(why, Confidence.LIKELY)
            return
        work = workload_of(case)
        if r.missing_bytes <= 0:
            return
        is_main = case.cause in (Cause.CAPACITY, Cause.TRANSIENT_PEAK) and not only_builds(case)
        is_measured = work.activation_bytes is not None
        yield self.proposal(
            weight=HELPS + 20 if is_main else MAY_HELP,
            confidence=Confidence.LIKELY if is_measured else Confidence.POSSIBLE,
            change=_batch_change(work),
            why=_batch_why(case, work),
            cost="More steps for the same data; gradient accumulation keeps the effective batch.",
            caveats=("Weights, gradients and optimizer state do not shrink with the batch.",),
            verify="Peak allocated memory falls by at least the missing amount.",
            predicted=Predicted(fits=True, method="arithmetic")
            if work.keep_share is not None and work.keep_share > 0
            else None,
            evidence=(Evidence("missing", r.missing_bytes, "bytes", r.source),),
            saves_bytes=r.missing_bytes,
        )

    def attempts(
        self, case: JudgedCase, proposal: Proposal, recorded: ReplayResult
    ) -> Sequence[Attempt]:
        """Try the batch scaled by the share that should fit."""
        del proposal, recorded
        share = workload_of(case).keep_share
        if not share or share < MIN_BATCH_SHARE:
            return ()
        return (Attempt.of_edit(batch_scaled(int(100 * share) / 100)),)


def _batch_change(work: Workload) -> str:
    if work.keep_share is None:
        return "lower the batch size or the sequence length"
    if work.keep_share <= 0:
        return "lower the batch size or the sequence length; even the smallest will not do alone"
    per_cent = max(1, int(100 * work.keep_share))
    return f"use at most {per_cent} % of the present batch size times sequence length"


def _batch_why(case: JudgedCase, work: Workload) -> str:
    r = case.failed_request
    assert r is not None  # noqa: S101 - checked by the caller
    missing = f"{format_size(r.missing_bytes)} are missing"
    if r.is_alone_too_large:
        return (
            f"One tensor of {format_size(r.requested_bytes)} is larger than all that PyTorch could "
            "have: its own dimensions must shrink."
        )
    if work.activation_bytes is not None and work.keep_share is not None:
        return (
            f"{missing}; {format_size(work.activation_bytes)} of the live memory come and go with "
            "each step, which is what scales with the batch."
        )
    needed = r.needed_bytes
    if needed is None:
        return f"{missing}."
    return (
        f"{missing}: at least {format_share(r.missing_bytes, needed)} of the "
        f"{format_size(needed)} needed, more if part of them does not scale with the batch."
    )


class GradientCheckpointing(Remedy):
    """Gradient checkpointing: activations against compute."""

    code: ClassVar[str] = "gradient-checkpointing"
    title: ClassVar[str] = "Checkpoint the layers of the model"
    computes_less: ClassVar[bool] = True

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it where activations of training fill the device."""
        r = case.failed_request
        if not case.is_allocator_case or r is None:
            return
        if case.cause not in (Cause.CAPACITY, Cause.TRANSIENT_PEAK):
            return
        if r.total_bytes is not None and r.requested_bytes > r.total_bytes:
            return
        if fails_in_optimizer_step(case) or only_builds(case):
            return
        activations = workload_of(case).activation_bytes
        example = "activations of L layers shrink to about 1/sqrt(L)"
        if activations is not None:
            example = (
                f"the {format_size(activations)} of activations would shrink to about "
                f"{format_size(activations / math.sqrt(EXAMPLE_LAYERS))} with {EXAMPLE_LAYERS} "
                "layers (1/sqrt(L))"
            )
        yield self.proposal(
            weight=HELPS + 10 if activations is not None else MAY_HELP + 10,
            confidence=Confidence.LIKELY if activations is not None else Confidence.POSSIBLE,
            change="torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) around each "
            "repeated block",
            why="A transformer keeps about L x B x S x H x bytes per element for each stored "
            f"tensor (layers, batch, sequence, hidden size); {example}.",
            cost="About 33 % more compute: the forward pass runs once more.",
            caveats=("Training only: it does nothing for weights, optimizer state or inference.",),
            verify="Peak allocated memory of a step falls; its time grows by about a third.",
        )


class OptimizerWithoutForeach(Remedy):
    """An optimizer that updates all parameters at once needs temporaries for all of them."""

    code: ClassVar[str] = "optimizer-without-foreach"
    title: ClassVar[str] = "Let the optimizer update one parameter at a time"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it where the step fails and its temporaries are large."""
        analysis = case.context.analysis
        if analysis is None or not _is_optimizer_case(case):
            return
        step = step_memory(analysis)
        if step is None or step.temporary_bytes < MIN_TEMPORARIES * step.peak_bytes:
            return
        yield self.proposal(
            weight=HELPS + 27,
            confidence=Confidence.LIKELY,
            change="foreach=False or fused=True where the optimizer is made",
            why=f"At its peak the step held {format_size(step.temporary_bytes)} of temporaries "
            f"beside {format_size(step.state_bytes)} of state: by default all parameters are "
            "updated together (foreach).",
            cost="foreach=False makes the step slower; fused=True does not.",
            caveats=("Not every optimizer offers both.",),
            verify="The peak of the optimizer phase falls.",
            saves_bytes=step.temporary_bytes,
        )


class SmallerOptimizerState(Remedy):
    """Optimizer state: created in the first step, as large as the weights or twice that."""

    code: ClassVar[str] = "smaller-optimizer-state"
    title: ClassVar[str] = "Use an optimizer with less state"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose smaller state where the failure is in the optimizer."""
        analysis = case.context.analysis
        if analysis is None or not _is_optimizer_case(case):
            return
        step = step_memory(analysis)
        held = sum(h.now_bytes for h in optimizer_holders(case.context, analysis))
        held = held if step is None else step.state_bytes
        yield self.proposal(
            weight=HELPS + 25,
            confidence=Confidence.LIKELY,
            change="8-bit Adam, Adafactor or SGD; foreach=False lowers the peak of a step; shard "
            "with ZeRO or FSDP; offload the state to the host",
            why="The request failed inside the optimizer's step, which had made "
            f"{format_size(held)} of state until then.",
            cost="Another optimizer needs its own tuning; offloading is slow.",
            caveats=(
                "A smaller batch makes room only as far as gradients and activations shrink.",
            ),
            verify="Allocated memory after the first step falls.",
            saves_bytes=held or None,
        )


def _is_optimizer_case(case: JudgedCase) -> bool:
    is_short = case.cause in (Cause.CAPACITY, Cause.TRANSIENT_PEAK)
    return is_short and fails_in_optimizer_step(case)


class LessModelMemory(Remedy):
    """Weights, gradients and state in less memory: precision, sharding, offloading."""

    code: ClassVar[str] = "less-model-memory"
    title: ClassVar[str] = "Keep weights and state in less memory"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it for capacity; first where nothing but the model is there yet."""
        r = case.failed_request
        if not case.is_allocator_case or r is None or case.cause is not Cause.CAPACITY:
            return
        if r.is_alone_too_large:
            return
        is_building = only_builds(case) and not fails_in_optimizer_step(case)
        why = (
            f"Nothing was freed before the failure: {format_size(r.live_bytes)} are the model "
            "itself."
            if is_building
            else "Lower precision halves weights, gradients and activations alike."
        )
        yield self.proposal(
            weight=HELPS + 25 if is_building else MAY_HELP + 2,
            confidence=Confidence.LIKELY if is_building else Confidence.POSSIBLE,
            change="bf16 weights or autocast, quantised weights for inference, FSDP or ZeRO over "
            "several GPUs, offloading to the host",
            why=why,
            cost="Lower precision may need care with the loss; sharding and offloading need "
            "bandwidth.",
            verify="memory_allocated() after the model is built falls.",
        )
