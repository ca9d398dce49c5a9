"""``scaled_dot_product_attention`` with the kernel that a GPU would take.

PyTorch asks the device which fused kernel to use, before any operation that fake tensors could
answer. So the choice is made here, in place of the CUDA implementation of that one function, by the
conditions of PyTorch's own; the kernel's outputs, its backward and the fallback stay PyTorch's.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import library as torch_library

MATH: Final = 0
FLASH: Final = 1
EFFICIENT: Final = 2
CUDNN: Final = 3
AMPERE: Final = (8, 0)
HOPPER: Final = (9, 0)
AFTER_BLACKWELL: Final = (11, 0)
MULTIPLE: Final = 8  # flash attention pads the size of a head to it
MAX_HEAD: Final = {FLASH: 256, CUDNN: 128}
ATEN: Final = torch.ops.aten
_HALF: Final = (torch.float16, torch.bfloat16)
_capability = HOPPER


def install() -> torch_library.Library:
    """Put :func:`attention` in place of the CUDA kernel; in force while the result is kept."""
    library = torch_library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
    library.impl("scaled_dot_product_attention", attention, "CUDA")
    return library


def set_capability(capability: tuple[int, int]) -> None:
    """Choose as a GPU of this compute capability would."""
    global _capability  # noqa: PLW0603 - the kernel table calls without a place for it
    _capability = capability


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention through the chosen kernel; arguments as for PyTorch's function."""
    kernel = choose(query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, zero, float("-inf"))
    tensors = (query, key, value)
    saves = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    out: torch.Tensor
    if kernel == CUDNN:
        out = ATEN._scaled_dot_product_cudnn_attention(
            *tensors, attn_mask, saves, dropout_p, is_causal, False, scale=scale
        )[0]
    elif kernel == EFFICIENT:
        out = ATEN._scaled_dot_product_efficient_attention(
            *tensors, attn_mask, saves, dropout_p, is_causal, scale=scale
        )[0]
    elif kernel == FLASH:
        out = _flash(*tensors, dropout_p, is_causal, scale)
    else:
        out = ATEN._scaled_dot_product_attention_math(
            *tensors, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    return out


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    head = query.shape[-1]
    missing = -head % MULTIPLE
    if missing:
        pad = torch.nn.functional.pad
        query, key, value = (pad(t, (0, missing)) for t in (query, key, value))
        scale = head**-0.5 if scale is None else scale
    out: torch.Tensor = ATEN._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :head] if missing else out


def choose(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    *,
    is_causal: bool,
    enable_gqa: bool,
) -> int:
    """Return the kernel's number, as PyTorch's CUDA build would choose it.

    On Hopper and Blackwell cuDNN comes first, elsewhere flash attention, then the memory-efficient
    one; each only where its conditions on dtype, head size and mask hold. Kernels switched off
    with ``sdpa_kernel`` are left out.
    """
    tensors = (query, key, value)
    dense = all(t.dim() == 4 and t.stride(-1) == 1 for t in tensors)
    half = query.dtype in _HALF and _capability >= AMPERE
    head, value_head = query.shape[-1], value.shape[-1]
    largest = max(head, value_head)
    same_heads = query.shape[1:2] == key.shape[1:2]
    grouped = enable_gqa or same_heads
    flags = torch.backends.cuda
    fits = {
        CUDNN: flags.cudnn_sdp_enabled()
        and (dense and half and grouped and largest <= MAX_HEAD[CUDNN])
        and (head % MULTIPLE == value_head % MULTIPLE == 0)
        and min(query.shape[-2], key.shape[-2]) > 1,
        FLASH: flags.flash_sdp_enabled()
        and (dense and half and grouped and attn_mask is None)
        and (head == value_head and head <= MAX_HEAD[FLASH])
        and not (is_causal and query.shape[-2] != key.shape[-2]),
        EFFICIENT: flags.mem_efficient_sdp_enabled()
        and (dense and same_heads)
        and (half or query.dtype in {torch.float32, torch.float16}),
    }
    order = [FLASH, EFFICIENT, CUDNN]
    if HOPPER <= _capability < AFTER_BLACKWELL:
        order = [CUDNN, FLASH, EFFICIENT]
    return next((kernel for kernel in order if fits[kernel]), MATH)
