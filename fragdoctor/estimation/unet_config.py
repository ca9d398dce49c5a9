"""Reads the configuration of a diffusion UNet, and refuses by its key what is not covered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from fragdoctor.errors import InputError
from fragdoctor.model.workload import Unet, UnetBlock

MAX_SIDE: Final = 1 << 16
MAX_BLOCKS: Final = 16
MAX_LAYERS: Final = 200
MAX_CHANNELS: Final = 1 << 20
_ATTENTION: Final = {
    "DownBlock2D": "", "UpBlock2D": "",
    "CrossAttnDownBlock2D": "cross", "CrossAttnUpBlock2D": "cross",
    "AttnDownBlock2D": "pixels", "AttnUpBlock2D": "pixels",
    "UNetMidBlock2DCrossAttn": "cross", "UNetMidBlock2D": "pixels",
}  # fmt: skip
_COVERED: Final[Mapping[str, Sequence[object]]] = {
    "resnet_time_scale_shift": ("default",), "downsample_type": ("conv",),
    "upsample_type": ("conv",), "act_fn": ("silu", "swish"),
    "time_embedding_type": ("positional",), "dual_cross_attention": (False,),
    "only_cross_attention": (False,), "attention_type": ("default",),
    "addition_embed_type": ("text_time",), "class_embed_type": (), "encoder_hid_dim_type": (),
    "cross_attention_norm": (), "dropout": (0,), "reverse_transformer_layers_per_block": (),
    "time_cond_proj_dim": (),
}  # fmt: skip
"""Switches, and the values under which the model is built as here; nothing set is always one."""


class _Facts:
    """Gets checked values out of a configuration."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config, self.name = config, name

    def whole(self, key: str, default: int, limit: int = MAX_CHANNELS) -> int:
        value = self.config.get(key)
        return self.checked(key, default if value is None else value, limit)

    def each(self, key: str, default: int, n: int, limit: int = MAX_CHANNELS) -> list[int]:
        """Return one number for each of ``n`` blocks."""
        value = self.config.get(key)
        alike = [default if value is None else value] * n
        values = value if isinstance(value, list | tuple) else alike
        if len(values) != n:
            raise self.wrong(key, f"has {len(values)} entries where there are {n} blocks")
        return [self.checked(key, each, limit) for each in values]

    def blocks(self, key: str, default: Sequence[str]) -> list[str]:
        names = self.config.get(key, default)
        if not isinstance(names, list | tuple) or not 0 < len(names) <= MAX_BLOCKS:
            raise self.wrong(key, "is no list of blocks")
        return [self.attention(key, name) for name in names]

    def attention(self, key: str, name: object) -> str:
        if not isinstance(name, str) or name not in _ATTENTION:
            raise self.wrong(key, f"names {str(name)[:40]!r}, a block that is not covered")
        return _ATTENTION[name]

    def check_switches(self) -> None:
        for key, covered in _COVERED.items():
            value = self.config.get(key)
            if value is not None and value not in covered:
                raise self.wrong(key, f"is {str(value)[:40]!r}, which the formulas do not cover")

    def checked(self, key: str, value: object, limit: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
            raise self.wrong(key, f"is {str(value)[:40]!r}, not a whole number from 1 to {limit}")
        return value

    def wrong(self, key: str, what: str) -> InputError:
        return InputError(
            f"{self.name}: {key} {what}.",
            hint="Check the file, or trace the model: fragdoctor estimate --model "
            "pkg.module:factory",
        )


def unet_of(config: Mapping[str, Any], name: str) -> Unet:
    """Return the dimensions of a UNet of Diffusers.

    Raises:
        InputError: a value is impossible, or switches something on that is not covered.
    """
    facts = _Facts(config, name)
    facts.check_switches()
    return _unet_of(facts, conditional=config.get("_class_name") == "UNet2DConditionModel")


def _unet_of(facts: _Facts, *, conditional: bool) -> Unet:
    default_down = ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",)
    default_up = ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3
    widths = [320, 640, 1280, 1280]
    if not conditional:
        default_down = ("DownBlock2D",) + ("AttnDownBlock2D",) * 3
        default_up = ("AttnUpBlock2D",) * 3 + ("UpBlock2D",)
        widths = [224, 448, 672, 896]
    down = facts.blocks("down_block_types", default_down)
    n, up = len(down), facts.blocks("up_block_types", default_up)
    if len(up) != n:
        raise facts.wrong("up_block_types", f"has {len(up)} entries where there are {n} blocks")
    if facts.config.get("block_out_channels") is not None or n != len(widths):
        widths = facts.each("block_out_channels", 0, n)
    layers = facts.each("layers_per_block", 2, n, MAX_LAYERS)
    depths = facts.each("transformer_layers_per_block", 1, n, MAX_LAYERS)
    heads = facts.each("attention_head_dim", 8, n)
    if not conditional:
        heads = [max(1, width // each) for width, each in zip(widths, heads, strict=True)]
    elif facts.config.get("num_attention_heads") is not None:
        heads = facts.each("num_attention_heads", 8, n)
    groups = facts.whole("norm_num_groups", 32)
    for width, n_heads in zip(widths, heads, strict=True):
        if width % n_heads or width % groups:
            raise facts.wrong(
                "block_out_channels", f"cannot split {width} into its heads or groups"
            )
    middle_name = facts.config.get(
        "mid_block_type", "UNetMidBlock2DCrossAttn" if conditional else "UNetMidBlock2D"
    )
    middle = None
    if middle_name is not None:
        attention = facts.attention("mid_block_type", middle_name)
        if facts.config.get("add_attention") is False:
            attention = ""
        middle = UnetBlock(widths[-1], 1, attention, heads[-1], depths[-1])
    blocks = [UnetBlock(*each) for each in zip(widths, layers, down, heads, depths, strict=True)]
    return Unet(
        side=_side(facts), in_channels=facts.whole("in_channels", 4 if conditional else 3),
        out_channels=facts.whole("out_channels", 4 if conditional else 3),
        down=tuple(blocks), middle=middle,
        up=tuple(
            replace(block, n_layers=block.n_layers + 1, attention=attention)
            for block, attention in zip(reversed(blocks), up, strict=True)
        ),
        n_groups=groups,
        context_width=facts.whole("cross_attention_dim", 1280) if conditional else 0,
        has_linear_projection=facts.config.get("use_linear_projection") is True,
        n_classes=facts.whole("num_class_embeds", 1) if facts.config.get("num_class_embeds") else 0,
        added_width=(
            facts.whole("projection_class_embeddings_input_dim", 2816)
            if facts.config.get("addition_embed_type") else 0
        ),
    )  # fmt: skip


def _side(facts: _Facts) -> int:
    value = facts.config.get("sample_size")
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    if value is None:
        raise facts.wrong("sample_size", "is missing, which says how large the pictures are")
    return facts.checked("sample_size", value, MAX_SIDE)
