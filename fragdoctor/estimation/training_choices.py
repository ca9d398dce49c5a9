"""What a choice of precision or of an optimizer means in bytes.

Under autocast (``amp-*``), weights, gradients and the residual stream stay fp32; each linear layer
works on 16-bit copies of its weight (kept in autocast's cache until the context ends, and by the
graph until backward) and of its input (one copy per linear layer, kept for its backward).
Source: PyTorch, "Automatic Mixed Precision package", op lists and ``weight_cache``.

For an optimizer, it is the state kept for each parameter, and what a step allocates temporarily.
Figures are for the default implementation on CUDA: torch.optim updates all parameters of one dtype
at once (``foreach=True``), so temporary values of all parameters are live at the same time.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.errors import ConfigError

AUTOCAST_DOC: Final = "https://docs.pytorch.org/docs/stable/amp.html"
FP8_DOC: Final = "https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/index.html"
QLORA: Final = "Dettmers et al. 2023, QLoRA, https://arxiv.org/abs/2305.14314"

DTYPE_BYTES: Final = MappingProxyType(
    {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
)


class Precision(Struct, frozen=True):
    """Bytes by purpose.

    Attributes:
        weight: a parameter outside the linear layers.
        linear_weight: a parameter of a linear layer as it is stored.
        compute: an element that goes into or comes out of a matrix product.
        residual: an element of the residual stream.
        linear_input: an element of a linear layer's input as kept for its backward.
        copies: bytes of working copies for each linear weight (autocast, fp8).
        is_autocast: whether norms and loss run in fp32 automatically.
        trains_base: whether the weights themselves can be trained in this form.
        expert_weight: a parameter of an expert; 0 = the same as any linear layer's.
        gathered: a parameter while it is in use, if it is stored wider; 0 = as stored.
        kept_gradient: a gradient as it is kept; 0 = the same as the parameter.
        has_master: whether there are also fp32 copies of the weights.
        keeps_input: whether frozen linear layers keep their input too (bitsandbytes' MatMul8bitLt,
            and MatMul4Bit before 0.43.2).
        fuses: whether query, key and value are joined after loading, in all layers before any
            layer frees the separate ones.
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
    fuses: bool = False

    @property
    def is_quantised(self) -> bool:
        """Whether linear layers dequantize their weights for each product."""
        return not self.trains_base and self.linear_weight < self.compute


DEEPSPEED: Final = (
    "https://www.deepspeed.ai/docs/config-json/#bfloat16-training-options; "
    "ZeRO, https://arxiv.org/abs/1910.02054"
)
FSDP: Final = "https://docs.pytorch.org/docs/stable/fsdp.html, MixedPrecision"

# NF4: 4 bits, plus an fp32 scale per block of 64; with double quantization an 8-bit scale instead,
# plus an fp32 scale per 256 blocks.
_NF4: Final = (4 + 32 / 64) / 8
_NF4_DOUBLE: Final = (4 + 8 / 64 + 32 / (64 * 256)) / 8
# 4 bits, plus a 16-bit scale and a 4-bit zero point per group of 128.
_GROUPED_4: Final = (4 + (16 + 4) / 128) / 8
# 4 bits, plus an 8-bit exponent per group of 32.
_MXFP4: Final = (4 + 8 / 32) / 8
BNB_0_43_2: Final = "bitsandbytes' release notes of 0.43.2: inputs were kept needlessly"
PREPARED: Final = "peft/utils/other.py, prepare_model_for_kbit_training"
GPTQ: Final = "Frantar et al. 2022, https://arxiv.org/abs/2210.17323; groups of 128"
AWQ: Final = "Lin et al. 2023, https://arxiv.org/abs/2306.00978; groups of 128"
AUTOAWQ: Final = "AutoAWQ, awq/modules/fused and the fuse_transformer of each model"
MXFP4: Final = "OCP Microscaling Formats (MX) 1.0; experts only, as gpt-oss stores them"
# LLM.int8(): one fp32 scale per row, which is negligible with thousands of elements in a row.
_INT8: Final = 1.0

