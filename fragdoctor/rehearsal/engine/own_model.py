"""The user's ``pkg.module:factory``: imported, called, and made into something that can be run."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from fragdoctor.errors import ConfigError

NAMES: Final = ("model", "inputs", "targets", "loss_fn", "optimizer", "train_step")
CONTRACT: Final = (
    "Return an nn.Module; or (module, inputs); or a dict or object with model and, as needed, "
    "inputs, targets, loss_fn, optimizer, train_step."
)


@dataclass(slots=True)
class OwnModel:
    """What the factory returned.

    Attributes:
        model: the module.
        inputs: a tensor, a tuple of arguments, a dict of keyword arguments, or None.
        targets: what ``loss_fn(outputs, targets)`` gets; None = surplus inputs, or nothing.
        loss_fn: ``loss_fn(outputs, targets)`` or ``loss_fn(outputs)``.
        optimizer: an optimizer, or a function from parameters to an optimizer.
        train_step: ``train_step(model, optimizer, inputs)``, a whole step of the user's own.
    """

    model: torch.nn.Module
    inputs: Any = None
    targets: Any = None
    loss_fn: Callable[..., Any] | None = None
    optimizer: Any = None
    train_step: Callable[..., Any] | None = None

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """Return positional arguments, keyword arguments and targets.

        If there are more inputs than ``forward`` takes, the surplus ones are targets, as from a
        data loader.
        """
        targets = () if self.targets is None else (self.targets,)
        inputs = self.inputs
        if isinstance(inputs, Mapping):
            return (), dict(inputs), targets
        if not isinstance(inputs, tuple | list):
            return ((inputs,) if inputs is not None else ()), {}, targets
        n_taken = _n_positional(self.model)
        if targets or n_taken is None:
            return tuple(inputs), {}, targets
        return tuple(inputs[:n_taken]), {}, tuple(inputs[n_taken:])


def build(spec: str) -> OwnModel:
    """Import what ``pkg.module:factory`` names, call it, and return what it made.

    Raises:
        ConfigError: the name cannot be found, or does not satisfy :data:`CONTRACT`.
    """
    built = _factory(spec)()
    if isinstance(built, torch.nn.Module):
        return OwnModel(built)
    if isinstance(built, Sequence) and built and isinstance(built[0], torch.nn.Module):
        pair = 2
        return OwnModel(built[0], inputs=built[1] if len(built) == pair else tuple(built[1:]))
    if isinstance(built, Mapping):
        fields = {name: built.get(name) for name in NAMES}
    else:
        fields = {name: getattr(built, name, None) for name in NAMES}
    model = fields.pop("model")
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"The factory returned {type(built).__name__}, which contains no model.", hint=CONTRACT
        )
    return OwnModel(model, **fields)


def _factory(spec: str) -> Callable[[], Any]:
    module_name, _, name = spec.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as err:
        if err.name is None or not f"{module_name}.".startswith(f"{err.name}."):
            raise
        raise ConfigError(
            f"There is no module {module_name!r} here ({Path.cwd()}) or among the installed ones.",
            hint="Run from the directory from which your program runs.",
        ) from err
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(f"Module {module_name!r} has no function {name!r}.", hint=CONTRACT)
    factory: Callable[[], Any] = found
    return factory


def _n_positional(model: torch.nn.Module) -> int | None:
    """Return how many positional arguments ``forward`` takes; None = any number."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD} for p in parameters)
