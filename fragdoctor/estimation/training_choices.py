"""What a choice of precision or of an optimizer means in bytes.

Under autocast (``amp-*``) weights, gradients and the residual stream stay fp32; each linear layer
works on 16-bit copies of its weight (kept in autocast's cache until the context ends, and by the
graph until backward) and of its input (made anew for each linear layer, and kept for its backward).
Source: PyTorch, "Automatic Mixed Precision package", op lists and ``weight_cache``.

Of an optimizer it is the state kept for each parameter, and what a step allocates for a moment.
Figures are those of the default implementation on CUDA: torch.optim updates all parameters of one
dtype at once (``foreach=True``), so a temporary value of each parameter lives at the same time.
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
        keeps_input: frozen linear layers keep their input too (bitsandbytes' MatMul8bitLt, and
            MatMul4Bit before 0.43.2).
        fuses: query, key and value are joined after loading, in all layers before one lets go of
            the separate ones.
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
        """Whether linear layers make their weights anew for each product."""
        return not self.trains_base and self.linear_weight < self.compute


DEEPSPEED: Final = (
    "https://www.deepspeed.ai/docs/config-json/#bfloat16-training-options; "
    "ZeRO, https://arxiv.org/abs/1910.02054"
)
FSDP: Final = "https://docs.pytorch.org/docs/stable/fsdp.html, MixedPrecision"

# NF4: 4 bits, and for each block of 64 an fp32 scale; quantised once more 8 bits, and for each 256
# blocks an fp32 scale.
_NF4: Final = (4 + 32 / 64) / 8
_NF4_DOUBLE: Final = (4 + 8 / 64 + 32 / (64 * 256)) / 8
# 4 bits, and for each group of 128 a 16-bit scale and a 4-bit zero point.
_GROUPED_4: Final = (4 + (16 + 4) / 128) / 8
# 4 bits, and for each group of 32 an 8-bit exponent.
_MXFP4: Final = (4 + 8 / 32) / 8
BNB_0_43_2: Final = (
    "https://github.com/bitsandbytes-foundation/bitsandbytes/releases/tag/0.43.2, QLoRA: inputs "
    "were kept without need"
)
PREPARED: Final = (
    "https://github.com/huggingface/peft/blob/main/src/peft/utils/other.py, "
    "prepare_model_for_kbit_training"
)
GPTQ: Final = "Frantar et al. 2022, https://arxiv.org/abs/2210.17323; groups of 128"
AWQ: Final = "Lin et al. 2023, https://arxiv.org/abs/2306.00978; groups of 128"
AUTOAWQ: Final = (
    "https://github.com/casper-hansen/AutoAWQ, from_quantized(fuse_layers=True), its default: "
    "awq/modules/fused and the fuse_transformer of each model"
)
MXFP4: Final = (
    "Open Compute Project, Microscaling Formats (MX) 1.0; experts only, as gpt-oss stores them"
)
# LLM.int8(): one fp32 scale for each row; a row has thousands of elements.
_INT8: Final = 1.0

PRECISIONS: Final = MappingProxyType(
    {
        p.name: p
        for p in (
            Precision("fp32", 4, 4, 4, 4, 4),
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
"""What PyTorch and configurations call a dtype -> what it is called here."""
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
        ConfigError: there is none.
    """
    key = name.strip().lower().replace("_", "-")
    base = key.removesuffix("-peft")
    found = PRECISIONS.get(_OTHER_PRECISIONS.get(base, base))
    if found is not None and base != key:
        found = None if found.trains_base else _prepared(found)
    if found is None:
        raise ConfigError(
            f"{name!r} is no precision.", hint=f"Choose one of {', '.join(PRECISIONS)}."
        )
    return found


def _prepared(base: Precision) -> Precision:
    """Return what PEFT's ``prepare_model_for_kbit_training`` makes of a model with such weights.

    All that is not quantised is in fp32; the Trainer's autocast computes in 16 bits.
    """
    return replace(
        base, name=f"{base.name}-peft", weight=4, residual=4, copies=base.compute,
        is_autocast=True, source=PREPARED,
    )  # fmt: skip


