"""Models for the tests; each function is a factory for ``estimate --model``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, BATCH = 256, 64


def linear() -> Any:
    return nn.Linear(WIDTH, WIDTH, bias=False), torch.zeros(BATCH, WIDTH)


def tied() -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[1].weight = model[0].weight
    return model, torch.zeros(BATCH, WIDTH)


class Deep(nn.Module):
    """Layers that each keep one activation.

    ``checkpointing`` is ``use_reentrant`` of ``checkpoint``; if None, layers are not checkpointed.
    """

    def __init__(self, *, checkpointing: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
            for _ in range(8)
        )
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.checkpointing is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing)
        return x


def deep() -> Any:
    return Deep(checkpointing=None), torch.zeros(4096, WIDTH)


def deep_checkpointed() -> Any:
    return Deep(checkpointing=False), torch.zeros(4096, WIDTH)


def deep_checkpointed_reentrant() -> Any:
    return Deep(checkpointing=True), torch.zeros(4096, WIDTH, requires_grad=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 3 * 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 1, width).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v)


def attention() -> Any:
    return Attention(), torch.zeros(2, 1024, 64)


class Output:
    """Like the output of models of the transformers library."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        scores = self.embedding(input_ids) @ self.embedding.weight.T
        return Output(functional.cross_entropy(scores.flatten(0, 1), labels.flatten()))


def labelled() -> Any:
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    return Labelled(), {"input_ids": tokens, "labels": tokens}


def no_inputs() -> Any:
    return nn.Linear(WIDTH, WIDTH)


def a_number() -> Any:
    return 3


def fails() -> Any:
    raise ValueError("no weights here")


class DependsOnValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[x[:, 0] > 0].sum()


def depends_on_values() -> Any:
    return DependsOnValues(), torch.zeros(4, 4)


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = getattr(nn, kind)(32, 64, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.layers(x)[0]
        return states


def lstm() -> Any:
    return Recurrent("LSTM"), torch.zeros(8, 4, 32)


def gru() -> Any:
    return Recurrent("GRU"), torch.zeros(8, 4, 32)


def with_constants() -> Any:
    """Return a model whose construction makes tensors on the host only, and reads one of them."""
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
    torch.zeros(1000, 1000)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), *map(nn.Dropout, rates))
    return model, torch.zeros(BATCH, WIDTH)


class Logs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.layer(x).mean()
        print("loss", loss.item())  # noqa: T201 - users do this
        return loss


def logs() -> Any:
    return Logs(), torch.zeros(4, 4)


def huge() -> Any:
    """Return a model many times larger than this machine's memory; for bf16, like its input."""
    width = 2**15
    layers = (nn.Linear(width, width, bias=False) for _ in range(256))
    return nn.Sequential(*layers), torch.zeros(1, width, dtype=torch.bfloat16)
