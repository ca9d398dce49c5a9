"""Kernels that PyTorch composes from other operations, and fused attention.

Attention has random states, float accumulators and workspaces of the backward passes, after
``aten/src/ATen/native/transformers/cuda``: ``flash_attn/flash_api.cpp``, ``attention_backward.cu``
and the tiles of ``mem_eff_attention``; cuDNN's workspace was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import Any, Final

import torch

from fragdoctor.rehearsal.engine import session, values
from fragdoctor.rehearsal.engine.dispatch import of_cpu, special
from fragdoctor.rehearsal.engine.kernels.reduction import summed
from fragdoctor.rehearsal.engine.kernels.scratch import Call, after_results, in_order, n_bytes, rule

FLOAT: Final = 4
RANDOM_STATE: Final = 16
FLASH_ROWS: Final = 128
WIDE_HEAD: Final = 128
TILE: Final = 64
CUDNN_BYTES: Final = 256  # of each plan, besides its tensors; measured on an H200
SPLIT_KEYS, MAX_CUDNN_SPLITS = 128, 32  # measured on an H200, too
LOCK_BYTES: Final = 16  # size of the lock before each accumulated tile
ALIGNED: Final = 4
"""Elements that rows, heads and samples of a mask have to be apart by a multiple of
(``kMinimumAlignment`` in ``mem_eff_attention/gemm_kernel_utils.h``)."""
MAX_SPLITS: Final = 128


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@rule("_scaled_dot_product_cudnn_attention")
def _cudnn(call: Call) -> None:
    """The seed and offset of dropout come first (attention.cu)."""
    if not call.argument("compute_log_sumexp"):
        call.outs[1].n_bytes = 0
    n = len(call.outs)
    call.make(n - 2, n - 1, *range(n - 2))
    if call.args[0].shape[2] == 1:
        _decode(call)
    else:
        call.take(CUDNN_BYTES)
    session.current().libraries["cuDNN"] = 1


def _decode(call: Call) -> None:
    """One query for each head: many keys are split, and the parts are put together."""
    query, key = call.args[:2]
    splits = key.shape[2] // SPLIT_KEYS
    if splits > 1:
        n = min(MAX_CUDNN_SPLITS, 1 << (splits.bit_length() - 1))
        n_sums = n if call.argument("compute_log_sumexp") else 2 * n - 1
        call.take(CUDNN_BYTES + prod(query.shape[:3]) * (n * query.shape[3] + n_sums) * FLOAT)


@after_results("_scaled_dot_product_cudnn_attention_backward")
def _cudnn_backward(call: Call) -> None:
    """The query gradient in float, and the row sums; gradients of each head if heads share keys."""
    gradient, query, key, value = call.args[:4]
    if gradient.stride(-1) != 1:  # MHA.cpp
        call.take(n_bytes(gradient))
    size = prod(query.shape[:-1]) * (query.shape[-1] + 1) * FLOAT + CUDNN_BYTES
    if key.shape[1] != query.shape[1]:
        size += (n_bytes(key) + n_bytes(value)) // key.shape[1] * query.shape[1]
    call.take(size)


@rule("_scaled_dot_product_flash_attention")
def _flash(call: Call) -> None:
    query, key = call.args[:2]
    dropout = call.argument("dropout_p")
    call.make(0, 1)
    if not dropout:
        _split(call, query, key)
    call.make(*range(2, len(call.outs)))
    if dropout:
        call.hold(RANDOM_STATE)


def _split(call: Call, query: torch.Tensor, key: torch.Tensor) -> None:
    """Partial results if few queries meet many keys (``set_params_splitkv``)."""
    batch, heads, length, head = query.shape
    block = 256 if head <= 64 else 128 if head <= 128 else 64
    n = _n_splits(
        batch * heads * -(-length // TILE),
        2 * session.current().facts.n_multiprocessors,
        -(-key.shape[2] // block),
    )
    if n > 1:
        rows_bytes = n * batch * heads * length * FLOAT
        call.take(rows_bytes, rows_bytes * _rounded_head(head))


def _n_splits(n_blocks: int, n_processors: int, n_key_blocks: int) -> int:
    """Return the smallest number of splits that is nearly as efficient as the best one."""
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


def flash_work(query: torch.Tensor, key: torch.Tensor, ends: torch.Tensor | None) -> list[int]:
    """Return what a backward pass needs besides its results, in bytes; the heads are next to last.

    These are the row sums, the query gradient in float, and gradients of each head if heads share
    keys (``mha_bwd``); with ``ends``, sequences are laid end to end (``mha_varlen_bwd``).
    """
    *rows, heads, head = query.shape
    padded = FLASH_ROWS * (ends.shape[0] - 1) if ends is not None else 0
    n_rows = rows[0] + padded if len(rows) == 1 else rows[0] * _up(rows[1], FLASH_ROWS)
    sums_bytes = n_rows * heads * FLOAT
    key_bytes = n_bytes(key) // key.shape[-2] * heads
    of_heads = [key_bytes] * 2 if key.shape[-2] != heads else []
    return [sums_bytes, sums_bytes * _rounded_head(head), *of_heads]


@rule("_scaled_dot_product_flash_attention_backward")
def _flash_backward(call: Call) -> None:
    gradient, query, key, _, out = (one.transpose(1, 2) for one in call.args[:5])
    call.copy(gradient, out)
    call.make_all()
    call.take(*flash_work(query, key, None))


@rule("_flash_attention_backward")
def _packed_backward(call: Call) -> None:
    call.copy(call.args[0])
    call.make_all()
    call.take(*flash_work(call.args[1], call.args[2], call.argument("cum_seq_q")))


@rule("_efficient_attention_forward", "_scaled_dot_product_efficient_attention")
def _efficient(call: Call) -> None:
    query, _, value = call.args[:3]
    call.make(0, 1)
    if query.element_size() < FLOAT and value.shape[-1] > WIDE_HEAD:
        call.take(prod(query.shape[:-1]) * value.shape[-1] * FLOAT)
    for number in range(2, len(call.outs)):  # the random state is kept on the CPU
        call.outs[number].on_cpu = True
        call.make(number)


@rule("_efficient_attention_backward", "_scaled_dot_product_efficient_attention_backward")
def _efficient_backward(call: Call) -> None:
    """The first has the heads last, and may have sequences end to end, as in jagged tensors."""
    gradient, query, key, value, mask, out = call.args[:6]
    if mask is not None:  # PyTorch pads it, but ``save_on_cpu`` gives it back without gaps
        for name, size, stride in zip("BHM", mask.shape, mask.stride(), strict=False):
            if size > 1 and stride % ALIGNED:
                raise RuntimeError(f"attn_bias is not correctly aligned (stride{name}).")
    is_by_head = call.op.overloadpacket.__name__.startswith("_scaled")
    batch, rows, heads, head = (query.transpose(1, 2) if is_by_head else query).shape
    n, length, n_keys = batch, rows, key.shape[2 if is_by_head else 1]
    if (ends := call.argument("cu_seqlens_q")) is not None:
        n = ends.shape[0] - 1
        length, n_keys = call.argument("max_seqlen_q"), call.argument("max_seqlen_k")
    if call.argument("bias_requires_grad") is False:
        call.outs[-1].n_bytes = 0
    if not gradient.is_contiguous() and not gradient.transpose(1, 2).is_contiguous():
        call.take(n_bytes(gradient))
    call.make_all()
    sums_bytes = batch * rows * heads * FLOAT
    if query.element_size() == FLOAT:
        (product,) = call.take(out.numel() * FLOAT)
        by_row = call.take(sums_bytes) if heads > 1 < rows else []
        (sums,) = call.take(sums_bytes)
        call.free(*by_row, product)
    else:
        (sums,) = call.take(sums_bytes)
    widest = max(head, value.shape[-1])
    call.take(_workspace(n * heads, length, n_keys, head, widest, query.element_size()))
    call.free(sums)


def _workspace(n: int, length: int, n_keys: int, head: int, widest: int, item_bytes: int) -> int:
    """Return the size of the query gradient's accumulator: tiles, each preceded by a lock."""
    rows = TILE if widest <= TILE else 2 * TILE
    columns = 2 * TILE if item_bytes < FLOAT and TILE < widest <= WIDE_HEAD else TILE
    tiles = -(-length // rows) * -(-head // columns)
    size = tiles * (rows * columns * FLOAT + LOCK_BYTES)
    if item_bytes < FLOAT and widest > WIDE_HEAD:
        size += 2 * _up(n_keys, rows) * _up(head, TILE) * FLOAT
    return n * size


CHUNK: Final = 65536  # elements per block of a foreach kernel
FAST_NORMS: Final = (1, 2, float("inf"))


@special("aten::equal")
def equal(_op: Any, self: torch.Tensor, other: torch.Tensor) -> bool:
    """``torch.equal``: compare, reduce, read (Equal.cpp); the same memory is not looked at."""
    if self.shape != other.shape:
        return False
    if self.data_ptr() == other.data_ptr() and self.stride() == other.stride():
        return True
    same = self == other
    result = same.all()
    known = session.current().known
    found, expected = known.of(result), known.of(other)
    del result, same
    if found is None and expected is not None and not self.dim():
        # A number is compared with a constant (``is_scalar_tensor_true``): it is read.
        return bool(values.stand_in(self.dtype) == expected)
    return _is_equal(found)


@special("aten::allclose")
def allclose(_op: Any, self: torch.Tensor, other: torch.Tensor, *how: Any, **also: Any) -> bool:
    """``torch.allclose``, by which PyTorch's own formulas for gradients check values, too."""
    result = torch.isclose(self, other, *how, **also).all()
    return _is_equal(session.current().known.of(result))


def _is_equal(found: torch.Tensor | None) -> bool:
    """Return what a comparison found; what is compared is equal if its values are unknown."""
    if found is None:
        values.assume("equal", "both are equal")
    return found is None or bool(found)


@special("aten::count_nonzero.dim_IntList")
def count_nonzero(_op: Any, self: torch.Tensor, dim: Sequence[int]) -> torch.Tensor:
    """``count_nonzero`` (ReduceOps.cpp)."""
    is_counted = self if self.dtype is torch.bool else self != 0
    result: torch.Tensor = is_counted.sum(tuple(dim))
    return result


@special("aten::multinomial")
def multinomial(
    op: Any, self: torch.Tensor, num_samples: int, replacement: bool = False, **how: Any
) -> torch.Tensor:
    """``multinomial`` by exponential clocks, composed as on the CPU, or by a prefix sum."""
    if num_samples == 1 or not replacement:
        return of_cpu("CPU", op, self, num_samples, replacement, **how)  # type: ignore[no-any-return]
    result = self.new_empty((*self.shape[:-1], num_samples), dtype=torch.int64)
    held = [torch.empty_like(self) for _ in range(3)]  # MultinomialKernel.cu
    if self.numel() == self.shape[-1]:
        torch.cumsum(held[2].view(-1), 0, out=held[1].view(-1))
    del held
    return result


COPY_BYTES: Final = 2048
"""What one block of threads copies of a tensor's part, for parts put together or separated."""


def _take_lists(call: Call, parts: Sequence[int], n_lists: int, n_more: int) -> None:
    """Which block copies what: lists of 8-byte numbers by block and by part (TensorShape.cu)."""
    n_blocks = sum(-(-part // COPY_BYTES) for part in parts)
    call.take(8 * (n_blocks + n_lists * len(parts) + n_more))


@after_results("_chunk_cat")
def _chunk_cat(call: Call) -> None:
    """How FSDP packs the gradients of a group of parameters."""
    tensors, dim, n_chunks = (call.argument(name) for name in ("tensors", "dim", "num_chunks"))
    kinds = {(t.dtype, call.out_dtype) for t in tensors}
    is_plain = all(kind == (kind[1], kind[1]) for kind in kinds)
    if all(t.is_contiguous() for t in tensors) and (is_plain or kinds == _WIDENED):
        item = call.out_dtype.itemsize
        parts = [-(-t.shape[dim] // n_chunks) * prod(t.shape[dim + 1 :]) * item for t in tensors]
        _take_lists(call, parts, 6, 2)
    else:
        call.copy(*tensors)


_WIDENED: Final = {(torch.bfloat16, torch.float32)}


@after_results("split_with_sizes_copy")
def _split_with_sizes_copy(call: Call) -> None:
    tensor, sizes = call.args[:2]
    if call.op._overloadname == "out" and tensor.is_contiguous():
        trailing = prod(tensor.shape[(call.argument("dim") or 0) :][1:]) * tensor.element_size()
        _take_lists(call, [size * trailing for size in sizes], 4, 1)


@rule("_foreach_norm", "_foreach_max")
def _foreach_norm(call: Call) -> None:
    """Partial norms of the chunks of all tensors (ForeachReduceOp.cu)."""
    tensors = call.args[0]
    chunks = max((-(-t.numel() // CHUNK) for t in tensors), default=0)
    kinds = {t.dtype for t in tensors}
    is_max = call.op.overloadpacket.__name__ == "_foreach_max"
    if len(kinds) != 1 or not (is_max or call.argument("ord") in FAST_NORMS):
        call.make_all()
        return
    item = max(t.element_size() for t in tensors)
    parts = call.take(len(tensors) * chunks * (item if is_max or item == 8 else 4))
    call.make_all()
    call.free(*parts)


# The workspace is requested first (RNN.cu).
in_order("_thnn_fused_gru_cell", order=(1, 0))
in_order("_thnn_fused_lstm_cell", order=(2, 0, 1))


@rule("_thnn_fused_gru_cell_backward")
def _gru_cell_backward(call: Call) -> None:
    """The gradients of the biases are sums of those of the gates (RNN.cu)."""
    gates = [out for out in call.outs if len(out.shape) > 1]
    call.make(*range(len(gates)))
    gates_like = torch.empty(gates[0].shape, dtype=gates[0].dtype, device="meta")
    for i in range(len(gates), len(call.outs)):
        call.make(i)
        summed(call, gates_like, (0,))


@special("aten::_use_cudnn_ctc_loss", "aten::_use_miopen_ctc_loss")
def use_cudnn_ctc_loss(_op: Any, *_: Any, **__: Any) -> bool:
    """Return False: PyTorch's own kernel serves every case, cuDNN's only a few."""
    return False


@rule("_ctc_loss")
def _ctc_loss(call: Call) -> None:
    """Lengths and offsets are copied to the GPU (LossCTC.cu)."""
    n = call.args[0].shape[1]
    call.take(n * 8, n * 8, n * 8)
    call.make(1, 0)


@rule("_ctc_loss_backward")
def _ctc_loss_backward(call: Call) -> None:
    n = call.args[1].shape[1]
    call.take(n * 8, n * 8, n * 8, n_bytes(call.args[6]))
    call.make(0)