_HALF: Final = ("bf16", "fp16")
PRECISIONS: Final = MappingProxyType(
    {
        p.name: p
        for p in (
            Precision("fp32", 4, 4, 4, 4, 4),
            *(Precision(kind, 2, 2, 2, 2, 2) for kind in _HALF),
            *(Precision(f"amp-{kind}", 4, 4, 2, 4, 2, 2, is_autocast=True, source=AUTOCAST_DOC)
              for kind in _HALF),
            # DeepSpeed: 16-bit weights and gradients, fp32 copies next to the optimizer's states.
            *(Precision(f"deepspeed-{kind}", 2, 2, 2, 2, 2, source=DEEPSPEED, has_master=True)
              for kind in _HALF),
            # FSDP's MixedPrecision: fp32 shards, gathered and computed with in 16 bits.
            Precision("fsdp-bf16", 4, 4, 2, 2, 2, source=FSDP, gathered=2, kept_gradient=4),
            # bf16 weights, the fp8 copy in both layouts, inputs kept in fp8.
            Precision("fp8", 2, 2, 2, 2, 1, 2, source=FP8_DOC),
            # Weights stored in fp8 and computed with in 16 bits, as inference servers load them.
            Precision("fp8-weights", 2, 1, 2, 2, 2, trains_base=False, source=FP8_DOC),
            Precision("gptq", 2, _GROUPED_4, 2, 2, 2, trains_base=False, source=GPTQ),
            Precision("awq", 2, _GROUPED_4, 2, 2, 2, trains_base=False, source=AWQ),
            Precision("awq-fused", 2, _GROUPED_4, 2, 2, 2, trains_base=False, source=AUTOAWQ,
                      fuses=True),
            Precision("mxfp4", 2, 2, 2, 2, 2, trains_base=False, source=MXFP4,
                      expert_weight=_MXFP4),
            Precision("int8", 2, _INT8, 2, 2, 2, trains_base=False, source=QLORA,
                      keeps_input=True),
            Precision("int4", 2, _NF4_DOUBLE, 2, 2, 2, trains_base=False, source=QLORA),
            Precision("nf4", 2, _NF4, 2, 2, 2, trains_base=False, source=QLORA),
            # Before 0.43.2 bitsandbytes kept the inputs of frozen 4-bit layers for backward.
            Precision("int4-0.42", 2, _NF4_DOUBLE, 2, 2, 2, trains_base=False, source=BNB_0_43_2,
                      keeps_input=True),
        )
    }
)  # fmt: skip
PLAIN_DTYPES: Final = MappingProxyType(
    {
        **dict.fromkeys(("float32", "fp32", "float", "tf32"), "fp32"),
        **dict.fromkeys(("bfloat16", "bf16"), "bf16"),
        **dict.fromkeys(("float16", "fp16", "half"), "fp16"),
    }
)
"""Name of a dtype in PyTorch and configurations -> its name here."""
_OTHER_PRECISIONS: Final = MappingProxyType(
    {
        **PLAIN_DTYPES,
        **dict.fromkeys(("amp", "trainer-bf16"), "amp-bf16"),
        **dict.fromkeys(("4bit", "bitsandbytes"), "int4"),
        "trainer-fp16": "amp-fp16", "8bit": "int8", "float8": "fp8", "fp4": "mxfp4",
    }
)  # fmt: skip


def precision_of(name: str) -> Precision:
    """Return the precision of this name.

    Raises:
        ConfigError: there is no such precision.
    """
    key = name.strip().lower().replace("_", "-")
    base = key.removesuffix("-peft")
    found = PRECISIONS.get(_OTHER_PRECISIONS.get(base, base))
    if found is not None and base != key:  # after PEFT's prepare_model_for_kbit_training
        # Everything that is not quantized is in fp32; the Trainer's autocast computes in 16 bits.
        found = None if found.trains_base else replace(
            found, name=f"{found.name}-peft", weight=4, residual=4, copies=found.compute,
            is_autocast=True, source=PREPARED,
        )  # fmt: skip
    if found is None:
        raise ConfigError(
            f"{name!r} is not a known precision.", hint=f"Choose one of {', '.join(PRECISIONS)}."
        )
    return found


def dtype_bytes(name: str) -> float:
    """Return the bytes per element of a plain dtype such as ``bf16``.

    Raises:
        ConfigError: the name is not a plain dtype.
    """
    key = name.strip().lower()
    size = DTYPE_BYTES.get(_OTHER_PRECISIONS.get(key, key))
    if size is None:
        raise ConfigError(f"{name!r} is not a known dtype.", hint=f"Use {', '.join(DTYPE_BYTES)}.")
    return size


TORCH_OPTIM: Final = "https://docs.pytorch.org/docs/stable/optim.html"
ADAM_8BIT: Final = "Dettmers et al. 2022, https://arxiv.org/abs/2110.02861"
CHECKPOINTING: Final = "Chen et al. 2016, https://arxiv.org/abs/1604.06174"
MIXED_PRECISION: Final = "Micikevicius et al. 2017, https://arxiv.org/abs/1710.03740"
ZERO: Final = "Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054"

PAGED: Final = "bitsandbytes paged optimizers: QLoRA, https://arxiv.org/abs/2305.14314, section 3"
FOUR_BIT: Final = "Li et al. 2023, https://arxiv.org/abs/2309.01507; blocks of 128"
# bitsandbytes keeps one fp32 scale per block of 256 values.
_BLOCK_SCALE: Final = 4 / 256


