"""Fused attention: random states, accumulators in float, and workspaces of the backward passes.

After ``aten/src/ATen/native/transformers/cuda``: ``flash_attn/flash_api.cpp``,
``attention_backward.cu`` and the tiles of ``mem_eff_attention``; cuDNN's workspace was read off.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, prod
from typing import Final

import torch

from fragdoctor.rehearse.engine import session
from fragdoctor.rehearse.engine.kernels.steps import Call, Free, Out, Step, Temp, n_bytes, rule

FLOAT: Final = 4
RANDOM_STATE: Final = 16
FLASH_ROWS: Final = 128
WIDE_HEAD: Final = 128
TILE: Final = 64
LOCK_BYTES: Final = 16  # what stands before each accumulated tile
MAX_SPLITS: Final = 128


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@rule("_scaled_dot_product_cudnn_attention")
def _cudnn(call: Call) -> Iterable[Step]:
    """Seed and offset of dropout come first (attention.cu)."""
    if not call.argument(4, "compute_log_sumexp", False):
        call.outs[1].n_bytes = 0
    n = len(call.outs)
    first, last = ([Out(i) for i in range(n - 2, n)], [Out(i) for i in range(n - 2)])
    yield from [*first, *last]


@rule("_scaled_dot_product_cudnn_attention_backward")
def _cudnn_backward(call: Call) -> Iterable[Step]:
    """The gradient of the queries in float, and the row sums."""
    yield from call.results
    query: torch.Tensor = call.args[1]
    yield Temp(prod(query.shape[:-1]) * (query.shape[-1] + 1) * FLOAT)


@rule("_scaled_dot_product_flash_attention")
def _flash(call: Call) -> Iterable[Step]:
    query, key = call.args[:2]
    dropout = call.argument(3, "dropout_p", 0.0)
    yield from (Out(0), Out(1))
    if not dropout:
        yield from _splits(query, key)
    yield from (Out(i) for i in range(2, len(call.outs)))
    if dropout:
        state = Temp(RANDOM_STATE)
        yield from (state, Free(state))


def _splits(query: torch.Tensor, key: torch.Tensor) -> Iterable[Step]:
    """Partial results where few queries meet many keys (``set_params_splitkv``)."""
    batch, heads, length, head = query.shape
    block = 256 if head <= 64 else 128 if head <= 128 else 64
    n = _n_splits(
        batch * heads * -(-length // TILE),
        2 * session.current().facts.n_multiprocessors,
        -(-key.shape[2] // block),
    )
    if n > 1:
        yield Temp(n * batch * heads * length * FLOAT)
        yield Temp(n * batch * heads * length * _rounded_head(head) * FLOAT)


def _n_splits(n_blocks: int, n_processors: int, n_key_blocks: int) -> int:
    """Return the least number of splits that is nearly as efficient as the best."""
    if n_blocks >= 0.8 * n_processors:
        return 1
    efficiency = {}
    for n in range(1, min(MAX_SPLITS, n_processors, n_key_blocks) + 1):
        if n == 1 or -(-n_key_blocks // n) != -(-n_key_blocks // (n - 1)):
            waves = n_blocks * n / n_processors
            efficiency[n] = waves / ceil(waves)
    best = max(efficiency.values(), default=0.0)
    return next((n for n, found in efficiency.items() if found >= 0.85 * best), 1)


def _rounded_head(head: int) -> int:
    return _up(head, 32) if head <= 192 else 256


@rule("_scaled_dot_product_flash_attention_backward")
def _flash_backward(call: Call) -> Iterable[Step]:
    gradient, query, key, _, out = call.args[:5]
    for tensor in (gradient, out):
        if not tensor.transpose(1, 2).is_contiguous():
            yield Temp(n_bytes(tensor))
    yield from call.results
    batch, heads, length, head = query.shape
    rows = batch * heads * _up(length, FLASH_ROWS)
    yield Temp(rows * FLOAT)
    yield Temp(rows * _rounded_head(head) * FLOAT)
    if key.shape[1] != heads:
        size = batch * key.shape[2] * heads * head * query.element_size()
        yield from (Temp(size), Temp(size))


@rule("_scaled_dot_product_efficient_attention")
def _efficient(call: Call) -> Iterable[Step]:
    query, _, value = call.args[:3]
    yield from (Out(0), Out(1))
    if query.element_size() < FLOAT and value.shape[-1] > WIDE_HEAD:
        yield Temp(prod(query.shape[:-1]) * value.shape[-1] * FLOAT)
    for number in range(2, len(call.outs)):  # the random state is kept on the CPU
        call.outs[number].on_cpu = True
        yield Out(number)


@rule("_scaled_dot_product_efficient_attention_backward")
def _efficient_backward(call: Call) -> Iterable[Step]:
    gradient, query, key, value, _, out = call.args[:6]
    batch, heads, length, head = query.shape
    if not gradient.is_contiguous() and not gradient.transpose(1, 2).is_contiguous():
        yield Temp(n_bytes(gradient))
    yield from call.results
    sums = Temp(batch * heads * length * FLOAT)
    if query.element_size() == FLOAT:
        product = Temp(out.numel() * FLOAT)
        yield product
        if heads > 1 < length:
            by_row = Temp(sums.n_bytes)
            yield from (by_row, sums, Free(by_row))
        else:
            yield sums
        yield Free(product)
    else:
        yield sums
    widest = max(head, value.shape[-1])
    work = Temp(_workspace(batch * heads, length, key.shape[2], head, widest, query.element_size()))
    yield from (work, Free(sums))


def _workspace(n: int, length: int, n_keys: int, head: int, widest: int, item_bytes: int) -> int:
    """Return the accumulator of the queries' gradient: tiles, each after a lock."""
    rows = TILE if widest <= TILE else 2 * TILE
    columns = 2 * TILE if item_bytes < FLOAT and TILE < widest <= WIDE_HEAD else TILE
    tiles = -(-length // rows) * -(-head // columns)
    size = tiles * (rows * columns * FLOAT + LOCK_BYTES)
    if item_bytes < FLOAT and widest > WIDE_HEAD:
        size += 2 * _up(n_keys, rows) * _up(head, TILE) * FLOAT
    return n * size
