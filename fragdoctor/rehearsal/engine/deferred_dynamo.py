"""``torch._dynamo``, imported only when something in it is needed.

Every optimizer, checkpointing and many operations import it, and with it much of the rest of
PyTorch, for two functions that do nothing while no code is compiled, and for one option. That took
a third of a short rehearsal.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any, Final

from fragdoctor.rehearsal.engine import nothing

_NAME: Final = "torch._dynamo"
_OF_CONTENTS: Final = ("__all__", "__path__")
"""Special attributes that import statements look up on a module."""


class _Deferred(ModuleType):
    """Stands in for the module until something is needed that is not defined here."""

    _disabled: list[tuple[Any, bool]]
    _folders: Any

    @classmethod
    def begin(cls, module: Any) -> None:
        """Turn a new module into an instance; imports of its submodules ask for its path."""
        module._folders = vars(module).pop("__path__")
        module._disabled = []
        module.__class__ = cls

    graph_break = nothing  # as no graph is being traced

    def disable(self, fn: Any = None, recursive: bool = True, **how: Any) -> Any:
        """Return a function of PyTorch's unchanged, and remember it for the real module."""
        if getattr(fn, "__module__", "") == "torch.utils.checkpoint":
            return fn  # a hook of one recomputation; nothing is compiled yet
        if how != {"wrapping": False}:
            return self._imported().disable(fn, recursive, **how)
        self._disabled.append((fn, recursive))
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _OF_CONTENTS:
            raise AttributeError(name)
        if name == "config":  # it needs none of the other modules
            self.__path__ = self._folders
            try:
                return importlib.import_module(f"{_NAME}.config")
            finally:
                del self.__path__
        return getattr(self._imported(), name)

    def _imported(self) -> Any:
        disabled = vars(self).pop("_disabled")
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__path__ = vars(self).pop("_folders")
        spec: Any = _found()
        self.__spec__, self.__loader__ = spec, spec.loader
        spec.loader.exec_module(self)
        for fn, recursive in disabled:
            made = vars(self)["disable"](fn, recursive, wrapping=False)
            vars(fn)["__dynamo_disable"] = made  # setattr on a class would mangle it
        return self


def _found() -> ModuleSpec | None:
    torch = sys.modules["torch"]
    return PathFinder.find_spec(_NAME, torch.__path__)


def install() -> None:
    """Defer imports of the module, unless it was already imported."""
    loader: Any = SimpleNamespace(create_module=lambda _: None, exec_module=_Deferred.begin)

    def find_spec(name: str, _path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.startswith(f"{_NAME}.") and name in sys.modules and target is None:
            # It was imported on the way to the module, as its package was.
            module = sys.modules[name]
            own: Any = module.__spec__
            again: Any = SimpleNamespace(  # a config module allows no new attribute
                create_module=lambda _: module,
                exec_module=lambda _: vars(module).update(__spec__=own),
            )
            return ModuleSpec(name, again)
        found = _found() if name == _NAME else None
        if found is None:
            return None
        deferred = ModuleSpec(_NAME, loader, origin=found.origin, is_package=True)
        deferred.submodule_search_locations = found.submodule_search_locations
        deferred.has_location = True
        return deferred

    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)
