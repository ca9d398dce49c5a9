"""Remedies for weights that are held twice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from fragdoctor.analysis.weight_copies import WeightCopies
from fragdoctor.diagnosis.remedies.capacity import SavingRemedy
from fragdoctor.diagnosis.remedies.remedy import Burden, JudgedCase, Proposal, Weight
from fragdoctor.future.edits import Edit
from fragdoctor.future.training_edits import requests_freed_at, requests_removed
from fragdoctor.model.census import HoldingKind
from fragdoctor.model.diagnosis import SHORT_OF_MEMORY, Cause
from fragdoctor.model.finding import line_text
from fragdoctor.model.snapshot import I64
from fragdoctor.rules.growth.growing_line import holder_of
from fragdoctor.units import format_size

CAUSES: Final = (*SHORT_OF_MEMORY, Cause.FRAGMENTATION, Cause.LEAK)


class CopyOfWeights(SavingRemedy):
    """A copy of the weights that could be on the host."""

    code = "copy-of-weights"
    title = "Keep the copy of the weights on the host"
    doing = "the copy of the weights on the host"
    change = (
        "if it is a moving average, a best state or a reference model, keep it on the CPU "
        "(.cpu()) and update it every few steps, or del it when it is not needed"
    )
    cost = "A copy over the bus at each update."
    caveats: tuple[str, ...] = ("A target network or a teacher that every step runs has to stay.",)
    effort = 1

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it if blocks of the same sizes as the weights are live beside them."""
        if case.cause not in CAUSES:
            return
        copies = case.context.weight_copies
        if copies is None or not self.is_about(case, copies):
            return
        stack = case.context.python_stack(copies.stack)
        title, change = self.said(copies, line_text(stack[0] if stack else None))
        owner = None if copies.freed_row is None else holder_of(case.context, copies.rows)
        if owner is not None and owner.kind is HoldingKind.CONTAINER:
            change = f"take what is no longer used out of {owner.name}; {change}"
        is_cause = case.cause is Cause.LEAK and copies.freed_row is not None
        yield self.proposal(
            title=title,
            weight=Weight.CURES if is_cause else Weight.FITS,
            change=change,
            why=f"{format_size(copies.n_bytes)} is held beside the model.",
            locations=stack,
            attempts=self.attempts(case),
        )

    def is_about(self, case: JudgedCase, copies: WeightCopies) -> bool:
        """Return whether these copies call for this remedy."""
        return copies.freed_row is None and not is_checkpoint(case, copies)

    def said(self, copies: WeightCopies, where: str) -> tuple[str, str]:
        """Return title and change for copies that were made at a place."""
        del copies
        return f"Keep the copy of the weights that {where} made on the host", self.change

    def edits(self, case: JudgedCase) -> Sequence[Edit]:
        """Return the edit without the copy, or with the old model freed before the next."""
        copies, analysis = case.context.weight_copies, case.context.analysis
        if copies is None or analysis is None:
            return ()
        rows: I64 = analysis.trace.lives.start[copies.rows].astype(np.int64)
        if rows.min() < 0:
            return ()  # the copies are older than the trace
        if copies.freed_row is None:
            return (requests_removed(rows),)
        return (requests_freed_at(rows, copies.freed_row),)


class SpareWeights(CopyOfWeights):
    """Weights that are no longer used: a checkpoint after loading, or an earlier model."""

    code = "spare-weights"
    title = "Release weights that are no longer used"
    burden = Burden.NONE
    doing = "spare weights dropped"
    change = (
        "del the old model and its optimizer before the next is built, and keep no reference to "
        "them: a list of results, a closure, the traceback of an exception"
    )
    cost = "None."
    caveats: tuple[str, ...] = ()
    effort = 0

    def is_about(self, case: JudgedCase, copies: WeightCopies) -> bool:
        """Return whether the copies are a checkpoint or an old model."""
        return copies.freed_row is not None or is_checkpoint(case, copies)

    def said(self, copies: WeightCopies, where: str) -> tuple[str, str]:
        """Return title and change for copies that were made at a place."""
        if copies.freed_row is None:
            return f"Load the checkpoint of {where} on the CPU", LOAD
        return f"Drop the old model before {where} builds the next", self.change


def is_checkpoint(case: JudgedCase, copies: WeightCopies) -> bool:
    """Return whether ``torch.load`` or safetensors made the copies."""
    frames = case.context.stack(copies.stack)
    return any(LOADERS.search(f.filename.replace("\\", "/")) for f in frames)


LOAD: Final = "use torch.load(path, map_location='cpu'), and del the result after "
"load_state_dict()"

LOADERS: Final = re.compile(r"/torch/serialization\.py$|/safetensors/torch\.py$")
