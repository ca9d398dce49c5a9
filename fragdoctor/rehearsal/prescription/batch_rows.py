"""Whether a loss is a mean or a sum over the rows of a batch, so that its parts add up to it.

The operations of a rehearsal are compared with those of one with a part of the batch: dimensions
that are smaller there, in proportion, are rows. A loss adds up if no operation has rows along two
dimensions, looks along rows, combines rows that are in different orders, or reduces them in any way
but an equally weighted sum or mean, and if only sums and factors follow. If it is unclear, the loss
is taken not to add up. The ratio of a part's loss to the whole loss, if all rows are equal, tells a
mean from a sum: it is 1 for a mean, and the share of the rows for a sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

Node = Sequence[Any]
"""A node as in ``engine/treatments/dataflow.py``: name, shapes, what it reads, dimensions."""

_ALONG: Final = {
    "_log_softmax", "_softmax", "cummax", "cummin", "cumprod", "cumsum", "flip", "logcumsumexp",
    "roll", "sort", "topk",
}  # fmt: skip
"""Operations that look along a dimension, and keep it."""
_LINEAR: Final = {"_to_copy", "add", "cat", "clone", "mean", "neg", "rsub", "stack", "sub", "sum"}
_SUMS: Final = {
    "addmm", "binary_cross_entropy", "bmm", "dot", "huber_loss", "mean", "mm", "mse_loss",
    "nll_loss2d_forward", "nll_loss_forward", "smooth_l1_loss", "sum",
}  # fmt: skip
_FACTORS: Final = {"div", "mul"}
_EMPTY: Final = ("aten::empty", "aten::resize_")
"""Operations that create memory for results."""
_MEAN: Final = 1
"""``at::Reduction`` of a mean; 2 is a sum."""
_UNEQUAL: Final = "the loss is neither a sum nor a mean over the rows of a batch"

Order = tuple[str, ...] | None
"""By what the rows of a result were moved, one after the other; None = they are all equal."""


class _MixesError(Exception):
    """The parts of a batch do not add up; the message says why."""


def mixing(
    whole: Sequence[Sequence[Node]], part: Sequence[Sequence[Node]], n: int
) -> tuple[str, bool]:
    """Return why an n-th of the rows does not give an n-th of the loss, or ""; and if it is a sum.

    The losses of both rehearsals are given as the nodes that lead to each, the loss itself last.
    """
    try:
        scales = [_scale(*pair, 1 / n) for pair in zip(whole, part, strict=False)]
    except _MixesError as err:
        return str(err), False
    if not scales:
        return "no loss was seen", False
    is_sum = all(math.isclose(one, 1 / n) for one in scales)
    is_mean = all(math.isclose(one, 1.0) for one in scales)
    return "" if is_sum or is_mean else _UNEQUAL, is_sum


def _scale(whole: Sequence[Node], part: Sequence[Node], share: float) -> float:
    """Return the ratio of a part's loss to the whole loss, if all rows are equal."""
    if [one[0] for one in whole] != [one[0] for one in part]:
        raise _MixesError("what is computed depends on the size of the batch")
    has_rows: list[bool] = []
    is_sum: list[bool] = []
    orders: list[Order] = []
    scales: list[float] = []
    for (full_name, shapes, read, about), (_, fewer, _, other) in zip(whole, part, strict=True):
        reads = [] if full_name.startswith(_EMPTY) else read  # what was there does not matter
        name = full_name.partition("::")[2].partition(".")[0].removesuffix("_")
        ratio = 0.0  # of the numbers by which both are multiplied or divided, if they are known
        if name in _FACTORS and about.get("other") and other.get("other"):
            ratio = other["other"] / about["other"]
            reads = reads[:1]  # such a number may be a count of rows
        along = [_differing(*pair, share) for pair in zip(shapes, fewer, strict=False)]
        sums = [n for n in reads if is_sum[n]]
        rows = _differing(about["of"], other["of"], share) if "of" in about else []
        moves = {at: by for dim, by, at in about.get("moves", ()) if dim in rows}
        is_by_row = not reads or _is_by_row(name, len(shapes[0]), along, about)
        if (sums and any(along)) or not is_by_row:
            raise _MixesError(f"{full_name} combines rows of the batch")
        order = _order(full_name, [orders[n] if has_rows[n] else None for n in reads], moves)
        is_reduced = not any(along) and any(has_rows[n] for n in reads)
        is_linear = name in _LINEAR or (name in _FACTORS and len(sums) == 1 and shapes == [[]])
        if (is_reduced and (sums or name not in _SUMS)) or (sums and not is_linear):
            raise _MixesError(f"{full_name} does more than sum the rows up")
        valued = [n for n in reads if not whole[n][0].startswith(_EMPTY)]
        counted = valued if name in _LINEAR else [n for n in valued if is_sum[n] or has_rows[n]]
        scale = _among(name, [scales[n] for n in counted])
        if is_reduced and about.get("reduction") != _MEAN and name != "mean":
            scale *= share
        elif is_reduced and about.get("is_weighted"):
            raise _MixesError(f"{full_name} weighs the rows of the batch by their labels")
        if ratio:
            scale = scale * ratio if name == "mul" else scale / ratio
        has_rows.append(any(along))
        orders.append(order)
        is_sum.append(is_reduced or bool(sums))
        scales.append(scale)
    return scales[-1] if is_sum and is_sum[-1] else 1.0


