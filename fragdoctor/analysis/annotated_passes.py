"""What each block is for where no stacks were recorded, by the optimizer steps around its life."""

from __future__ import annotations

import numpy as np

from fragdoctor.analysis.categories import LIKELY, POSSIBLE, Categories
from fragdoctor.model.phases import Category, TrainingPhase
from fragdoctor.model.snapshot import I64, U8, Bools
from fragdoctor.trace.lives import BEFORE, NEVER, Lives, Totals
from fragdoctor.trace.passes import Passes


def sort_by_lifetime(lives: Lives, passes: Passes, totals: Totals) -> Categories:
    """Return the category of every block as far as its birth and death between steps tell.

    Args:
        lives: of the blocks of the device.
        passes: as of ``annotated_passes``.
        totals: of the device.
    """
    of_row, n = passes.of_rows(), len(passes)
    is_old, is_alive = lives.start == BEFORE, lives.free == NEVER
    last_row = len(of_row) - 1
    born = of_row[np.clip(lives.start, 0, last_row)].astype(np.int64)
    died = of_row[np.clip(lives.free, 0, last_row)].astype(np.int64)
    died[is_alive] = n
    label = passes.label[born]
    category = np.full(len(lives), Category.UNKNOWN, np.uint8)
    sureness = np.full(len(lives), POSSIBLE, np.uint8)

    def put(rows: Bools, what: int, how_sure: int = POSSIBLE) -> None:
        category[rows] = what
        sureness[rows] = how_sure

    in_step = (label == TrainingPhase.OPTIMIZER) & ~is_old
    put(in_step & (died == born), Category.TEMPORARIES, LIKELY)
    is_cut = passes.is_cut & (born == n - 1)
    put(in_step & (died > born + 1) & ~is_cut, Category.OPTIMIZER_STATE, LIKELY)
    between = (label == TrainingPhase.FORWARD_BACKWARD) & ~is_old
    top = _tops(passes, totals.allocated_bytes)[born]
    within = between & (died == born)
    put(within, Category.TEMPORARIES)
    put(within & (lives.start < top) & (lives.free >= top), Category.ACTIVATIONS)
    gradients = between & (died == born + 1) & ~is_alive
    put(gradients, Category.GRADIENTS)
    if gradients.any():  # else nothing tells parameters from what else is kept
        put(between & (died > born + 2) & (born + 2 < n), Category.KEPT)
    first = between & (born == 0) & is_alive
    _match_parameters(lives, category, gradients, (first | is_old) & is_alive)
    return Categories(category, sureness)


def _tops(passes: Passes, allocated: I64) -> I64:
    """Return the row at which each pass has most allocated."""
    peaks = np.maximum.reduceat(allocated[1:], passes.first[:-1])
    is_top = allocated[1:] == np.repeat(peaks, np.diff(passes.first))
    rows = np.flatnonzero(is_top)
    return rows[np.searchsorted(rows, passes.first[:-1])]


def _match_parameters(lives: Lives, category: U8, gradients: Bools, candidates: Bools) -> None:
    """Call what was there first and has a gradient of its size a parameter, the oldest first."""
    rows = np.flatnonzero(gradients)
    if not len(rows):
        return
    sizes, wanted = _one_step(lives, rows)
    old = np.flatnonzero(candidates & np.isin(lives.requested_bytes, sizes))
    old = old[np.lexsort((lives.start[old], lives.requested_bytes[old]))]
    at = np.searchsorted(sizes, lives.requested_bytes[old])
    have = np.bincount(at, minlength=len(sizes))
    rank = np.arange(len(old)) - np.append(0, np.cumsum(have))[at]
    category[old[rank < wanted[at]]] = Category.PARAMETERS


def _one_step(lives: Lives, rows: I64) -> tuple[I64, I64]:
    """Return the sizes of a step's gradients and how many live at once."""
    sizes, at = np.unique(lives.requested_bytes[rows], return_inverse=True)
    at = at.reshape(-1)
    # Highest number of a size alive together, by a sweep over births and deaths.
    when = np.concatenate([lives.start[rows], lives.free[rows]])
    what = np.concatenate([at, at])
    change = np.concatenate([np.ones(len(rows), np.int64), np.full(len(rows), -1)])
    order = np.lexsort((when, what))
    level = np.cumsum(change[order])
    # Each size begins and ends at zero, so its own maximum is that of its stretch.
    heads = np.searchsorted(what[order], np.arange(len(sizes)))
    return sizes, np.maximum.reduceat(level, heads)
