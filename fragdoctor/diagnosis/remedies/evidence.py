"""Remedies that ask for one more look: a shape, a call, a recording."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar, Final

from fragdoctor.diagnosis.remedies.remedy import ASKS, CURES, HELPS, JudgedCase, Proposal, Remedy
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.rules.failed_request import FailedRequest
from fragdoctor.units import format_count, format_size

HEADS: Final = 32
"""Batch times heads of the worked example: a model of 7 billion parameters, batch 1."""

CLOSED: Final = (Cause.NOT_MEMORY, Cause.HOST_MEMORY, Cause.SIZE_BUG, Cause.HEALTHY)
"""Causes about which a snapshot would add nothing."""


class RecordSnapshot(Remedy):
    """The one measurement that would settle what is open."""

    code: ClassVar[str] = "record-snapshot"
    title: ClassVar[str] = "Record a memory snapshot at the failure"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose a snapshot where none was given and the case is PyTorch's."""
        has_snapshot = case.context.analysis is not None
        if has_snapshot or case.cause in CLOSED or not case.is_allocator_case:
            return
        if case.verdict.confidence is Confidence.PROVEN and not case.verdict.decider:
            reason = "A snapshot shows which lines hold the memory."
        else:
            reason = case.verdict.decider or "A snapshot shows which lines hold and pin the memory."
        yield self.proposal(
            weight=ASKS,
            confidence=Confidence.LIKELY,
            change="fragdoctor run train.py; or, where it cannot be installed, "
            "torch.cuda.memory._record_memory_history(max_entries=100000) at start and "
            "torch.cuda.memory._dump_snapshot('oom.pickle') on the error",
            why=reason,
            cost="A few microseconds per allocation.",
            verify="It diagnoses by itself; otherwise: fragdoctor analyze oom.pickle",
        )


class FixShape(Remedy):
    """A size that went wrong."""

    code: ClassVar[str] = "fix-shape"
    title: ClassVar[str] = "Print the shape at the failing line and correct it"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose to look at the shape at the failing line."""
        if not case.supports(Cause.SIZE_BUG):
            return
        is_main = case.cause is Cause.SIZE_BUG
        r = case.failed_request
        yield self.proposal(
            weight=CURES if is_main else HELPS + 25,
            confidence=Confidence.PROVEN if is_main else Confidence.POSSIBLE,
            change="print(x.shape, x.dtype) before the call; check negative or NaN-derived sizes, "
            "a broadcast of (N, 1) with (1, N), num_classes of one_hot, and whether a checkpoint "
            "is damaged",
            why=case.verdict.summary if is_main or r is None else one_tensor_text(r),
            cost="None.",
            verify="The printed size is what was meant.",
        )


class FusedAttention(Remedy):
    """Attention scores of a long sequence in one tensor."""

    code: ClassVar[str] = "fused-attention"
    title: ClassVar[str] = "If these are attention scores, never make them"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it where one tensor alone is larger than the device."""
        r = case.failed_request
        if r is None or not case.is_allocator_case or not r.is_alone_too_large:
            return
        if case.cause is not Cause.CAPACITY:
            return
        yield self.proposal(
            weight=HELPS + 24,
            confidence=Confidence.POSSIBLE,
            change="torch.nn.functional.scaled_dot_product_attention with its flash or "
            "memory-efficient kernel, attn_implementation='sdpa' or 'flash_attention_2' in "
            "Transformers, enable_attention_slicing() in Diffusers",
            why=one_tensor_text(r),
            cost="None; it is faster too.",
            caveats=("output_attentions=True, and some masks, bring the slow path back.",),
            verify="The request of this size is gone from the trace.",
        )


def one_tensor_text(r: FailedRequest) -> str:
    """Return what a single huge tensor usually is."""
    length = round(math.sqrt(r.requested_bytes / 2 / HEADS), -2)
    return (
        f"One tensor of {format_size(r.requested_bytes)} is usually attention scores (batch x "
        f"heads x length x length; with {HEADS} for batch x heads in 16 bits, a length of about "
        f"{format_count(int(length))}) or a shape that is not what was meant."
    )


class LocateDriverCall(Remedy):
    """A driver's message without figures."""

    code: ClassVar[str] = "locate-driver-call"
    title: ClassVar[str] = "Find the call that failed"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose to find the call behind a driver's message."""
        if case.kind != "driver-no-figures" or case.cause is Cause.HOST_MEMORY:
            return
        yield self.proposal(
            weight=ASKS + 10,
            confidence=Confidence.POSSIBLE,
            change="CUDA_LAUNCH_BLOCKING=1, pin_memory=False for a test, nvidia-smi beside the run",
            why="The driver's message does not say whether device memory, pinned host memory or "
            "the context ran out.",
            cost="A slow run for diagnosis.",
            verify="The traceback shows the call; nvidia-smi shows whether the device is full.",
        )
