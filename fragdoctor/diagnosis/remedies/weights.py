"""Remedies for weights that are held twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Final

import numpy as np

from fragdoctor.analysis.weight_copies import WeightCopies, find_weight_copies
from fragdoctor.diagnosis.remedies.capacity import SHORT_OF_MEMORY, SavingRemedy
from fragdoctor.diagnosis.remedies.remedy import (
    CURES,
    HELPS,
    Burden,
    JudgedCase,
    Proposal,
)
from fragdoctor.future.edits import Edit
from fragdoctor.future.training_edits import requests_freed_at, requests_removed
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence, Evidence
from fragdoctor.model.snapshot import I64
from fragdoctor.rules.request_sources import matching_oom
from fragdoctor.rules.rule import line_text
from fragdoctor.units import format_size

MIN_SHARE: Final = 0.05
"""Of live memory; smaller copies are not why a device is full."""

CAUSES: Final = (*SHORT_OF_MEMORY, Cause.FRAGMENTATION, Cause.LEAK)


class WeightsOnce(SavingRemedy):
    """A copy of the weights on the host, or an old model dropped before the next is built."""

    code: ClassVar[str] = "weights-once"
    title: ClassVar[str] = "Hold the weights once"
    burden: ClassVar[Burden] = Burden.NONE
    doing: ClassVar[str] = "the weights held once"
    change: ClassVar[str] = (
        "a checkpoint: torch.load(path, map_location='cpu'), and del it after load_state_dict(); a "
        "moving average, a best state or a frozen copy: keep it on the host (copy.deepcopy(model)"
        ".cpu()), or del it when it is not needed"
    )
    cost: ClassVar[str] = "A copy over the bus whenever it is brought up to date."
    effort: ClassVar[int] = 1

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it where blocks of the same sizes as the weights are live beside them."""
        copies = copies_of(case)
        if copies is None or case.cause not in CAUSES or not case.is_allocator_case:
            return
        stack = case.context.python_stack(copies.stack)
        where = line_text(stack[0] if stack else None)
        held = format_size(copies.n_bytes)
        change, why = self.change, f"{held} of weights were made at {where}, as large as the model."
        title, cost = f"Hold the weights once: {where} made a copy", self.cost
        if copies.freed_row is not None:
            title = f"Drop the old model before {where} builds the next"
            change = (
                "del model, optimizer before the next is built, and keep no reference to them: "
                "lists of results, closures, an exception's traceback; keep figures, or "
                "model.cpu()"
            )
            why = (
                f"{held} are left of models that {where} built before, "
                f"{format_size(copies.weight_bytes)} of it weights."
            )
            cost = "None, if the old model is not used any more."
        elif any(
            f.filename.endswith("torch/serialization.py") for f in case.context.stack(copies.stack)
        ):
            title = f"Load the checkpoint of {where} on the CPU"
            cost = "None."
        yield self.proposal(
            title=title,
            weight=CURES - 1 if case.cause is Cause.LEAK else HELPS + 25,
            confidence=Confidence.LIKELY,
            change=change,
            why=why,
            cost=cost,
            locations=stack,
            verify="memory_allocated() before the first step falls by that much.",
            evidence=(Evidence("held twice", copies.n_bytes, "bytes", "trace"),),
        )

    def edits(self, case: JudgedCase) -> Sequence[Edit]:
        """Return the run without the copy, or with the old model freed when the next is built."""
        copies, analysis = copies_of(case), case.context.analysis
        if copies is None or analysis is None:
            return ()
        rows: I64 = analysis.trace.lives.start[copies.rows].astype(np.int64)
        if rows.min() < 0:
            return ()  # older than the trace
        if copies.freed_row is None:
            return (requests_removed(rows),)
        return (requests_freed_at(rows, copies.freed_row),)


def copies_of(case: JudgedCase) -> WeightCopies | None:
    """Return the weights held twice when the request failed, else at the peak."""
    analysis = case.context.analysis
    if analysis is None or analysis.timeline is None:
        return None
    event = matching_oom(analysis, case.message)
    trace = analysis.trace
    state = analysis.timeline.peak_allocated_state
    if event is not None:
        state = event.row - trace.first_row
    found = find_weight_copies(trace, analysis.phases, state)
    live = int(analysis.timeline.allocated_bytes[state])
    return found if found is not None and found.n_bytes >= MIN_SHARE * live else None
