"""What a choice of precision means in bytes: weights, gradients, matrix products, residuals.

Under autocast (``amp-*``) weights, gradients and the residual stream stay fp32; each linear layer
works on 16-bit copies of its weight (kept in autocast's cache until the context ends, and by the
graph until backward) and of its input (made anew for each linear layer, and kept for its backward).
Source: PyTorch, "Automatic Mixed Precision package", op lists and ``weight_cache``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from fragdoctor.errors import ConfigError
from fragdoctor.frozen import frozen

AUTOCAST_DOC: Final = "https://docs.pytorch.org/docs/stable/amp.html"
FP8_DOC: Final = "https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/index.html"
QLORA: Final = "Dettmers et al. 2023, QLoRA, https://arxiv.org/abs/2305.14314"

DTYPE_BYTES: Final = MappingProxyType(
    {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
)


@frozen
class Precision:
    """Bytes by purpose.

    Attributes:
        weight: a parameter outside the linear layers.
        linear_weight: a parameter of a linear layer as it is stored.
        compute: an element that goes in or out of a matrix product.
        residual: an element of the residual stream.
        linear_input: an element of a linear layer's input as kept for its backward.
        copies: bytes of working copies for each linear weight (autocast, fp8).
        is_autocast: whether normalisation and loss run in fp32 on their own.
        trains_base: whether the weights themselves can be trained in this form.
        expert_weight: a parameter of an expert; 0 = as any linear layer's.
        gathered: a parameter while it is in use, where it is stored wider; 0 = as stored.
        kept_gradient: a gradient as it is kept; 0 = as the parameter.
        has_master: fp32 copies of the weights belong to it.
        keeps_input: frozen linear layers keep their input too (bitsandbytes' MatMul8bitLt).
    """

    name: str
    weight: float
    linear_weight: float
    compute: float
    residual: float
    linear_input: float
    copies: float = 0.0
    is_autocast: bool = False
    trains_base: bool = True
    source: str = ""
    expert_weight: float = 0.0
    gathered: float = 0.0
    kept_gradient: float = 0.0
    has_master: bool = False
    keeps_input: bool = False


DEEPSPEED: Final = (
    "https://www.deepspeed.ai/docs/config-json/#bfloat16-training-options; "
    "ZeRO, https://arxiv.org/abs/1910.02054"
)
FSDP: Final = "https://docs.pytorch.org/docs/stable/fsdp.html, MixedPrecision"

# NF4 with double quantisation: 4 bits, 8 for each block of 64, 32 for each 256 blocks.
_NF4: Final = (4 + 8 / 64 + 32 / (64 * 256)) / 8
# 4 bits, and for each group of 128 a 16-bit scale and a 4-bit zero point.
_GROUPED_4: Final = (4 + (16 + 4) / 128) / 8
# 4 bits, and for each group of 32 an 8-bit exponent.
_MXFP4: Final = (4 + 8 / 32) / 8
GPTQ: Final = "Frantar et al. 2022, https://arxiv.org/abs/2210.17323; groups of 128"
AWQ: Final = "Lin et al. 2023, https://arxiv.org/abs/2306.00978; groups of 128"
MXFP4: Final = (
    "Open Compute Project, Microscaling Formats (MX) 1.0; experts only, as gpt-oss stores them"
)
GGUF: Final = "https://github.com/ggml-org/llama.cpp/blob/master/tools/quantize/README.md"
GGUF_BITS: Final = MappingProxyType(
    {
        "gguf-q2-k": 3.1593, "gguf-q3-k-m": 3.9960, "gguf-q4-0": 4.6611, "gguf-q4-k-s": 4.6672,
        "gguf-q4-k-m": 4.8944, "gguf-q5-k-m": 5.7036, "gguf-q6-k": 6.5633, "gguf-q8-0": 8.5008,
    }
)  # fmt: skip
"""Bits of a weight on average over Llama 3.1 8B, embedding and head included."""


def _gguf(name: str, bits: float) -> Precision:
    each = bits / 8
    return Precision(name, each, each, 2, 2, 2, trains_base=False, source=GGUF)


# LLM.int8(): one fp32 scale for each row; a row has thousands of elements.
_INT8: Final = 1.0

PRECISIONS: Final = MappingProxyType(
    {
        p.name: p
        for p in (
            Precision("fp32", 4, 4, 4, 4, 4),
            Precision("tf32", 4, 4, 4, 4, 4),
            Precision("bf16", 2, 2, 2, 2, 2),
            Precision("fp16", 2, 2, 2, 2, 2),
            Precision("amp-bf16", 4, 4, 2, 4, 2, 2, is_autocast=True, source=AUTOCAST_DOC),
            Precision("amp-fp16", 4, 4, 2, 4, 2, 2, is_autocast=True, source=AUTOCAST_DOC),
            # DeepSpeed: 16-bit weights and gradients, fp32 copies beside the optimizer's states.
            Precision("deepspeed-bf16", 2, 2, 2, 2, 2, source=DEEPSPEED, has_master=True),
            Precision("deepspeed-fp16", 2, 2, 2, 2, 2, source=DEEPSPEED, has_master=True),
            # FSDP's MixedPrecision: fp32 shards, collected and computed with in 16 bits.
            Precision("fsdp-bf16", 4, 4, 2, 2, 2, source=FSDP, gathered=2, kept_gradient=4),
            # bf16 weights; both layouts of the fp8 copy, inputs kept in fp8.
            Precision("fp8", 2, 2, 2, 2, 1, 2, source=FP8_DOC),
            # Stored in fp8 and computed with in 16 bits, as inference servers load them.
            Precision("fp8-weights", 2, 1, 2, 2, 2, trains_base=False, source=FP8_DOC),
            Precision("gptq", 2, _GROUPED_4, 2, 2, 2, trains_base=False, source=GPTQ),
            Precision("awq", 2, _GROUPED_4, 2, 2, 2, trains_base=False, source=AWQ),
            Precision("mxfp4", 2, 2, 2, 2, 2, trains_base=False, source=MXFP4,
                      expert_weight=_MXFP4),
            *(_gguf(name, bits) for name, bits in GGUF_BITS.items()),
            Precision("int8", 2, _INT8, 2, 2, 2, trains_base=False, source=QLORA,
                      keeps_input=True),
            Precision("int4", 2, _NF4, 2, 2, 2, trains_base=False, source=QLORA),
        )
    }
)  # fmt: skip
_ALIASES: Final = MappingProxyType(
    {
        "float32": "fp32",
        "float": "fp32",
        "bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "amp": "amp-bf16",
        "nf4": "int4",
        "4bit": "int4",
        "8bit": "int8",
        "float8": "fp8",
        "trainer-bf16": "amp-bf16",
        "trainer-fp16": "amp-fp16",
        "bitsandbytes": "int4",
        "fp4": "mxfp4",
    }
)


def precision_of(name: str) -> Precision:
    """Return the precision of this name.

    Raises:
        ConfigError: there is none.
    """
    key = name.strip().lower().replace("_", "-")
    found = PRECISIONS.get(_ALIASES.get(key, key))
    if found is None:
        raise ConfigError(
            f"{name!r} is no precision.", hint=f"Choose one of {', '.join(PRECISIONS)}."
        )
    return found


def dtype_bytes(name: str) -> float:
    """Return the bytes of an element of a plain dtype such as ``bf16``.

    Raises:
        ConfigError: it is not one.
    """
    key = name.strip().lower()
    size = DTYPE_BYTES.get(_ALIASES.get(key, key))
    if size is None:
        raise ConfigError(f"{name!r} is no dtype.", hint=f"Choose {', '.join(DTYPE_BYTES)}.")
    return size
