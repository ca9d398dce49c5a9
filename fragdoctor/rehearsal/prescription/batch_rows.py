"""Whether a loss is a mean over the rows of a batch, so that parts of the batch add up to it.

The operations of a rehearsal are compared with those of one with half the batch: the dimensions
that are smaller there are of rows. A loss is a mean over rows if no operation has rows along two
dimensions, normalizes along rows, or reduces them in another way than by a sum, and if nothing but
sums and factors comes after that. What only looks like more than that is taken for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

Node = Sequence[Any]
"""As ``engine/treatments/dataflow.py`` has it: name, shapes, what it reads, dimensions."""

_ALONG: Final = {"_log_softmax", "_softmax", "cumsum", "flip", "roll", "sort"}
"""What looks along a dimension that it leaves as it is."""
_LINEAR: Final = {"_to_copy", "add", "cat", "clone", "mean", "neg", "rsub", "stack", "sub", "sum"}
_SUMS: Final = {
    "addmm", "binary_cross_entropy", "bmm", "dot", "huber_loss", "mean", "mm", "mse_loss",
    "nll_loss2d_forward", "nll_loss_forward", "smooth_l1_loss", "sum",
}  # fmt: skip
_FACTORS: Final = {"div", "mul"}


def mixing(whole: Sequence[Sequence[Node]], half: Sequence[Sequence[Node]]) -> str:
    """Return why a loss is no mean over rows, "" if each is.

    The losses of both are the nodes that lead to each, itself the last.
    """
    reasons = [_reason(*pair) for pair in zip(whole, half, strict=False)]
    return max(reasons, default="no loss was seen")


def _reason(whole: Sequence[Node], half: Sequence[Node]) -> str:
    if [one[0] for one in whole] != [one[0] for one in half]:
        return "what is computed depends on the size of the batch"
    has_rows: list[bool] = []
    is_sum: list[bool] = []
    for (full_name, shapes, reads, about), (_, fewer, *_) in zip(whole, half, strict=True):
        name = full_name.partition("::")[2].partition(".")[0].removesuffix("_")
        along = [_differing(*pair) for pair in zip(shapes, fewer, strict=False)]
        sums = [n for n in reads if is_sum[n]]
        is_by_row = not reads or _is_by_row(name, len(shapes[0]), along, about)
        if (sums and any(along)) or not is_by_row:
            return f"{full_name} combines rows of the batch"
        is_reduced = not any(along) and any(has_rows[n] for n in reads)
        is_linear = name in _LINEAR or (name in _FACTORS and len(sums) == 1 and shapes == [[]])
        if (is_reduced and (sums or name not in _SUMS)) or (sums and not is_linear):
            return f"{full_name} does more than sum the rows up"
        has_rows.append(any(along))
        is_sum.append(is_reduced or bool(sums))
    return ""


def _differing(shape: Sequence[int], fewer: Sequence[int]) -> list[int]:
    if len(shape) != len(fewer):
        return [*range(len(shape))]
    return [n for n, pair in enumerate(zip(shape, fewer, strict=True)) if pair[0] != pair[1]]


def _is_by_row(name: str, n_dims: int, along: list[list[int]], about: dict[str, Any]) -> bool:
    """Whether an operation computes each row by itself."""
    if any(len(rows) > 1 for rows in along):
        return False
    if "batch_norm" in name:  # an instance norm has the rows among its channels
        return not about.get("training", True) or along[0] != [0]
    dims = about.get("dim", about.get("dims", -1)) if name in _ALONG else []
    dims = dims if isinstance(dims, list) else [dims]
    return {dim % max(n_dims, 1) for dim in dims}.isdisjoint(along[0])