def dtype_bytes(name: str) -> float:
    """Return the bytes of an element of a plain dtype such as ``bf16``.

    Raises:
        ConfigError: it is not one.
    """
    key = name.strip().lower()
    size = DTYPE_BYTES.get(_OTHER_PRECISIONS.get(key, key))
    if size is None:
        raise ConfigError(f"{name!r} is no dtype.", hint=f"Choose {', '.join(DTYPE_BYTES)}.")
    return size


TORCH_OPTIM: Final = "https://docs.pytorch.org/docs/stable/optim.html"
ADAM_8BIT: Final = "Dettmers et al. 2022, https://arxiv.org/abs/2110.02861"
CHECKPOINTING: Final = "Chen et al. 2016, https://arxiv.org/abs/1604.06174"
MIXED_PRECISION: Final = "Micikevicius et al. 2017, https://arxiv.org/abs/1710.03740"
ZERO: Final = "Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054"

PAGED: Final = "bitsandbytes paged optimizers: QLoRA, https://arxiv.org/abs/2305.14314, section 3"
FOUR_BIT: Final = "Li et al. 2023, https://arxiv.org/abs/2309.01507; blocks of 128"
# bitsandbytes keeps one fp32 scale for each block of 256 values.
_BLOCK_SCALE: Final = 4 / 256


class OptimizerSpec(Struct, frozen=True):
    """Memory of one optimizer.

    Attributes:
        copies: states of the size and dtype of the parameter.
        fixed: further bytes for each element, whatever the dtype.
        factored: second moments of matrices as a row and a column (Adafactor).
        step_copies: temporary values of the parameter's size and dtype that a step makes.
        step_of_largest: whether those exist for one parameter at a time, not for all at once.
        matrices: states of the hidden matrices alone, where the others are updated by AdamW; -1 =
            no difference.
        rank: states of matrices are kept for a projection to this rank; 0 = in full.
        is_paged: states lie in memory that moves to the host when the GPU is full.
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
            OptimizerSpec("adam", "Adam", 2, step_copies=1),
            OptimizerSpec("adamw", "AdamW", 2, step_copies=1),
            OptimizerSpec("adamw-fused", "AdamW (fused)", 2),
            OptimizerSpec("adamax", "Adamax", 2, step_copies=1),
            OptimizerSpec("nadam", "NAdam", 2, step_copies=1),
            OptimizerSpec("rmsprop", "RMSprop", 1, step_copies=1),
            OptimizerSpec("adagrad", "Adagrad", 1, step_copies=2),
            OptimizerSpec("adafactor", "Adafactor", 0, factored=True, step_copies=2,
                          step_of_largest=True),
            OptimizerSpec("lion", "Lion", 1, step_copies=1, step_of_largest=True,
                          source="Chen et al. 2023, https://arxiv.org/abs/2302.06675"),
            OptimizerSpec("adamw-8bit", "AdamW 8-bit", 0, fixed=2 + 2 * _BLOCK_SCALE,
                          source=ADAM_8BIT),
            OptimizerSpec("lion-8bit", "Lion 8-bit", 0, fixed=1 + _BLOCK_SCALE, source=ADAM_8BIT),
            OptimizerSpec("radam", "RAdam", 2, step_copies=1),
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
# What names of Transformers and classes of libraries have beside: who wrote it, how wide it is.
_BESIDE: Final = re.compile(r".*\.|torch(?!ao)|32bit|bnb|hf$|xla|[^a-z0-9]")


def optimizer_of(name: str) -> OptimizerSpec:
    """Return the optimizer of a name, also as Transformers or the class of a library writes it.

    Raises:
        ConfigError: there is none.
    """
    key = _BESIDE.sub("", name.strip().lower().replace("-", ""))
    key = _SAME_OPTIMIZER.get(key, key)
    for found in OPTIMIZERS.values():
        if found.name.replace("-", "") == key:
            return found
    raise ConfigError(
        f"{name!r} is no known optimizer.",
        hint=f"Choose one of {', '.join(OPTIMIZERS)}; the nearest in states will do.",
    )
