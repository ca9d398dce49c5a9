"""Arrays as sets of numbers, and sums by group.

These stand in for ``np.unique``, ``np.isin``, ``np.percentile`` and ``np.median``, whose first call
loads ``numpy.ma``: that takes a thirtieth of a short command's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T", bound=np.generic)

MOST: Final = 0.5
"""Share from which on something is said of the whole: that blocks are of one kind, that a cache is
keyed by shape (most sizes differ), or that an evaluation builds a graph (it keeps this share of
what training keeps; under ``no_grad``, evaluations in ``tests/truth`` keep at most 0.13)."""


def distinct(values: npt.NDArray[T]) -> npt.NDArray[T]:
    """Return the distinct values, ascending."""
    ordered = np.sort(values, axis=None)
    is_new = np.ones(len(ordered), np.bool_)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_new]


def is_among(
    values: npt.NDArray[Any], wanted: npt.NDArray[Any] | Sequence[int]
) -> npt.NDArray[np.bool_]:
    """Return for each value whether it is among the wanted ones, whose range may be wide."""
    if not len(wanted):
        return np.zeros(len(values), np.bool_)
    known = np.sort(wanted)
    at = np.minimum(np.searchsorted(known, values), len(known) - 1)
    result: npt.NDArray[np.bool_] = known[at] == values
    return result


def occurrence(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return for each value how many equal values come before it."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)])
    result = np.empty(len(values), np.int64)
    result[order] = np.arange(len(values)) - np.repeat(
        first, np.diff(np.append(first, len(values)))
    )
    return result


class GroupSums(NamedTuple):
    """Bytes and blocks of each group."""

    group: npt.NDArray[np.int64]
    n_bytes: npt.NDArray[np.int64]
    n_blocks: npt.NDArray[np.int64]


def largest_groups(group: npt.NDArray[Any], n_bytes: npt.NDArray[np.int64]) -> GroupSums:
    """Return the bytes of blocks by group (a line, a stack, a category), most bytes first.

    A block with negative bytes was freed, so it is subtracted. Equal sums keep the groups' order.
    """
    order = np.argsort(group, kind="stable")
    ordered, size = group[order].astype(np.int64), n_bytes[order]
    heads = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)])
    sums = np.add.reduceat(size, heads)
    counts = np.add.reduceat(np.where(size < 0, -1, 1), heads)
    largest = np.argsort(-np.abs(sums), kind="stable")
    return GroupSums(ordered[heads][largest], sums[largest], counts[largest])


def sum_by(
    group: npt.NDArray[np.integer[Any]], values: npt.NDArray[np.int64], n: int
) -> npt.NDArray[np.int64]:
    """Return the exact sum of the values in each of the groups 0 to n - 1."""
    total = np.zeros(n, np.int64)
    np.add.at(total, group, values)
    return total


def percentile(values: npt.NDArray[np.int64], percent: float) -> float:
    """Return the percentile of the values, interpolated between the two nearest values."""
    at = percent / 100 * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(values) - 1)
    below, above = np.partition(values, (low, high))[[low, high]].tolist()
    return float(below + (above - below) * (at - low))


def median(values: npt.NDArray[np.number[Any]]) -> float:
    """Return the middle value, or the mean of the two middle values."""
    at = (len(values) - 1) // 2, len(values) // 2
    low, high = np.partition(values, at)[list(at)].tolist()
    return float(low + high) / 2
