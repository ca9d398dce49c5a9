"""Optimizers: the state each keeps for a parameter, and what a step allocates for a moment.

Figures are those of the default implementation on CUDA: torch.optim updates all parameters of one
dtype at once (``foreach=True``), so a temporary value of each parameter lives at the same time.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from fragdoctor.errors import ConfigError
from fragdoctor.frozen import frozen

TORCH_OPTIM: Final = "https://docs.pytorch.org/docs/stable/optim.html"
ADAM_8BIT: Final = "Dettmers et al. 2022, https://arxiv.org/abs/2110.02861"
ZERO: Final = "Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054"

PAGED: Final = "bitsandbytes paged optimizers: QLoRA, https://arxiv.org/abs/2305.14314, section 3"
FOUR_BIT: Final = "Li et al. 2023, https://arxiv.org/abs/2309.01507; blocks of 128"
# bitsandbytes keeps one fp32 scale for each block of 256 values.
_BLOCK_SCALE: Final = 4 / 256


@frozen
class OptimizerSpec:
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
_ALIASES: Final = MappingProxyType(
    {
        "momentum": "sgd-momentum",
        "sgdm": "sgd-momentum",
        "adam-8bit": "adamw-8bit",
        "adam8bit": "adamw-8bit",
        "adamw8bit": "adamw-8bit",
        "paged-adamw-32bit": "paged-adamw",
        "galore-adamw": "galore",
        "adamw-hf": "adamw",
        "adamw-apex-fused": "adamw-fused",
        "adamw-torch-4bit": "adamw-4bit",
        "adamw-torch-8bit": "adamw-8bit",
        "adamw-torch": "adamw",
        "adamw-torch-fused": "adamw-fused",
        "adamw-bnb-8bit": "adamw-8bit",
        "lion8bit": "lion-8bit",
    }
)


def optimizer_of(name: str) -> OptimizerSpec:
    """Return the optimizer of this name.

    Raises:
        ConfigError: there is none.
    """
    key = name.strip().lower().replace("_", "-")
    found = OPTIMIZERS.get(_ALIASES.get(key, key))
    if found is None:
        raise ConfigError(
            f"{name!r} is no known optimizer.",
            hint=f"Choose one of {', '.join(OPTIMIZERS)}; the nearest in states will do.",
        )
    return found
