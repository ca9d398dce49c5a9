"""Notes the path of the module that allocates with each allocation.

PyTorch keeps a text of the program's choice with every event (``_set_memory_metadata``, from 2.10
on). Hooks on all modules set it to the path of the running one (``GPT.layers.3.mlp``, beginning
with the model's class) and restore the previous text when it returns. The program's own texts stay.
"""

from __future__ import annotations

import threading
from typing import Any

from .module_names import ByIdentity, ModuleNames, path_below

MARK = "nn.Module: "
"""Begins every text, so that readers can tell them from the program's own texts."""


class ModulePaths:
    """Notes the running module with each allocation, in every thread.

    A model is named once, when it is first called: modules that it creates later are named by their
    class. A backward pass runs no module, so its allocations have no path, except where
    checkpointing runs the forward pass again.

    Attributes:
        names: names of the modules.

    Raises:
        RuntimeError: if PyTorch is too old to keep a text.
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
        self.names = ModuleNames()
        self._paths = ByIdentity()
        self._threads = threading.local()
        modules = torch.nn.modules.module
        self._hooks = [
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
            modules.register_module_module_registration_hook(self._put_together),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
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
        while entered is not module:  # others above it were left without the hook being called
            entered, before = running.pop()
        self._write(before)

    def _running(self) -> list[tuple[Any, str]]:
        """Return the modules running in this thread, outermost first, and the text before."""
        found: list[tuple[Any, str]] | None = getattr(self._threads, "running", None)
        if found is None:
            found = self._threads.running = []
        return found

    def _path(self, module: Any, running: list[tuple[Any, str]]) -> str:
        path: str | None = self._paths.get(module)
        if path is None:
            model = self.names.outermost(running[0][0])
            for name, inner in model.named_modules():
                if self._paths.get(inner) is None:
                    self._paths[inner] = path_below(self.names.name_of(model), name.split("."))
            path = self._paths[module] = self._paths.get(module) or self.names.name_of(module)
        return path

    def _put_together(self, above: Any, _name: str, module: Any) -> None:
        if module is not None and not self._is_compiling():
            self.names.put_together(above, module)
