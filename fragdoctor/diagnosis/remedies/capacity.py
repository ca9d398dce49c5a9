"""Remedies for whatever computes on the device: a smaller batch, a smaller model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Final

import numpy as np

from fragdoctor.diagnosis.bench import Attempt, Bench, Outcome
from fragdoctor.diagnosis.remedies.remedy import (
    HELPS,
    MAY_HELP,
    Burden,
    JudgedCase,
    Proposal,
    Remedy,
    helps,
)
from fragdoctor.diagnosis.remedies.savings import (
    SHORT_OF_MEMORY,
    SavingRemedy,
    fails_in_optimizer_step,
    only_builds,
)
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence, Evidence
from fragdoctor.model.phases import Category
from fragdoctor.rules.failed_request import FailedRequest
from fragdoctor.trace.edits import Edit, batch_scaled
from fragdoctor.trace.steps import Steps
from fragdoctor.trace.training_edits import passes_scaled
from fragdoctor.units import format_share, format_size


class SmallerBatch(SavingRemedy):
    """A smaller batch or sequence, and by how much."""

    code: ClassVar[str] = "smaller-batch"
    title: ClassVar[str] = "Use a smaller batch or shorter sequences"
    burden: ClassVar[Burden] = Burden.SLOWER
    is_usual: ClassVar[bool] = True
    acts_on: ClassVar[str] = "what grows with the batch"
    doing: ClassVar[str] = "an eighth of the batch"
    change: ClassVar[str] = "lower the batch size or the sequence length"
    cost: ClassVar[str] = (
        "More steps for the same data; gradient accumulation keeps the effective batch."
    )
    caveats: ClassVar[tuple[str, ...]] = (
        "Weights, gradients and optimizer state do not shrink with the batch.",
    )
    verify: ClassVar[str] = "Peak allocated memory falls by at least the missing amount."
    effort: ClassVar[int] = 8
    combines: ClassVar[bool] = False

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it for capacity, peaks and limits."""
        r = case.failed_request
        if not case.is_allocator_case or case.cause not in SHORT_OF_MEMORY:
            return
        if r is None or r.missing_bytes <= 0:
            return
        if fails_in_optimizer_step(case):
            why = (
                "The failure is in the optimizer's step, when the activations of the batch are "
                "freed already; weights, gradients and state do not shrink with the batch."
            )
            yield self.rejection(why, Confidence.LIKELY)
            return
        is_main = case.cause is not Cause.MEMORY_LIMIT and not only_builds(case)
        yield self.proposal(
            weight=HELPS + 20 if is_main else MAY_HELP,
            confidence=Confidence.POSSIBLE,
            change=self.change,
            why=_missing_text(r),
            cost=self.cost,
            caveats=self.caveats,
            verify=self.verify,
            evidence=(Evidence("missing", r.missing_bytes, "bytes", r.source),),
        )

    def attempts(self, case: JudgedCase, bench: Bench, proposal: Proposal | None) -> list[Attempt]:
        """Try parts of the present batch, as many as the length of the trace allows."""
        if proposal is None or proposal.is_rejected or only_builds(case):
            return []
        is_short = bench.n_operations <= SHORT_TRACE_OPERATIONS
        shares: tuple[float, ...] = BATCH_SHARES if is_short else LONG_TRACE_SHARES
        n = _batch_size(case)
        if n is not None:
            whole = sorted({round(n * share) for share in shares} - {0, n}, reverse=True)
            shares = tuple(k / n for k in whole)
        edits = [self._edit(case, share) for share in shares]
        return [Attempt.of_edit(edit, is_saving=True) for edit in edits]

    def edits(self, case: JudgedCase) -> Sequence[Edit]:
        """Return the run with half the batch."""
        return (self._edit(case, 0.5),)

    def _edit(self, case: JudgedCase, share: float) -> Edit:
        if case.training is not None:
            return passes_scaled(*case.training.steps, share)
        analysis = case.context.analysis
        if analysis is not None and len(analysis.trace.module_rows):
            began = Steps.of(analysis.trace).rows
            if len(began) == 1:  # the first step is all there is
                end = np.array([analysis.trace.n_events], np.int64)
                return passes_scaled(began, end, share)
        return batch_scaled(share)

    def judged(
        self, case: JudgedCase, bench: Bench, proposal: Proposal | None, outcomes: Sequence[Outcome]
    ) -> Proposal | None:
        """Return it with the largest share of the batch that fits."""
        judged = super().judged(case, bench, proposal, outcomes)
        if judged is None or judged.is_rejected:
            return judged
        best, n = self.chosen(bench, outcomes), _batch_size(case)
        share = float(best.attempt.what_if.edit.removeprefix("batch x "))
        if not helps(bench.recorded, best.result):
            least = "an eighth of the present batch times sequence length"
            if n is not None:
                least = f"a batch of {round(n * share)}"
            r = replace(judged.recommendation, change=f"even {least} is not enough alone")
            return replace(judged, recommendation=r, weight=MAY_HELP)
        if n is not None:
            r = replace(
                judged.recommendation,
                title=f"Use a batch of {round(n * share)} instead of {n}",
                change=f"batch size {round(n * share)} instead of {n}; gradient accumulation keeps "
                "the effective batch",
            )
            return replace(judged, recommendation=r)
        eighths = round(share * 8)
        part = {1: "an eighth", 2: "a quarter", 4: "half", 6: "three quarters"}.get(
            eighths, f"{eighths}/8"
        )
        r = replace(
            judged.recommendation,
            title=f"Use {part} of the present batch or sequence length",
            change=f"{part} of the present batch size times sequence length "
            f"({100 * eighths / 8:g} %); gradient accumulation keeps the effective batch",
        )
        return replace(judged, recommendation=r)


