"""Reductions: partial results of several thread blocks, and copies in the dtype that is summed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from fragdoctor.rehearse.engine import session
from fragdoctor.rehearse.engine.kernels.reduction import Kind, reduction_bytes
from fragdoctor.rehearse.engine.kernels.steps import Call, Step, Temp, held_only, rule

_LOW: Final = (torch.float16, torch.bfloat16)
WELFORD_FLOAT, WELFORD_DOUBLE = 16, 32
INDEXED: Final = 16  # a value and where it was found


def buffers_of(tensor: torch.Tensor, axes: Sequence[int] | None, kind: Kind) -> list[Step]:
    """Return the buffers of a reduction of a tensor over some of its dimensions; None = all."""
    n_dims = tensor.dim()
    if axes is None or not len(axes):
        axes = range(n_dims)
    wrapped = tuple(axis % max(1, n_dims) for axis in axes) if n_dims else ()
    passes = reduction_bytes(
        tensor.shape, tensor.stride(), wrapped, kind, tensor.element_size(),
        session.current().facts.n_multiprocessors,
    )  # fmt: skip
    return [step for pair in passes for step in held_only(*pair)]


def _accumulator_bytes(dtype: torch.dtype) -> int:
    if dtype in _LOW:
        return 4
    if dtype.is_floating_point or dtype.is_complex:
        return dtype.itemsize
    return 8


def _axes(call: Call, number: int = 1) -> Any:
    axes = call.argument(number, "dim")
    return (axes,) if isinstance(axes, int) and not isinstance(axes, bool) else axes


def _dims_given(call: Call) -> bool:
    return any(a.name == "dim" for a in call.op._schema.arguments)


@rule("sum", "nansum", "mean", "prod")
def _sum(call: Call) -> Iterable[Step]:
    """``sum_out``: what has another dtype than the sum is copied first (ReduceOpsUtils.h)."""
    yield from call.results
    tensor: torch.Tensor = call.args[0]
    out = call.out_dtype
    kept_low = tensor.dtype in _LOW and out is torch.float32
    if tensor.dtype is not out and not kept_low:
        yield Temp(tensor.numel() * out.itemsize)
        tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=out, device="meta")
    axes = _axes(call) if _dims_given(call) else None
    yield from buffers_of(tensor, axes, Kind(_accumulator_bytes(tensor.dtype)))


@rule("amax", "amin")
def _extreme(call: Call) -> Iterable[Step]:
    yield from call.results
    tensor = call.args[0]
    yield from buffers_of(tensor, _axes(call), Kind(tensor.element_size()))


@rule("max", "min")
def _extreme_or_indexed(call: Call) -> Iterable[Step]:
    yield from call.results
    tensor = call.args[0]
    if _dims_given(call):
        yield from buffers_of(tensor, _axes(call), Kind(INDEXED))
    else:
        yield from buffers_of(tensor, None, Kind(tensor.element_size()))


@rule("argmax", "argmin")
def _arg(call: Call) -> Iterable[Step]:
    yield from call.results
    yield from buffers_of(call.args[0], _axes(call), Kind(INDEXED))


@rule("aminmax")
def _aminmax(call: Call) -> Iterable[Step]:
    yield from call.results
    tensor = call.args[0]
    yield from buffers_of(tensor, _axes(call), Kind(2 * tensor.element_size()))


@rule("any", "all")
def _any(call: Call) -> Iterable[Step]:
    yield from call.results
    axes = _axes(call) if _dims_given(call) else None
    yield from buffers_of(call.args[0], axes, Kind(1))


@rule("var", "std", "var_mean", "std_mean")
def _variance(call: Call) -> Iterable[Step]:
    yield from call.results
    tensor = call.args[0]
    size = WELFORD_DOUBLE if tensor.dtype is torch.float64 else WELFORD_FLOAT
    axes = _axes(call) if _dims_given(call) else None
    yield from buffers_of(tensor, axes, Kind(size, values=2 if tensor.element_size() == 2 else 4))


@rule("linalg_vector_norm")
def _norm(call: Call) -> Iterable[Step]:
    yield from call.results
    tensor = call.args[0]
    yield from buffers_of(tensor, _axes(call, 2), Kind(8 if tensor.dtype is torch.float64 else 4))


@rule("norm")
def _old_norm(call: Call) -> Iterable[Step]:
    yield from call.results
    tensor = call.args[0]
    axes = _axes(call, 2) if _dims_given(call) else None
    yield from buffers_of(tensor, axes, Kind(_accumulator_bytes(tensor.dtype)))


def copy_and_sum(tensor: torch.Tensor, axes: Sequence[int]) -> list[Step]:
    """Return the buffers of summing a tensor, for kernels that sum as a part of their work."""
    return buffers_of(tensor, axes, Kind(_accumulator_bytes(tensor.dtype)))


def whole(tensor: torch.Tensor) -> list[Step]:
    """Return the buffers of summing all of a tensor."""
    return buffers_of(tensor, None, Kind(_accumulator_bytes(tensor.dtype)))
