"""The CPU's side of CUDA: pinned memory, storages, compilation."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Final

import torch

from fragdoctor.rehearse.engine import memory, session
from fragdoctor.rehearse.engine.patching import put

_WITH_GRAPHS: Final = ("reduce-overhead", "max-autotune")


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Return a copy that counts as pinned; on the CPU there is no other difference."""
    del device
    if getattr(self, "_is_pinned_here", False):
        return self
    pinned = self.clone() if not self.is_cuda else self
    pinned._is_pinned_here = True  # type: ignore[attr-defined]
    return pinned


def _is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    del device
    return bool(getattr(self, "_is_pinned_here", False))


def _resize(original: Any) -> Any:
    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        """Exchange a storage's memory in place."""
        if self.device.type != "cuda":
            return original(self, size)  # type: ignore[no-any-return]
        operation = session.current().stacks.operation("resize_")
        memory.resize_storage(self, int(size), operation)
        return self

    return resize_


def _clone(original: Any) -> Any:
    def clone(self: torch.UntypedStorage) -> Any:
        """Return a storage's copy where it is, as deep copies of tensors ask for it."""
        if self.device.type != "cuda":
            return original(self)
        tensor = torch.empty(self.nbytes(), dtype=torch.uint8, device=self.device)
        return tensor.untyped_storage()

    return clone


def _to(original: Any) -> Any:
    def to(self: torch.UntypedStorage, device: Any, non_blocking: bool = False) -> Any:
        """Return a storage's copy on another device, as ``torch.load`` asks for it."""
        if torch.device(device).type != "cuda":
            return original(self, device, non_blocking)
        tensor = torch.empty(self.nbytes(), dtype=torch.uint8, device=device)
        return tensor.untyped_storage()

    return to


def _compile_module(*_: Any, **__: Any) -> None:
    """``Module.compile`` that leaves the module as it is."""
    session.current().assumptions.note(
        "torch.compile was left out: the program runs eagerly, compiled it mostly needs less."
    )


def _compile(model: Any = None, **options: Any) -> Any:
    """``torch.compile`` that leaves a function or a module as it is."""
    _compile_module()
    if options.get("mode") in _WITH_GRAPHS:
        session.current().assumptions.note(
            f"The CUDA graphs of torch.compile(mode={options['mode']!r}) were left out: their "
            "private pools keep what a step needs at most, and hold it between steps."
        )
    if model is None:
        return lambda function: _compile(function, **options)
    if isinstance(model, torch.nn.Module):
        vars(model)["_orig_mod"] = model  # no submodule of itself
    return model


def install(undo: ExitStack) -> None:
    """Patch what tensors and storages do with pinned and resized memory, and compilation."""
    put(undo, torch, "compile", _compile)
    put(undo, torch.nn.Module, "compile", _compile_module)
    put(undo, torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    put(undo, torch.Tensor, "pin_memory", _pin_memory)
    put(undo, torch.Tensor, "is_pinned", _is_pinned)
    put(undo, torch.storage, "_to", _to(torch._utils._to))
    put(undo, torch.UntypedStorage, "clone", _clone(torch.UntypedStorage.clone))
    put(undo, torch.UntypedStorage, "resize_", _resize(torch.UntypedStorage.resize_))