BATCH_SHARES: Final = (7 / 8, 3 / 4, 5 / 8, 1 / 2, 3 / 8, 1 / 4, 1 / 8)
"""Of the present batch: eighths, since batches are powers of two or multiples of eight."""

LONG_TRACE_SHARES: Final = (3 / 4, 1 / 2, 1 / 4)
SHORT_TRACE_OPERATIONS: Final = 300_000
"""Above this each replay takes a noticeable part of a second."""


def _batch_size(case: JudgedCase) -> int | None:
    """Return the batch size that the user gave; None also for one that nothing can make smaller."""
    given = case.context.case.overrides.batch_size
    return None if given == 1 else given


def _missing_text(r: FailedRequest) -> str:
    missing = format_size(r.missing_bytes)
    if r.is_alone_too_large:
        return (
            f"One tensor of {format_size(r.requested_bytes)} is larger than all that PyTorch could "
            "have: its own dimensions must shrink."
        )
    if r.needed_bytes is None:
        return f"{missing} are missing."
    return (
        f"{missing} are missing: at least {format_share(r.missing_bytes, r.needed_bytes)} of the "
        f"{format_size(r.needed_bytes)} needed, more if part of them does not scale with the batch."
    )


def _model_bytes(case: JudgedCase) -> dict[str, int]:
    """Return what the model, its gradients and the optimizer hold at the peak, where known."""
    analysis = case.context.analysis
    if analysis is None or analysis.phases is None:
        return {}
    names = {
        Category.PARAMETERS: "parameters",
        Category.GRADIENTS: "gradients",
        Category.OPTIMIZER_STATE: "optimizer state",
    }
    sums = analysis.phases.at_peak
    return {names[s.category]: s.n_bytes for s in sums if s.category in names and s.n_bytes}


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
        held = _model_bytes(case)
        why = "Lower precision halves weights, gradients and activations alike."
        if is_building:
            why = (
                f"Nothing was freed before the failure: {format_size(r.live_bytes)} are the model "
                "itself."
            )
        elif held:
            parts = ", ".join(f"{name} {format_size(n)}" for name, n in held.items())
            why = (
                f"At the peak the device holds {parts}. Half the precision halves them; shared by "
                "n GPUs (ZeRO, FSDP) each holds an nth."
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
