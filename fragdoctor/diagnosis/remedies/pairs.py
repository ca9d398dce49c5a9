"""A matrix of N x N numbers: each of N numbers combined with each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from fragdoctor.diagnosis.remedies.capacity import SavingRemedy
from fragdoctor.diagnosis.remedies.remedy import Burden, JudgedCase, Proposal, Weight
from fragdoctor.future.edits import Edit
from fragdoctor.future.training_edits import requests_divided, rounded_to_blocks
from fragdoctor.model.arrays import distinct
from fragdoctor.model.diagnosis import MAY_SAVE
from fragdoctor.model.finding import Confidence
from fragdoctor.model.phases import Category
from fragdoctor.units import format_count, format_size, plural

ITEM_BYTES: Final = (4, 2, 8)
"""Bytes of the floating-point numbers that programs compute with."""

OF_THE_MODEL: Final = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
"""What may be as large as N by chance: the bias of a layer whose weight is N x N."""


class Pairs(Struct, frozen=True):
    """A failed request for N x N numbers, while N numbers of the same type are live."""

    n: int
    item_bytes: int
    n_bytes: int


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
        pairs = pairs_of(case)
        if pairs is None or case.cause not in MAY_SAVE:
            return
        n = format_count(pairs.n)
        yield self.proposal(
            title=f"Correct the shapes, or work in parts: this request is for {n} x {n} numbers",
            weight=Weight.FITS,
            confidence=Confidence.POSSIBLE,
            why=f"{format_size(pairs.n_bytes)} are {n} x {n} numbers of "
            f"{plural(pairs.item_bytes, 'byte')}, and a tensor of {n} is live.",
            locations=case.asking_stack,
            attempts=self.attempts(case),
        )

    def edits(self, case: JudgedCase) -> Sequence[Edit]:
        """Return the edit that asks for N numbers in place of N x N."""
        pairs = pairs_of(case)
        return [] if pairs is None else [requests_divided(pairs.n_bytes, pairs.n)]


def pairs_of(case: JudgedCase) -> Pairs | None:
    """Return what shows that a failed request combines each of N numbers with each, or None.

    The request and its like must make up most of what is live. Powers of two show nothing: one is
    the square of another in many a model.
    """
    event, a = case.asking_event, case.context.analysis
    if event is None or a is None or a.timeline is None:
        return None
    lives, asked = a.trace.lives, event.rounded_bytes
    rows = lives.allocated_at(event.row)
    live = lives.requested_bytes[rows]
    like = live[rounded_to_blocks(live) == asked]
    if 2 * (asked + like.sum()) <= asked + live.sum():
        return None
    if len(a.category):
        rows = rows[~np.isin(a.category[rows], OF_THE_MODEL)]
    sizes = distinct(lives.requested_bytes[rows])
    for item in ITEM_BYTES:
        n = sizes[sizes % item == 0] // item
        n = n[(n & (n - 1)) != 0]
        found = n[rounded_to_blocks(item * n * n) == asked]
        if len(found):
            return Pairs(int(found[0]), item, item * int(found[0]) ** 2)
    return None
