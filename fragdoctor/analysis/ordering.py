"""Sorting a million rows quickly."""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor.model.snapshot import I64

_DIGIT_BITS: Final = 16
_SMALL: Final = 4096


def stable_order(values: I64) -> I64:
    """Return the stable ascending order of non-negative integers, as ``argsort`` gives it.

    numpy sorts 16-bit integers by radix, in linear time, and 64-bit ones by comparing. Addresses
    of a device span little more than 2**36 in steps of 512, so two passes over 16-bit digits
    order them several times faster.
    """
    if len(values) < _SMALL:
        return np.argsort(values, kind="stable")
    low = int(values.min())
    offset = (values - low).view(np.uint64)
    used = int(np.bitwise_or.reduce(offset))
    if used == 0:
        return np.arange(len(values))
    shift = (used & -used).bit_length() - 1
    order: I64 | None = None
    while used >> shift:
        digit = (offset >> np.uint64(shift)).astype(np.uint16)
        if order is None:
            order = np.argsort(digit, kind="stable")
        else:
            order = order[np.argsort(digit[order], kind="stable")]
        shift += _DIGIT_BITS
    return np.arange(len(values)) if order is None else order
