"""Models whose blocks differ in size, trained for a few steps: ``python unequal_models.py NAME``.

The models in ``LOOKED`` were looked at while the choice of checkpointed modules was developed.
Those in ``HELD_OUT`` were not: they are models of Transformers and diffusers, with custom sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

N_STEPS: Final = 3
Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Double(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.first, self.norm_1 = nn.Conv2d(n_in, n_out, 3, padding=1), nn.BatchNorm2d(n_out)
        self.second, self.norm_2 = nn.Conv2d(n_out, n_out, 3, padding=1), nn.BatchNorm2d(n_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(
            self.norm_2(self.second(functional.relu(self.norm_1(self.first(x)))))
        )


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()
        self.begin = Double(3, widths[0])
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(Double(a, b) for a, b in pairs)
        self.up = nn.ModuleList(Double(a + b, a) for a, b in reversed(pairs))
        self.end = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, kept = self.begin(x), []
        for block in self.down:
            kept.append(x)
            x = block(functional.max_pool2d(x, 2))
        for block in self.up:
            x = block(torch.cat([kept.pop(), functional.interpolate(x, scale_factor=2)], 1))
        return self.end(x)


class Attention(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out, self.n_heads = nn.Linear(width, width), n_heads

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        heads = [
            t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for t in (self.q(x), *self.kv(y).chunk(2, -1))
        ]
        return self.out(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, n_heads: int = 4, *, is_decoder: bool = False) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = Attention(width, n_heads)
        self.cross = Attention(width, n_heads) if is_decoder else None
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        z = self.norm_1(x)
        x = x + self.mix(z, z)
        if self.cross is not None and y is not None:
            x = x + self.cross(x, y)
        return x + self.mlp(self.norm_2(x))


class Windows(nn.Module):
    """Attention within windows; each stage halves the height and width and doubles the features."""

    def __init__(self, width: int = 64, depths: tuple[int, ...] = (2, 2, 6, 2)) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.stages, self.merges = nn.ModuleList(), nn.ModuleList()
        for i, depth in enumerate(depths):
            here = width * 2**i
            self.stages.append(nn.ModuleList(Layer(here) for _ in range(depth)))
            self.merges.append(nn.Linear(4 * here, 2 * here) if i < len(depths) - 1 else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).permute(0, 2, 3, 1)
        for i, stage in enumerate(self.stages):
            batch, height, width, n = x.shape
            x = x.view(batch, height // 7, 7, width // 7, 7, n).transpose(2, 3).reshape(-1, 49, n)
            for layer in stage:
                x = layer(x)
            x = x.view(batch, height // 7, width // 7, 7, 7, n).transpose(2, 3)
            x = x.reshape(batch, height, width, n)
            if i < len(self.stages) - 1:
                x = functional.pixel_unshuffle(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)
                x = self.merge(i, x)
        return x.mean((1, 2))

    def merge(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return self.merges[i](x)


class EncoderDecoder(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Layer(width) for _ in range(6))
        self.decoder = nn.ModuleList(Layer(width, is_decoder=True) for _ in range(4))
        self.head = nn.Linear(width, 4000)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.encoder:
            x = layer(x)
        for layer in self.decoder:
            y = layer(y, x)
        return self.head(y)


class Bottleneck(nn.Module):
    def __init__(self, n_in: int, n: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(n_in, n, 1, bias=False), nn.BatchNorm2d(n), nn.ReLU(inplace=True),
            nn.Conv2d(n, n, 3, stride, 1, bias=False), nn.BatchNorm2d(n), nn.ReLU(inplace=True),
            nn.Conv2d(n, 4 * n, 1, bias=False), nn.BatchNorm2d(4 * n),
        )  # fmt: skip
        self.short = nn.Sequential(nn.Conv2d(n_in, 4 * n, 1, stride), nn.BatchNorm2d(4 * n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.short(x), inplace=True)


def resnet() -> nn.Module:
    """Return a ResNet with bottlenecks in four stages."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU()]
    n_in = 64
    for n, depth in ((32, 3), (64, 4), (128, 6), (256, 3)):
        for i in range(depth):
            layers.append(Bottleneck(n_in, n, 2 if i == 0 and n > 32 else 1))
            n_in = 4 * n
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, 100))


def images(n: int, size: int) -> torch.Tensor:
    """Return n random images of this size."""
    return torch.randn(n, 3, size, size, device="cuda")


def _convnext() -> Made:
    from transformers import ConvNextConfig, ConvNextModel

    config = ConvNextConfig(hidden_sizes=[48, 96, 192, 384], depths=[3, 3, 9, 3])
    return ConvNextModel(config), (images(16, 224),), {}


def _segformer() -> Made:
    from transformers import SegformerConfig, SegformerModel

    config = SegformerConfig(depths=[3, 4, 6, 3])
    return SegformerModel(config), (images(4, 256),), {}


def _swin() -> Made:
    from transformers import SwinConfig, SwinModel

    return SwinModel(SwinConfig(embed_dim=64, num_heads=[2, 4, 8, 16])), (images(16, 224),), {}


def _t5() -> Made:
    from transformers import T5Config, T5Model

    config = T5Config(d_model=256, d_ff=1024, num_layers=6, num_decoder_layers=3, use_cache=False)
    ids = torch.zeros(8, 512, dtype=torch.long, device="cuda")
    return T5Model(config), (), {"input_ids": ids, "decoder_input_ids": ids[:, :128]}


def _unet_diffusion() -> Made:
    from diffusers import UNet2DModel

    net = UNet2DModel(
        sample_size=64, layers_per_block=2, block_out_channels=(64, 128, 256),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return net, (images(8, 64), torch.zeros(8, device="cuda")), {}


LOOKED: Final[dict[str, Callable[[], Made]]] = {
    "U-Net": lambda: (UNet(), (images(8, 128),), {}),
    "windows": lambda: (Windows(), (images(8, 224),), {}),
    "encoder-decoder": lambda: (
        EncoderDecoder(),
        (torch.randn(8, 512, 256, device="cuda"), torch.randn(8, 128, 256, device="cuda")),
        {},
    ),
    "ResNet": lambda: (resnet(), (images(16, 160),), {}),
}
HELD_OUT: Final[dict[str, Callable[[], Made]]] = {
    "ConvNeXt (Transformers)": _convnext,
    "SegFormer (Transformers)": _segformer,
    "Swin (Transformers)": _swin,
    "T5 (Transformers)": _t5,
    "U-Net (diffusers)": _unet_diffusion,
}
MODELS: Final = LOOKED | HELD_OUT


def made(name: str) -> Made:
    """Return a model on the GPU, and the arguments to call it with."""
    with torch.device("cuda"):
        model, args, kwargs = MODELS[name]()
    return model.train(), args, kwargs


def loss_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return a loss of the model's output."""
    outputs = model(*args, **kwargs)
    return (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).square().mean()


def train(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Train a model for ``N_STEPS`` steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(N_STEPS):
        loss_of(model, args, kwargs).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    train(*made(sys.argv[1]))
