"""A model over several GPUs: each holds a part of every parameter, its gradient and its state.

Between a forward pass and its backward pass, parameters may stay whole: that is like ZeRO 2.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any, Final

import torch

from fragdoctor.rehearsal.engine.calls import after_making
from fragdoctor.rehearsal.engine.treatments.accumulation import split_batches
from fragdoctor.rehearsal.engine.treatments.blocks import sharded_units

WHOLE: Final = ":whole"
"""Ends the spec if parameters stay whole until the backward pass is over."""


def fully_sharded(argument: str) -> None:
    """Shard models when their optimizer is created, block by block, and give each rank its batch.

    The number of ranks is that of the rehearsal, which runs one of them.
    """
    n = argument.removesuffix(WHOLE)
    how = {"reshard_after_forward": False} if n != argument else {}
    split_batches(n)

    def shard(optimizer: Any) -> None:
        sharded: dict[int, Any] = {}
        for model in _models_of(p for group in optimizer.param_groups for p in group["params"]):
            sharded |= _shard(model, how)
        for group in optimizer.param_groups:
            group["params"] = [sharded.get(id(p), p) for p in group["params"]]

    after_making(shard)


def _models_of(params: Iterable[Any]) -> list[Any]:
    """Return the outermost modules that hold any of some parameters."""
    wanted = {id(p) for p in params}
    modules = [m for m in gc.get_objects() if issubclass(type(m), torch.nn.Module)]
    inner = {id(child) for m in modules for child in m.children()}
    return [
        m for m in modules if id(m) not in inner and any(id(p) in wanted for p in m.parameters())
    ]


def _shard(model: Any, how: dict[str, Any]) -> dict[int, Any]:
    """Shard a model; return the replacement of each parameter."""
    from torch.distributed.fsdp import fully_shard

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl")
    before = [(name, id(p)) for name, p in model.named_parameters()]
    for _, block in sharded_units(model):
        fully_shard(block, **how)
    fully_shard(model, **how)
    after = dict(model.named_parameters())
    return {number: after[name] for name, number in before}
