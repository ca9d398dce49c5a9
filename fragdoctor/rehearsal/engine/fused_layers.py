"""Attention, whose kernel depends on the GPU.

PyTorch's C++ code asks the device which fused kernel to use, past the dispatcher. The question is
answered here by PyTorch's own conditions
(``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``); what lies around the kernels, their
backward passes and the unfused form stay PyTorch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Final

import torch

from fragdoctor.rehearsal.engine import put, session, values
from fragdoctor.rehearsal.engine.dispatch import library_for, of_cpu, special
from fragdoctor.rehearsal.engine.kernels.scratch import Call
from fragdoctor.rehearsal.engine.vtables import put_stub

ATEN: Final = torch.ops.aten
_COMPOSITE: Final = torch._C.DispatchKey.CompositeImplicitAutograd
MATH: Final = 0
FLASH: Final = 1
EFFICIENT: Final = 2
CUDNN: Final = 3
AMPERE: Final = (8, 0)
HOPPER: Final = (9, 0)
MULTIPLE: Final = 8  # flash attention pads a head's size to a multiple of it
MAX_FLASH_HEAD: Final = 256
MAX_CUDNN_HEAD: Final = 128
WIDEST_CUDNN_HEAD: Final = 256  # since cuDNN 9.10, in PyTorch 2.8, on Hopper; 2.12 on Blackwell
MAX_CUDNN_SIZE: Final = 65535
DIMENSIONS: Final = 4
_HALF: Final = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class LayerQuestion:
    """The inputs to the choice of a kernel: PyTorch's arguments, the GPU, and the version."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    _: KW_ONLY
    scale: float | None = None
    enable_gqa: bool = False
    capability: tuple[int, int]
    version: tuple[int, int, int]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def needs_gradient(self) -> bool:
        """Whether the results are needed for a backward pass."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)

    @property
    def is_half(self) -> bool:
        """Whether all tensors have one half-precision dtype that the GPU supports."""
        kinds = _HALF if self.capability >= AMPERE else _HALF[:1]
        return self.query.dtype in kinds and len({t.dtype for t in self.tensors}) == 1


def _is_dense(ask: LayerQuestion) -> bool:
    return (
        all(t.dim() == DIMENSIONS for t in ask.tensors)
        and all(t.shape[-2] for t in ask.tensors)
        and ask.query.shape[0] == ask.key.shape[0] == ask.value.shape[0]
    )


def _unit_stride(ask: LayerQuestion, *, ignores_singletons: bool) -> bool:
    tensors = [*ask.tensors, *([] if ask.attn_mask is None else [ask.attn_mask])]
    return all(
        t.stride(-1) == 1 or (ignores_singletons and t.shape[-1] == 1)
        for t in tensors
        if t is not ask.attn_mask or t.shape[-1] != 1 or not ignores_singletons
    )


def _same_heads(ask: LayerQuestion, *, grouped: bool) -> bool:
    n_query, n_key, n_value = (t.shape[1] for t in ask.tensors)
    if ask.enable_gqa and grouped:
        return n_key == n_value and n_query % max(1, n_key) == 0
    return n_query == n_key == n_value


def _cudnn_fits(ask: LayerQuestion) -> bool:
    head, value_head = ask.query.shape[-1], ask.value.shape[-1]
    n_query, n_key = ask.query.shape[-2], ask.key.shape[-2]
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and not (
            torch.are_deterministic_algorithms_enabled()
            and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
        and ask.is_half
        and ask.capability >= AMPERE
        and _unit_stride(ask, ignores_singletons=True)
        and _same_heads(ask, grouped=True)
        and max(ask.query.shape[:2]) <= MAX_CUDNN_SIZE
        and _cudnn_takes_head(ask, head, value_head)
        and head % MULTIPLE == value_head % MULTIPLE == 0
        and (ask.version < (2, 12, 0) or (ask.dropout_p * 16).is_integer())
        and n_key != 1
        and (ask.attn_mask is None or not ask.attn_mask.requires_grad)
        and not (n_query == 1 and (ask.dropout_p or ask.version < (2, 9, 0)))
    )


def _cudnn_takes_head(ask: LayerQuestion, head: int, value_head: int) -> bool:
    widest = max(head, value_head)
    if widest <= MAX_CUDNN_HEAD:
        return True
    first = (2, 8, 0) if ask.capability == HOPPER else (2, 12, 0)
    if ask.version < first or ask.capability not in {HOPPER, (10, 0), (10, 3)}:
        return False
    if not ask.needs_gradient or ask.version < (2, 14, 0):
        return widest <= WIDEST_CUDNN_HEAD
    return (head, value_head) in {(192, 128), (256, 256)}


def _flash_fits(ask: LayerQuestion) -> bool:
    head = ask.query.shape[-1]
    consumer = AMPERE < ask.capability < HOPPER or ask.capability >= (12, 0)
    too_wide = ask.needs_gradient and consumer and head > 192
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and ask.is_half
        and ask.capability >= AMPERE
        and ask.attn_mask is None
        and head == ask.key.shape[-1] == ask.value.shape[-1] <= MAX_FLASH_HEAD
        and not (too_wide and (ask.dropout_p > 0 or head <= 224))
        and not (ask.is_causal and ask.query.shape[-2] != ask.key.shape[-2])
        and _same_heads(ask, grouped=True)
        and _unit_stride(ask, ignores_singletons=True)
    )


def _efficient_fits(ask: LayerQuestion) -> bool:
    half = ask.query.dtype in _HALF
    kinds = (*_HALF, torch.float32) if ask.capability >= AMPERE else (torch.float16, torch.float32)
    aligned = 8 if half and ask.capability >= (7, 0) else 4 if ask.capability >= AMPERE else 1
    head, value_head = ask.query.shape[-1], ask.value.shape[-1]
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and ask.query.dtype in kinds
        and len({t.dtype for t in ask.tensors}) == 1
        and head == ask.key.shape[-1]
        and head > 0 < value_head
        and head % aligned == value_head % aligned == 0
        and _same_heads(ask, grouped=ask.version >= (2, 14, 0))
        and _unit_stride(ask, ignores_singletons=False)
    )


def choose(ask: LayerQuestion) -> int:
    """Return the number of the kernel that PyTorch's CUDA build would choose.

    Raises:
        RuntimeError: the program allows none that can serve this call.
    """
    order: list[tuple[int, Callable[[LayerQuestion], bool]]]
    order = [(FLASH, _flash_fits), (EFFICIENT, _efficient_fits)]
    order.insert(0 if ask.capability[0] in {9, 10} else 2, (CUDNN, _cudnn_fits))
    order.append((MATH, lambda _: bool(torch.backends.cuda.math_sdp_enabled())))
    for kernel, fits in order if _is_dense(ask) else order[-1:]:
        if fits(ask):
            return kernel
    raise RuntimeError("No available kernel. Aborting execution.")


def _question(*args: Any, **options: Any) -> LayerQuestion:
    now = session.current()
    return LayerQuestion(*args, **options, capability=now.capability, version=now.version)


def _can_use(fits: Callable[[LayerQuestion], bool], params: Any, _debug: bool = False) -> bool:
    """``torch.backends.cuda.can_use_flash_attention`` and similar functions."""
    tensors = params.query, params.key, params.value, params.attn_mask
    gqa = params.enable_gqa
    return fits(_question(*tensors, params.dropout, params.is_causal, enable_gqa=gqa))


_chosen: Final[list[int]] = [MATH]
"""The kernel for the call of attention that is in progress, as C++ asks for it."""


def attention(op: Any, query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Run PyTorch's own code with the chosen kernel."""
    if query.is_cuda:
        _chosen[0] = choose(_question(query, *args, **options))
    return op._op_dk(_COMPOSITE, query, *args, **options)  # type: ignore[no-any-return]


