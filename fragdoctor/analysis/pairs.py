"""A request for N x N numbers while N numbers are live: each is combined with each."""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from fragdoctor.future.training_edits import rounded_to_blocks
from fragdoctor.model.phases import Category
from fragdoctor.model.snapshot import U8
from fragdoctor.trace.lives import Lives

ITEM_BYTES: Final = (4, 2, 8)
"""Bytes of the floating-point numbers that programs compute with."""

OF_THE_MODEL: Final = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
"""What may be as large as N by chance: the bias of a layer whose weight is N x N."""


class Pairs(Struct, frozen=True):
    """A request for N x N numbers, while N numbers of the same type are live."""

    n: int
    item_bytes: int

    @property
    def n_bytes(self) -> int:
        """The bytes of the request."""
        return self.item_bytes * self.n**2


def find_pairs(lives: Lives, row: int, asked_bytes: int, category: U8) -> Pairs | None:
    """Return what shows that a request combines each of N numbers with each, or None.

    The request and its like must make up most of what is live. Powers of two show nothing: one is
    the square of another in many a model. So may other widths be (6,144 is the side of 4 x 768 x
    768 x 16), which are products of twos and threes: of these, two blocks must be live.

    Args:
        lives: the blocks.
        row: the event that is the request.
        asked_bytes: its size, rounded as blocks are.
        category: the category of each block; empty if none is known.
    """
    rows = lives.allocated_at(row)
    live = lives.requested_bytes[rows]
    like = live[rounded_to_blocks(live) == asked_bytes]
    if 2 * (asked_bytes + like.sum()) <= asked_bytes + live.sum():
        return None
    if len(category):
        rows = rows[~np.isin(category[rows], OF_THE_MODEL)]
    sizes, n_live = np.unique(lives.requested_bytes[rows], return_counts=True)
    for item in ITEM_BYTES:
        n = sizes[sizes % item == 0] // item
        n = n[(n & (n - 1)) != 0]
        found = n[rounded_to_blocks(item * n * n) == asked_bytes]
        for side in found.tolist():
            is_width = pow(6, side.bit_length(), side) == 0
            if not is_width or n_live[sizes == item * side].sum() > 1:
                return Pairs(side, item)
    return None
