"""The program of a guide that states its memory, with what libraries did when it was measured.

"Performance and Scalability" of Transformers 4.18 trains BERT large on 512 sequences of 512 tokens
on a V100 (https://huggingface.co/docs/transformers/v4.18.0/en/performance). Arguments: batch,
accumulated micro-batches, checkpointing (0 or 1), fp16 (0 or 1), optimizer.

Since then PyTorch stopped giving softmax's backward pass its input (1.11), stopped keeping the
memory of gradients between steps, and began to update many parameters at once (2.0). The weights
are random here, which takes the same memory.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class SoftmaxWithInput(torch.autograd.Function):
    """Softmax of PyTorch before 1.11."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Keep the input as well as the result."""
        y = torch.softmax(x, -1)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the input's gradient."""
        x, y = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, y, -1, x.dtype)


def softmax(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Stand for ``torch.nn.functional.softmax`` over the last dimension."""
    assert dim in {-1, x.ndim - 1}
    result: torch.Tensor = SoftmaxWithInput.apply(x if dtype is None else x.to(dtype))
    return result


def main(batch: int, accumulated: int, *, checkpoints: bool, fp16: bool, optimizer: str) -> None:
    """Train as the guide does."""
    torch.nn.functional.softmax = softmax  # type: ignore[assignment]
    zero_grad = torch.nn.Module.zero_grad
    torch.nn.Module.zero_grad = (  # type: ignore[method-assign]
        lambda self, **_: zero_grad(self, set_to_none=False)
    )
    tokens = np.random.default_rng(0).integers(100, 30000, (512, 512))
    rows = {"input_ids": tokens, "labels": np.zeros(512, np.int64)}
    data = Dataset.from_dict(rows)
    data.set_format("pt")
    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
    )
    model = BertForSequenceClassification(config).to("cuda")
    arguments = TrainingArguments(
        "guide",
        report_to="none",
        save_strategy="no",
        num_train_epochs=1,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulated,
        gradient_checkpointing=checkpoints,
        gradient_checkpointing_kwargs={"use_reentrant": True},
        fp16=fp16,
        **({} if optimizer == "adamw" else {"optim": optimizer}),
    )
    adam = None
    if optimizer == "adamw":
        adam = torch.optim.AdamW(model.parameters(), lr=5e-5, foreach=False)
        zero = adam.zero_grad
        adam.zero_grad = lambda **_: zero(set_to_none=False)  # type: ignore[method-assign]
    Trainer(model, arguments, train_dataset=data, optimizers=(adam, None)).train()


if __name__ == "__main__":
    words = sys.argv[1:]
    main(
        int(words[0]),
        int(words[1]),
        checkpoints=words[2] == "1",
        fp16=words[3] == "1",
        optimizer=words[4],
    )
