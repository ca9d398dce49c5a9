"""What a program is seen to use: which treatments there is something for."""

from __future__ import annotations

import gc
import sys
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from typing import Any, Final

import torch
from torch.utils import checkpoint
from torch.utils.data import DataLoader

from fragdoctor.rehearsal.engine import put
from fragdoctor.rehearsal.engine.treatments.blocks import caching, repeated_blocks
from fragdoctor.rehearsal.engine.treatments.calls import around_models

FRAMEWORKS: Final = {
    "trainer": ("transformers.trainer", "Trainer"),
    "lightning": ("lightning.pytorch.trainer.trainer", "Trainer"),
    "accelerate": ("accelerate.accelerator", "Accelerator"),
}
"""What runs the training, the one that runs the others first: its module and its class."""


class Traits:
    """Notes what a program uses until ``undo`` is closed."""

    def __init__(self, undo: ExitStack) -> None:
        self._found: dict[str, Any] = {
            "model": "",
            "blocks": [],
            "n_parameters": 0,
            "caches": False,
            "framework": "",
            "optimizers": [],
            "batches": [],
            "trains": False,
            "autocasts": False,
            "checkpoints": False,
            "zeroes": False,
            "evaluates_with_grad": False,
        }
        around_models(self._see, undo)
        self._watch(torch.optim.Optimizer, "__init__", self._made_optimizer, undo)
        self._watch(DataLoader, "__init__", self._made_loader, undo)
        self._watch(checkpoint, "checkpoint", lambda *_, **__: self._note("checkpoints"), undo)
        for kind in (torch.optim.Optimizer, torch.nn.Module):
            self._watch(kind, "zero_grad", self._zeroed, undo)

    def found(self) -> dict[str, Any]:
        """Return all of it, as JSON takes it."""
        return self._found

    def _watch(self, owner: Any, name: str, see: Any, undo: ExitStack) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def seen(*args: Any, **kwargs: Any) -> Any:
            see(*args, **kwargs)
            return original(*args, **kwargs)

        put(undo, owner, name, seen)

    def _note(self, name: str) -> None:
        self._found[name] = True

    def _see(self, model: Any) -> AbstractContextManager[Any] | None:
        if torch.is_autocast_enabled("cuda"):
            self._note("autocasts")
        if not torch.is_grad_enabled():
            return None
        if not model.training:
            self._note("evaluates_with_grad")
            return None
        self._note("trains")
        n_parameters = sum(p.numel() for p in model.parameters())
        if n_parameters > self._found["n_parameters"]:
            self._found["n_parameters"] = n_parameters
            self._found["framework"] = _framework()
            self._found["model"] = type(model).__name__
            self._found["caches"] = bool(caching(model))
            self._found["blocks"] = [
                {
                    "path": group.path,
                    "first": group.first,
                    "is_list": group.is_list,
                    "kind": type(group.blocks[0]).__name__,
                    "n": len(group.blocks),
                    "n_parameters": group.n_parameters,
                }
                for group in repeated_blocks(model)
            ]
        return None

    def _made_optimizer(self, optimizer: Any, *_: Any, **__: Any) -> None:
        name = type(optimizer).__name__
        if name not in self._found["optimizers"]:
            self._found["optimizers"].append(name)

    def _made_loader(
        self, _loader: Any, _data: Any, batch_size: Any = 1, *_: Any, **__: Any
    ) -> None:
        sizes = self._found["batches"]
        if isinstance(batch_size, int) and batch_size > 1 and batch_size not in sizes:
            sizes.append(batch_size)

    def _zeroed(self, _owner: Any, set_to_none: bool = True, *_: Any, **__: Any) -> None:
        if not set_to_none:
            self._note("zeroes")


def _framework() -> str:
    """Return which framework runs the training, "" for the program itself."""
    loaded: dict[str, Any] = {
        name: vars(sys.modules[module]).get(kind)
        for name, (module, kind) in FRAMEWORKS.items()
        if module in sys.modules
    }
    if not loaded:
        return ""
    made = [type(value) for value in gc.get_objects()]
    return next((n for n, kind in loaded.items() if any(issubclass(t, kind) for t in made)), "")
