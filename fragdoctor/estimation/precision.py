"""What a choice of precision means in bytes: weights, gradients, matrix products, residuals.

Under autocast (``amp-*``) weights, gradients and the residual stream stay fp32; each linear layer
works on 16-bit copies of its weight (kept in autocast's cache until the context ends, and by the
graph until backward) and of its input (made anew for each linear layer, and kept for its backward).
Source: PyTorch, "Automatic Mixed Precision package", op lists and ``weight_cache``.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fragdoctor.errors import ConfigError

AUTOCAST_DOC: Final = "https://docs.pytorch.org/docs/stable/amp.html"
FP8_DOC: Final = "https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/index.html"
QLORA: Final = "Dettmers et al. 2023, QLoRA, https://arxiv.org/abs/2305.14314"

DTYPE_BYTES: Final = MappingProxyType(
    {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
)


@dataclass(frozen=True, slots=True)
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


# NF4 with double quantisation: 4 bits, 8 for each block of 64, 32 for each 256 blocks.
_NF4: Final = (4 + 8 / 64 + 32 / (64 * 256)) / 8
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
            # bf16 weights; both layouts of the fp8 copy, inputs kept in fp8.
            Precision("fp8", 2, 2, 2, 2, 1, 2, source=FP8_DOC),
            # Stored in fp8 and computed with in 16 bits, as inference servers load them.
            Precision("fp8-weights", 2, 1, 2, 2, 2, trains_base=False, source=FP8_DOC),
            Precision("int8", 2, _INT8, 2, 2, 2, trains_base=False, source=QLORA),
            Precision("int4", 2, _NF4, 2, 2, 2, trains_base=False, source=QLORA),
        )
    }
)
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
