"""Repeated blocks of a model, found in its module tree, and checkpointing of some of them."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from typing import Any, Final

import torch
from torch.utils import checkpoint as checkpoints

from fragdoctor.rehearsal.engine.treatments.calls import around_models

MIN_BLOCKS: Final = 2


class Blocks:
    """Equal blocks that follow each other in a model.

    Attributes:
        path: of their container in the model, "" for the model itself.
        blocks: in the order of their container.
        first: place of the first among the container's children.
        is_list: whether the container can be cut like a list.
        n_parameters: of all of them.
    """

    def __init__(self, path: str, container: Any, blocks: list[Any]) -> None:
        self.path = path
        self.blocks = blocks
        self.first = next(i for i, m in enumerate(container.children()) if m is blocks[0])
        self.is_list = isinstance(container, (torch.nn.ModuleList, torch.nn.Sequential))
        self.n_parameters = sum(p.numel() for b in blocks for p in b.parameters())


def repeated_blocks(model: Any) -> list[Blocks]:
    """Return the containers of equal blocks of a model that lie in no other such block.

    Blocks are equal if their class is. Blocks of a few layers each (a linear layer, a norm) are no
    blocks: they hold no module that has parameters.
    """
    found: list[Blocks] = []
    inside: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        children = list(module.children())
        runs: list[list[Any]] = []
        for child in children:
            if runs and type(runs[-1][-1]) is type(child):
                runs[-1].append(child)
            else:
                runs.append([child])
        for run in runs:
            if len(run) < MIN_BLOCKS or not _is_block(run[0]):
                continue
            found.append(Blocks(path, module, run))
            inside |= {id(part) for block in run for part in block.modules()}
    return found


def _is_block(module: Any) -> bool:
    """Whether a module that is called has several others with parameters, and is no stage."""
    if type(module).forward is torch.nn.Module.forward:
        return False  # a list of modules, whose members the program calls
    inner = [m for m in module.modules() if m is not module]
    has_own = [m for m in inner if next(m.parameters(recurse=False), None) is not None]
    if len(has_own) < MIN_BLOCKS:
        return False
    return type(module) is not torch.nn.Sequential or not repeated_blocks(module)


def caching(model: Any) -> list[Any]:
    """Return the configurations in a model that let it keep keys and values of past tokens."""
    found = (getattr(module, "config", None) for module in model.modules())
    return [config for config in found if getattr(config, "use_cache", False) is True]


def checkpoint(ranges: str, undo: ExitStack) -> None:
    """Checkpoint repeated blocks of each model that is trained: ``0-3,8-9`` in their order."""
    chosen = {
        i
        for first, _, last in (part.partition("-") for part in ranges.split(","))
        for i in range(int(first), int(last or first) + 1)
    }
    seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def around(model: Any) -> AbstractContextManager[Any] | None:
        if model not in seen and torch.is_grad_enabled() and model.training:
            seen.add(model)
            for config in caching(model):
                config.use_cache = False  # a cache would be filled again when a block is run again
            blocks = [block for group in repeated_blocks(model) for block in group.blocks]
            for block in (b for i, b in enumerate(blocks) if i in chosen):
                block.forward = _checkpointed(block)
                undo.callback(_restore, weakref.ref(block))
        return None

    around_models(around, undo)


def _checkpointed(block: Any) -> Any:
    forward = block.forward

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and block.training):
            return forward(*args, **kwargs)
        return checkpoints.checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return call


def _restore(block: weakref.ref[Any]) -> None:
    module = block()
    if module is not None and "forward" in vars(module):
        del module.forward
