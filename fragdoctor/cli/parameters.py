"""Commands from dataclasses: each option stands in one place, with its default and its help."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, TypeVar, get_type_hints

from typer.models import ArgumentInfo

_Options = TypeVar("_Options")


def command_of(kind: type[_Options], call: Callable[[_Options], int]) -> Callable[..., int]:
    """Return a command whose parameters are the fields of a dataclass.

    Args:
        kind: the dataclass; its fields are annotated as typer's parameters are.
        call: what the command does, given its options.
    """
    return command_with(parameters_of(kind), lambda **values: call(kind(**values)))


def command_with(
    parameters: Sequence[inspect.Parameter], call: Callable[..., int]
) -> Callable[..., int]:
    """Return a command with these parameters, which calls a function with their values by name."""

    def command(**values: Any) -> int:
        return call(**values)

    command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": int}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def parameters_of(kind: type) -> list[inspect.Parameter]:
    """Return the fields of a dataclass as parameters: arguments, its own, then inherited ones.

    The nearer the class that has a field, the sooner it comes.
    """
    hints = get_type_hints(kind, include_extras=True)
    found = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(field),
            annotation=hints[field.name],
        )
        for field in fields(kind)
    ]
    level = {
        name: i
        for i, base in reversed([*enumerate(kind.__mro__)])
        for name in vars(base).get("__annotations__", ())
    }
    return sorted(found, key=lambda p: (not isinstance(_info(p), ArgumentInfo), level[p.name]))


def hidden(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter that works and is not in the help."""
    info = copy(_info(parameter))
    info.hidden = True
    base = parameter.annotation.__origin__
    return parameter.replace(annotation=Annotated[base, info])


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default


def _info(parameter: inspect.Parameter) -> Any:
    return parameter.annotation.__metadata__[0]
