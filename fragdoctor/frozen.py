"""Immutable values with named fields: dataclasses that are made in a tenth of the time.

``dataclasses`` writes and compiles six methods for each frozen class, which took a quarter of the
time of a short command. Here one function serves all classes wherever a method is the same but for
the names of the fields. Only ``__init__`` is still compiled, when the first value of a class is
made: half of the classes that a command loads never have one. All else is a dataclass: ``fields``,
``replace``, ``asdict``, ``field(default_factory=...)`` and ``__post_init__`` work as they do there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field, fields
from reprlib import recursive_repr
from typing import Any, TypeVar, dataclass_transform, overload

T = TypeVar("T")


@overload
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T], /) -> type[T]: ...


@overload
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(*, eq: bool = True, kw_only: bool = False) -> Callable[[type[T]], type[T]]: ...


def frozen(
    cls: type[T] | None = None, /, *, eq: bool = True, kw_only: bool = False
) -> type[T] | Callable[[type[T]], type[T]]:
    """As ``dataclass(frozen=True, slots=True, eq=eq, kw_only=kw_only)``, bare or with arguments.

    Two values are equal if they are of the same class and all fields that are compared are equal;
    with ``eq=False`` a value equals only itself. A field that is set cannot be set again
    (:class:`dataclasses.FrozenInstanceError`).
    """

    def made(cls: type[T]) -> type[T]:
        shared: dict[str, Any] = {"__repr__": _text, "__setattr__": _set_once, "__delattr__": _keep}
        if eq:
            shared |= {"__eq__": _equals, "__hash__": _hash}
        for name in shared.keys() - cls.__dict__.keys():
            setattr(cls, name, shared[name])
        new = dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(cls)
        if "__init__" not in new.__dict__:
            _compile_init_later(new)
        return new

    return made if cls is None else made(cls)


def _compile_init_later(cls: type) -> None:
    """Give a class an ``__init__`` that, called for the first time, is replaced by its own."""

    def first(self: object, *args: Any, **kwargs: Any) -> None:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        heir = type(cls)(cls.__name__, (cls,), {**names, "__doc__": cls.__name__, "__slots__": ()})
        cls.__init__ = vars(dataclass(repr=False, eq=False)(heir))["__init__"]  # type: ignore[misc]
        cls.__init__(self, *args, **kwargs)  # type: ignore[misc]

    cls.__init__ = first  # type: ignore[misc]


@recursive_repr()
def _text(self: Any) -> str:
    shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr)
    return f"{type(self).__qualname__}({shown})"


def _set_once(self: object, name: str, value: object) -> None:
    if hasattr(self, name):
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _keep(_self: object, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _compared(value: Any) -> tuple[object, ...]:
    return tuple(getattr(value, f.name) for f in fields(value) if f.compare)


def _equals(self: object, other: object) -> bool:
    if other.__class__ is not self.__class__:
        return NotImplemented  # type: ignore[no-any-return] # Python asks the other value then
    return _compared(self) == _compared(other)


def _hash(self: object) -> int:
    return hash(_compared(self))
