"""The user's ``pkg.module:factory``: found, called, made into something that can be trained.

What goes wrong in it is told in one sentence, with the line of the user's own code.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from fragdoctor.errors import ConfigError, FragdoctorError
from fragdoctor.rehearsal.tracing.footprint import shown

NAMES: Final = ("model", "inputs", "targets", "loss_fn", "optimizer", "train_step")
CONTRACT: Final = (
    "Return an nn.Module; or (module, inputs); or a dict or object with model and, as needed, "
    "inputs, targets, loss_fn, optimizer, train_step."
)


@dataclass(slots=True)
class Program:
    """What the factory returned.

    Attributes:
        model: the module.
        inputs: a tensor, a tuple of arguments, a dict of keyword arguments, or None.
        targets: what ``loss_fn(outputs, targets)`` gets; None = surplus inputs, or nothing.
        loss_fn: ``loss_fn(outputs, targets)`` or ``loss_fn(outputs)``.
        optimizer: an optimizer, or a function from parameters to one.
        train_step: ``train_step(model, optimizer, inputs)``, a whole step of the user's own.
    """

    model: torch.nn.Module
    inputs: Any = None
    targets: Any = None
    loss_fn: Callable[..., Any] | None = None
    optimizer: Any = None
    train_step: Callable[..., Any] | None = None


def find_factory(spec: str) -> Callable[[], Any]:
    """Import what ``pkg.module:factory`` names, from the current directory or installed.

    Raises:
        ConfigError: the name has another form, or leads nowhere.
    """
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(
            f"--model wants pkg.module:factory, not {spec!r}.",
            hint="Name a function without arguments that builds the model: my_project.model:build",
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as err:
        if err.name is None or not f"{module_name}.".startswith(f"{err.name}."):
            raise
        raise ConfigError(
            f"There is no module {module_name!r} here ({here}) or among the installed ones.",
            hint="Run from the directory from which your program runs.",
        ) from err
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(f"Module {module_name!r} has no function {name!r}.", hint=CONTRACT)
    factory: Callable[[], Any] = found
    return factory


def as_program(built: object) -> Program:
    """Return what a factory gave as a program.

    Raises:
        ConfigError: it is none of the forms in :data:`CONTRACT`.
    """
    if isinstance(built, torch.nn.Module):
        return Program(built)
    if isinstance(built, Sequence) and built and isinstance(built[0], torch.nn.Module):
        pair = 2
        if len(built) == pair:
            return Program(built[0], inputs=built[1])
        return Program(built[0], inputs=tuple(built[1:]))
    if isinstance(built, Mapping):
        fields = {name: built.get(name) for name in NAMES}
    else:
        fields = {name: getattr(built, name, None) for name in NAMES}
    model = fields.pop("model")
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"The factory returned {type(built).__name__}, which holds no model.", hint=CONTRACT
        )
    return Program(model, **fields)


def arguments_of(program: Program) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Return positional arguments, keyword arguments and targets.

    Of several inputs, those beyond what ``forward`` takes are targets, as a data loader gives them.
    """
    targets = () if program.targets is None else (program.targets,)
    inputs = program.inputs
    if isinstance(inputs, Mapping):
        return (), dict(inputs), targets
    if not isinstance(inputs, tuple | list):
        return ((inputs,) if inputs is not None else ()), {}, targets
    n_taken = _n_positional(program.model)
    if targets or n_taken is None:
        return tuple(inputs), {}, targets
    return tuple(inputs[:n_taken]), {}, tuple(inputs[n_taken:])


def _n_positional(model: torch.nn.Module) -> int | None:
    """How many positional arguments ``forward`` takes; None = any number."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD} for p in parameters)


PACKAGE: Final = str(Path(__file__).parents[2])
TORCH: Final = str(Path(torch.__file__).parent)
STDLIB: Final = sysconfig.get_path("stdlib")
LONGEST: Final = 300


@contextmanager
def told_in_one_sentence(spec: str) -> Iterator[None]:
    """Turn whatever the user's code raises into a sentence.

    Raises:
        ConfigError: with the innermost line of the user's code; the cause is kept for --verbose.
    """
    try:
        yield
    except FragdoctorError:
        raise
    except (ImportError, SyntaxError) as err:
        where = _line_of_syntax(err) or innermost_line(err)
        at = f" at {where}" if where else ""
        raise ConfigError(
            f"{spec} failed{at}: {type(err).__name__}: {_first_line(err)}",
            hint="The module must import in this environment: install what it needs here.",
        ) from err
    except SystemExit as err:
        where = innermost_line(err)
        raise ConfigError(
            f"{spec} ended the program{f' at {where}' if where else ''}: SystemExit: {err}",
            hint="Give a factory that builds the model and returns it, not a whole program.",
        ) from err
    except Exception as err:  # the user's code may raise anything
        where = innermost_line(err)
        at = f" at {where}" if where else ""
        if isinstance(err, NotImplementedError):
            raise ConfigError(
                f"{spec}: an operation{at} cannot run on fake tensors: {_first_line(err)}",
                hint="Register a fake kernel with PyTorch's register_fake, or use plain PyTorch "
                "operations in the traced model.",
            ) from err
        raise ConfigError(
            f"{spec} failed{at}: {type(err).__name__}: {_first_line(err)}",
            hint="Your code was run on fake CUDA tensors; does the same step run on a GPU? "
            "--verbose shows the traceback.",
        ) from err


def _line_of_syntax(error: BaseException) -> str:
    """Return where a SyntaxError is; its traceback ends in the importer."""
    if not isinstance(error, SyntaxError) or not error.filename:
        return ""
    return f"{shown(error.filename)}:{error.lineno}"


def innermost_line(error: BaseException) -> str:
    """Return ``file:line in function`` of the innermost frame of the user's code, or ""."""
    found = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith((PACKAGE, TORCH, "<")) or _is_stdlib(frame.filename):
            continue
        found = f"{shown(frame.filename)}:{frame.lineno} in {frame.name}"
    return found


def _is_stdlib(filename: str) -> bool:
    return filename.startswith(STDLIB) and "site-packages" not in filename


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0][:LONGEST]
