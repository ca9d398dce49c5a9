"""A smaller batch or sequence, and by how much."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.diagnosis.remedies.plan import HELPS, MAY_HELP, Plan, Proposal, propose, reject
from fragdoctor.diagnosis.remedies.workload import (
    Workload,
    fails_in_optimizer_step,
    only_builds,
    workload_of,
)
from fragdoctor.model.diagnosis import Cause, Predicted
from fragdoctor.model.finding import Confidence, Evidence
from fragdoctor.units import format_share, format_size

CODE = "smaller-batch"
TITLE = "Use a smaller batch or shorter sequences"


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose it for capacity, peaks and limits, with the share that must go."""
    if not plan.is_allocator_case or plan.refusal is None:
        return
    if plan.cause not in (Cause.CAPACITY, Cause.TRANSIENT_PEAK, Cause.MEMORY_LIMIT):
        return
    if fails_in_optimizer_step(plan):
        yield reject(
            CODE,
            TITLE,
            confidence=Confidence.LIKELY,
            why="The failure is in the optimizer's step, when the activations of the batch are "
            "freed already; weights, gradients and state do not shrink with the batch.",
        )
        return
    work = workload_of(plan)
    if work.missing_bytes <= 0:
        return
    is_main = plan.cause in (Cause.CAPACITY, Cause.TRANSIENT_PEAK) and not only_builds(plan)
    yield propose(
        CODE,
        TITLE,
        weight=HELPS + 20 if is_main else MAY_HELP,
        confidence=Confidence.LIKELY if work.activation_bytes is not None else Confidence.POSSIBLE,
        change=_change(work),
        why=_why(plan, work),
        cost="More steps for the same data; gradient accumulation keeps the effective batch.",
        caveats=("Weights, gradients and optimizer state do not shrink with the batch.",),
        verify="Peak allocated memory falls by at least the missing amount.",
        predicted=Predicted(fits=True, method="arithmetic")
        if work.keep_share is not None and work.keep_share > 0
        else None,
        evidence=(Evidence("missing", work.missing_bytes, "bytes", plan.refusal.source),),
        saves_bytes=work.missing_bytes,
    )


def _change(work: Workload) -> str:
    if work.keep_share is None:
        return "lower the batch size or the sequence length"
    if work.keep_share <= 0:
        return "lower the batch size or the sequence length; even the smallest will not do alone"
    per_cent = max(1, int(100 * work.keep_share))
    return f"use at most {per_cent} % of the present batch size times sequence length"


def _why(plan: Plan, work: Workload) -> str:
    r = plan.refusal
    assert r is not None  # noqa: S101 - checked by the caller
    missing = f"{format_size(work.missing_bytes)} are missing"
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
        f"{missing}: at least {format_share(work.missing_bytes, needed)} of the "
        f"{format_size(needed)} needed, more if part of them does not scale with the batch."
    )
