"""A matrix of N x N numbers: each of N numbers combined with each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fragdoctor.diagnosis.remedies.capacity import SavingRemedy
from fragdoctor.diagnosis.remedies.remedy import Burden, JudgedCase, Proposal, Weight
from fragdoctor.future.edits import Edit
from fragdoctor.future.training_edits import requests_divided
from fragdoctor.model.diagnosis import MAY_SAVE
from fragdoctor.model.finding import Confidence
from fragdoctor.units import format_count, format_size, plural


class AllPairs(SavingRemedy):
    """A broadcast of (N, 1) with (N), distances or similarities: N x N where N may be meant."""

    code = "all-pairs"
    title = "Combine fewer rows with each other at a time"
    burden = Burden.CHANGE
    doing = "one number a row"
    change = (
        "print the shapes there: (N, 1) with (N) makes N x N, and pred.squeeze(-1) or "
        "target[:, None] makes N; if all pairs are meant, work through a few thousand rows at a "
        "time and keep only the result"
    )
    cost = "None."
    effort = 0

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it if the request that failed is the square of something that is live."""
        pairs = case.pairs
        if pairs is None or case.cause not in MAY_SAVE:
            return
        n = format_count(pairs.n)
        yield self.proposal(
            title=f"Correct the shapes, or work in parts: this request is for {n} x {n} numbers",
            weight=Weight.FITS,
            confidence=Confidence.POSSIBLE,
            why=f"{format_size(pairs.n_bytes)} is {n} x {n} numbers of "
            f"{plural(pairs.item_bytes, 'byte')}, and a tensor of {n} is live.",
            locations=case.asking_stack,
            attempts=self.attempts(case),
        )

    def edits(self, case: JudgedCase) -> Sequence[Edit]:
        """Return the edit that asks for N numbers in place of N x N."""
        pairs = case.pairs
        return [] if pairs is None else [requests_divided(pairs.n_bytes, pairs.n)]
