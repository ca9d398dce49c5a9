"""Which module of the model allocates: its path, noted with each allocation.

PyTorch keeps a text of the program's choice with every event (``_set_memory_metadata``, from 2.10
on). Hooks on all modules put the path of the running one there (``model.layers.3.mlp``), and put
back what was there when it returns. What the program writes itself stays.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

MARK = "nn.Module: "
"""Begins every text, so that a reader knows them from those of the program."""

_LONGEST = 300
# Wrappers that repeat their name in the path of every module inside.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class ModulePaths:
    """Notes the running module with each allocation, in every thread.

    A model is named once, when it is first called: modules that it makes later go by the name of
    their class. A backward pass runs no module, so that its allocations have no path, except
    where checkpointing runs the forward pass again.

    Raises:
        RuntimeError: PyTorch is too old to keep a text.
    """

    def __init__(self, torch: Any) -> None:
        try:
            self._write = torch._C._cuda_setMemoryMetadata
            self._read = torch._C._cuda_getMemoryMetadata
        except AttributeError:
            raise RuntimeError(
                f"PyTorch {torch.__version__} keeps no module paths: it needs 2.10 or newer"
            ) from None
        self._is_compiling = torch.compiler.is_compiling
        self._paths: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._threads = threading.local()
        modules = torch.nn.modules.module
        self._hooks = [
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: Any, _args: Any) -> None:
        if self._is_compiling():
            return
        running = self._running()
        before = self._read()
        running.append((module, before))
        if not before or before.startswith(MARK):
            self._write(MARK + self._path(module, running))

    def _leave(self, module: Any, _args: Any, _result: Any) -> None:
        if self._is_compiling():
            return
        running = self._running()
        if not any(entered is module for entered, _ in running):
            return  # it was running when the hooks were set
        entered = None
        while entered is not module:  # others above it were left without a call
            entered, before = running.pop()
        self._write(before)

    def _running(self) -> list[tuple[Any, str]]:
        """Return the modules that run in this thread, the outermost first, and the text before."""
        found: list[tuple[Any, str]] | None = getattr(self._threads, "running", None)
        if found is None:
            found = self._threads.running = []
        return found

    def _path(self, module: Any, running: list[tuple[Any, str]]) -> str:
        path = self._paths.get(module)
        if path is None:
            root = running[0][0]
            for name, inner in root.named_modules():
                self._paths.setdefault(inner, _plain(name)[:_LONGEST] or _class_of(inner))
            path = self._paths.setdefault(module, _class_of(module))
        return path


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _class_of(module: Any) -> str:
    return str(type(module).__name__)[:_LONGEST]