def _among(name: str, scales: Sequence[float]) -> float:
    """Return the scale of an operation's result, from those of its inputs."""
    scale = scales[0] if scales else 1.0
    is_linear = name in _LINEAR or (name in _FACTORS and len(scales) == 1)
    is_one = all(math.isclose(one, scale if is_linear else 1.0) for one in scales)
    if not is_one:
        raise _MixesError(_UNEQUAL)
    return scale


def _differing(shape: Sequence[int], fewer: Sequence[int], share: float) -> list[int]:
    if len(shape) != len(fewer):
        return [*range(len(shape))]
    pairs = zip(shape, fewer, strict=True)
    along = {n: less / size for n, (size, less) in enumerate(pairs) if size != less}
    if not all(math.isclose(one, share) for one in along.values()):
        raise _MixesError("what is computed is not in proportion to the size of the batch")
    return [*along]


def _order(name: str, orders: Sequence[Order], moves: dict[int, str]) -> Order:
    """Return the order of an operation's rows, from those of its inputs and what moves the first.

    Indices that move rows have no order themselves, and neither have constants.
    """
    if not all(moves.values()):
        raise _MixesError(f"{name} chooses rows of the batch by their values")
    if moves:
        orders = [(*(orders[0] or ()), *moves.values()), *orders[1:]]
    found = {one for n, one in enumerate(orders) if one is not None and n not in moves}
    if len(found) > 1:
        raise _MixesError(f"{name} combines rows of the batch that are in different orders")
    is_constant = name.startswith(_EMPTY) or "::fill_" in name or "::zero_" in name
    return found.pop() if found else None if is_constant else ()


def _is_by_row(name: str, n_dims: int, along: list[list[int]], about: dict[str, Any]) -> bool:
    """Return whether an operation computes each row independently."""
    if any(len(rows) > 1 for rows in along):
        return False
    if "batch_norm" in name:  # an instance norm treats rows as channels
        return not about.get("training", True) or along[0] != [0]
    if "attention" in name or "convolution" in name:  # they look along all the other dimensions
        return all(dim < 2 for dim in along[0])
    dims = about.get("dim", about.get("dims", -1)) if name in _ALONG else []
    dims = dims if isinstance(dims, list) else [dims]
    dims = dims or range(n_dims if name == "roll" else 0)  # all elements are rolled
    return {dim % max(n_dims, 1) for dim in dims}.isdisjoint(along[0])
