"""Optimizers: the state each keeps for a parameter, and what a step allocates for a moment.

Figures are those of the default implementation on CUDA: torch.optim updates all parameters of one
dtype at once (``foreach=True``), so a temporary value of each parameter lives at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fragdoctor.errors import ConfigError

TORCH_OPTIM: Final = "https://docs.pytorch.org/docs/stable/optim.html"
ADAM_8BIT: Final = "Dettmers et al. 2022, https://arxiv.org/abs/2110.02861"
ZERO: Final = "Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054"

# bitsandbytes keeps one fp32 scale for each block of 256 values.
_BLOCK_SCALE: Final = 4 / 256


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """Memory of one optimizer.

    Attributes:
        copies: states of the size and dtype of the parameter.
        fixed: further bytes for each element, whatever the dtype.
        factored: second moments of matrices as a row and a column (Adafactor).
        step_copies: temporary values of the parameter's size and dtype that a step makes.
        step_of_largest: whether those exist for one parameter at a time, not for all at once.
    """

    name: str
    title: str
    copies: float
    fixed: float = 0.0
    factored: bool = False
    step_copies: float = 0.0
    step_of_largest: bool = False
    source: str = TORCH_OPTIM


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
            OptimizerSpec(
                "adafactor",
                "Adafactor",
                0,
                factored=True,
                step_copies=2,
                step_of_largest=True,
            ),
            OptimizerSpec(
                "lion",
                "Lion",
                1,
                step_copies=1,
                step_of_largest=True,
                source="Chen et al. 2023, https://arxiv.org/abs/2302.06675",
            ),
            OptimizerSpec(
                "adamw-8bit", "AdamW 8-bit", 0, fixed=2 + 2 * _BLOCK_SCALE, source=ADAM_8BIT
            ),
            OptimizerSpec("lion-8bit", "Lion 8-bit", 0, fixed=1 + _BLOCK_SCALE, source=ADAM_8BIT),
        )
    }
)
_ALIASES: Final = MappingProxyType(
    {
        "momentum": "sgd-momentum",
        "sgdm": "sgd-momentum",
        "adam-8bit": "adamw-8bit",
        "adam8bit": "adamw-8bit",
        "adamw8bit": "adamw-8bit",
        "paged-adamw-8bit": "adamw-8bit",
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
