"""The user's ``pkg.module:factory``: imported and called."""

from __future__ import annotations

import importlib
from functools import reduce
from pathlib import Path
from typing import Any, Final

import torch

from fragdoctor.errors import ConfigError

CONTRACT: Final = (
    "Return (module, inputs): a tensor such as torch.zeros(8, 1024, dtype=torch.int64), a tuple of "
    "arguments or a dict of them."
)


def build(spec: str) -> tuple[torch.nn.Module, Any]:
    """Import what ``pkg.module:factory`` names, call it, and return its model and inputs.

    Raises:
        ConfigError: the name cannot be found, or does not satisfy :data:`CONTRACT`.
    """
    module, _, name = spec.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as err:
        if err.name is None or not f"{module}.".startswith(f"{err.name}."):
            raise
        raise ConfigError(
            f"There is no module {module!r} here ({Path.cwd()}) or among the installed ones.",
            hint="Run from the directory from which your program runs.",
        ) from err
    factory = reduce(lambda owner, part: getattr(owner, part, None), name.split("."), found)
    if not callable(factory):
        raise ConfigError(f"Module {module!r} has no function {name!r}.", hint=CONTRACT)
    built = factory()
    model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"The factory returned {type(built).__name__}, which contains no model.", hint=CONTRACT
        )
    if inputs is None:
        raise ConfigError("The factory returns no inputs for the model.", hint=CONTRACT)
    return model, inputs
