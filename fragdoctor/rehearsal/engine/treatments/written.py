"""Changes as the user writes them: the engine runs the functions that are printed.

``prescription/catalogue.py`` reads them from this file, and leaves out their types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name, which is printed
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fragdoctor.rehearsal.engine.treatments.operations import (
    COUNTED as flop_registry,  # noqa: N811 - its name in PyTorch, which is printed
)


def keeping(*numbers: int) -> Any:
    """Keep the results of these matrix products, convolutions and attentions of a call."""

    def contexts() -> Any:
        n = {False: -1, True: -1}

        def policy(context: Any, op: Any, *_: Any, **__: Any) -> Any:
            is_counted = getattr(op, "overloadpacket", None) in flop_registry
            n[context.is_recompute] += is_counted
            is_kept = is_counted and n[context.is_recompute] in numbers
            return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


def in_pieces(layers: Any, pieces: Sequence[tuple[int, int, dict[str, Any]]], x: Any) -> Any:
    """Run a sequential with some pieces of it checkpointed."""
    at = 0
    for first, end, more in pieces:
        for layer in layers[at:first]:
            x = layer(x)
        x = checkpoint(layers[first:end], x, use_reentrant=False, **more)
        at = end
    for layer in layers[at:]:
        x = layer(x)
    return x


def chunked_loss(x: Any, target: Any, logits_of: Any, n: int, **how: Any) -> Any:
    """Sum cross_entropy over rows whose logits are made in n parts, and again when needed."""

    def part(x: Any, target: Any) -> Any:
        return F.cross_entropy(logits_of(x), target, reduction="sum", **how)

    rows = zip(x.flatten(0, -2).chunk(n), target.flatten().chunk(n), strict=True)
    return sum(checkpoint(part, *row, use_reentrant=False) for row in rows)


def step_in_backward(optimizer: Any) -> None:
    """Update each parameter once it has a gradient; the optimizer then finds none."""
    own = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad:
                own[p] = type(optimizer)([{**group, "params": [p]}])

    def update(p: Any) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in own:
        p.register_post_accumulate_grad_hook(update)


def state_on_host(optimizer: Any) -> None:
    """Keep the optimizer's state on the host except while it runs."""

    def move(device: str) -> None:
        for state in optimizer.state.values():
            for name, value in state.items():
                if torch.is_tensor(value) and value.dim():
                    state[name] = value.to(device)

    optimizer.register_step_pre_hook(lambda *_: move("cuda"))
    optimizer.register_step_post_hook(lambda *_: move("cpu"))