@special("aten::_native_multi_head_attention")
def _native_attention(op: Any, *args: Any, **kwargs: Any) -> Any:
    """``MultiheadAttention`` outside training (``native/transformers/cuda/attention.cu``)."""
    linear, scaled = torch.nn.functional.linear, ATEN.scaled_dot_product_attention
    query, key, value, width, n_heads, weight, bias, *projection = args[:9]
    asked = Call(op, args, kwargs, ()).argument
    is_plain = asked("mask") is None and not asked("need_weights")
    head, n = width // n_heads, query.shape[0]
    if query is key is value and head % MULTIPLE == 0 and is_plain:
        heads = query.view(n, -1, n_heads, head).transpose(1, 2)
        if choose(_question(heads, heads, heads)) != MATH:
            parts = linear(query, weight, bias).chunk(3, -1)
            q, k, v = (x.view(n, -1, n_heads, head).transpose(1, 2) for x in parts)
            seen = scaled(q, k, v).transpose(1, 2).reshape(n, -1, width)
            out = linear(seen, *projection)
            del seen  # freed before the projections
            return out, None
    return of_cpu("CPU", op, *args, **kwargs)


@special("aten::_transform_bias_rescale_qkv")
def _rescale(
    _op: Any, qkv: torch.Tensor, _bias: torch.Tensor, num_heads: int
) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values are one block of memory."""
    n, length, width = qkv.shape
    return qkv.new_empty((3, n, num_heads, length, width // 3 // num_heads)).unbind()


@special("aten::_nested_tensor_from_mask_left_aligned")
def _is_left_aligned(_op: Any, *_: Any) -> bool:
    """Return False: a ``TransformerEncoder`` cannot skip its padding by using nested tensors."""
    values.assume("TransformerEncoder", "padding is computed like everything else")
    return False


def install() -> None:
    """Install these in place of the CUDA kernels."""
    library = library_for("aten")
    put_stub("_fused_sdp_choice_stub", ctypes.CFUNCTYPE(ctypes.c_int64)(lambda: _chosen[0]))
    op = ATEN.scaled_dot_product_attention.default
    for key in ("AutogradCUDA", "CUDA"):
        library.impl("scaled_dot_product_attention", partial(attention, op), key)
    op.py_kernels[_COMPOSITE] = partial(attention, op)  # exported programs are decomposed by it
    library.impl("_fused_sdp_choice", lambda *a, **k: choose(_question(*a, **k)), "CUDA")
    put(torch._C, "_can_use_flash_attention", partial(_can_use, _flash_fits))
    put(torch._C, "_can_use_mem_efficient_attention", partial(_can_use, _efficient_fits))
    put(torch._C, "_can_use_cudnn_attention", partial(_can_use, _cudnn_fits))
