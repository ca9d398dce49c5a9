"""Which attention kernel a rehearsal takes, and shapes that PyTorch's meta functions refuse."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from fragdoctor.rehearsal.engine import meta_functions
from fragdoctor.rehearsal.engine.fused_layers import CUDNN, EFFICIENT, MATH, LayerQuestion, choose

HOPPER = (9, 0)


def question(
    dtype: torch.dtype,
    *,
    n_kv: int = 8,
    mask: torch.Tensor | None = None,
    version: tuple[int, int, int] = (2, 13, 0),
) -> LayerQuestion:
    query = torch.zeros((2, 8, 64, 64), dtype=dtype, requires_grad=True)
    key = torch.zeros((2, n_kv, 64, 64), dtype=dtype, requires_grad=True)
    return LayerQuestion(
        query, key, key, mask, enable_gqa=n_kv < 8, capability=HOPPER, version=version
    )


def test_no_fused_kernel_takes_groups_in_fp32_before_2_14() -> None:
    """https://github.com/pytorch/pytorch/pull/191085 taught it to the memory-efficient one."""
    assert choose(question(torch.float32)) == EFFICIENT
    assert choose(question(torch.float32, n_kv=2)) == MATH
    assert choose(question(torch.float32, n_kv=2, version=(2, 14, 0))) == EFFICIENT


def test_cudnn_takes_no_mask_that_wants_a_gradient() -> None:
    mask = torch.zeros((1, 8, 64, 64), dtype=torch.bfloat16)

    assert choose(question(torch.bfloat16, mask=mask)) == CUDNN
    assert choose(question(torch.bfloat16, mask=mask.requires_grad_())) == EFFICIENT


def test_grouped_product_of_experts_has_a_shape_in_every_dtype() -> None:
    offsets = torch.empty((4,), dtype=torch.int32, device="meta")
    for dtype in (torch.bfloat16, torch.float32):
        tokens = torch.empty((32, 64), dtype=dtype, device="meta")
        weights = torch.empty((4, 64, 128), dtype=dtype, device="meta")
        op = torch.ops.aten._grouped_mm.default

        forward = meta_functions.infer(op, (tokens, weights, offsets), {})
        gradient = meta_functions.infer(op, (tokens.t(), forward, offsets), {})

        assert (forward.shape, forward.dtype) == ((32, 128), dtype)
        assert (gradient.shape, gradient.dtype) == ((4, 64, 128), dtype)