class OptimizerSpec(Struct, frozen=True):
    """Memory of one optimizer.

    Attributes:
        copies: number of states with the size and dtype of the parameter.
        fixed: additional bytes per element, whatever the dtype.
        factored: whether second moments of matrices are kept as a row and a column (Adafactor).
        step_copies: number of temporary values with the parameter's size and dtype in a step.
        step_of_largest: whether these exist for one parameter at a time, not for all at once.
        matrices: number of states for hidden matrices if AdamW updates only the other parameters;
            -1 = the same as ``copies``.
        rank: matrices keep states for a projection to this rank; 0 = in full.
        is_paged: whether states are in memory that moves to the host when the GPU is full.
    """

    name: str
    title: str
    copies: float
    fixed: float = 0.0
    factored: bool = False
    step_copies: float = 0.0
    step_of_largest: bool = False
    source: str = TORCH_OPTIM
    matrices: float = -1.0
    rank: int = 0
    is_paged: bool = False


OPTIMIZERS: Final = MappingProxyType(
    {
        o.name: o
        for o in (
            OptimizerSpec("sgd", "SGD", 0),
            OptimizerSpec("sgd-momentum", "SGD with momentum", 1),
            *(OptimizerSpec(title.lower(), title, 2, step_copies=1)
              for title in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam")),
            OptimizerSpec("adamw-fused", "AdamW (fused)", 2),
            OptimizerSpec("rmsprop", "RMSprop", 1, step_copies=1),
            OptimizerSpec("adagrad", "Adagrad", 1, step_copies=2),
            OptimizerSpec("adafactor", "Adafactor", 0, factored=True, step_copies=2,
                          step_of_largest=True),
            OptimizerSpec("lion", "Lion", 1, step_copies=1, step_of_largest=True,
                          source="Chen et al. 2023, https://arxiv.org/abs/2302.06675"),
            OptimizerSpec("adamw-8bit", "AdamW 8-bit", 0, fixed=2 + 2 * _BLOCK_SCALE,
                          source=ADAM_8BIT),
            OptimizerSpec("lion-8bit", "Lion 8-bit", 0, fixed=1 + _BLOCK_SCALE, source=ADAM_8BIT),
            OptimizerSpec("adadelta", "Adadelta", 2, step_copies=2),
            OptimizerSpec("sgd-8bit", "SGD 8-bit", 0, fixed=1 + _BLOCK_SCALE, source=ADAM_8BIT),
            OptimizerSpec("paged-adamw", "AdamW, paged", 2, source=PAGED, is_paged=True),
            OptimizerSpec("paged-adamw-8bit", "AdamW 8-bit, paged", 0, fixed=2 + 2 * _BLOCK_SCALE,
                          source=PAGED, is_paged=True),
            OptimizerSpec("adamw-4bit", "AdamW 4-bit", 0, fixed=1 + 2 * 4 / 128, source=FOUR_BIT),
            OptimizerSpec("muon", "Muon, AdamW for the rest", 2, step_copies=2,
                          step_of_largest=True,
                          source="Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/",
                          matrices=1),
            OptimizerSpec("galore", "GaLore AdamW, rank 128", 2, step_copies=1,
                          step_of_largest=True,
                          source="Zhao et al. 2024, https://arxiv.org/abs/2403.03507", rank=128),
            OptimizerSpec("schedule-free-adamw", "schedule-free AdamW", 2, step_copies=1,
                          source="Defazio et al. 2024, https://arxiv.org/abs/2405.15682"),
            OptimizerSpec("ademamix", "AdEMAMix", 3, step_copies=1, step_of_largest=True,
                          source="Pagliardini et al. 2024, https://arxiv.org/abs/2409.03137"),
        )
    }
)  # fmt: skip
_SAME_OPTIMIZER: Final = MappingProxyType(
    {
        "momentum": "sgdmomentum", "sgdm": "sgdmomentum", "adam8bit": "adamw8bit",
        "fusedadam": "adamwfused", "adamwapexfused": "adamwfused", "pagedadam": "pagedadamw",
        "pagedadam8bit": "pagedadamw8bit", "galoreadamw": "galore",
        "adamwschedulefree": "schedulefreeadamw",
    }
)  # fmt: skip
# What optimizer names of Transformers and class names add: who wrote it, how wide it is.
_BESIDE: Final = re.compile(r".*\.|torch(?!ao)|32bit|bnb|hf$|xla|[^a-z0-9]")


def optimizer_of(name: str) -> OptimizerSpec:
    """Return the optimizer with this name, which may also be Transformers' name or a class name.

    Raises:
        ConfigError: there is no such optimizer.
    """
    key = _BESIDE.sub("", name.strip().lower().replace("-", ""))
    key = _SAME_OPTIMIZER.get(key, key)
    for found in OPTIMIZERS.values():
        if found.name.replace("-", "") == key:
            return found
    raise ConfigError(
        f"{name!r} is not a known optimizer.",
        hint=f"Choose one of {', '.join(OPTIMIZERS)}; one with similar states will do.",
    )
