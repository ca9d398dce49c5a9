"""What runs inside the rehearsed program: fake GPUs, real memory requests.

Nothing here imports more than PyTorch, the standard library and the plain modules of fragdoctor:
the program's Python has its own packages, and need not have fragdoctor's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, Final, NoReturn, TypeVar

_TORCH: Final = find_spec("torch")  # not imported: if it is missing, that is said elsewhere
SEEN_THROUGH: Final = str(
    Path((_TORCH and _TORCH.origin) or "/torch").with_name("nn") / "<fragdoctor>"
)
"""File name for our code that compiled programs run through.

Dynamo skips the engine's files. Code in the folder of ``torch.nn`` it follows, but begins no graph
there: a ``Sequential`` that is compiled by its own method runs eagerly, layer by layer.
"""
_Function = TypeVar("_Function", bound=Callable[..., Any])


def seen_through(function: _Function) -> _Function:
    """Have Dynamo follow a function of the engine where it is called in a graph."""
    function.__code__ = function.__code__.replace(co_filename=SEEN_THROUGH)
    return function


def always(answer: Any) -> Any:
    """Return a function with one answer."""

    def function(*_: Any, **__: Any) -> Any:
        """Answer as always: work on a fake GPU, for example, is done at once."""
        return answer

    return function


nothing: Final = always(None)
"""Stands in for a function that waits, displays or releases something."""


def put(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute for the rest of the process, which ends with the rehearsal."""
    setattr(owner, name, value)


def put_all(owner: Any, values: Mapping[str, Any]) -> None:
    """Replace attributes for the rest of the process."""
    for name, value in values.items():
        setattr(owner, name, value)


def wrapped(original: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``call`` with the original first, then its arguments."""

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    return function


def wrap(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Put ``call`` around a function; see :func:`wrapped`."""
    put(owner, name, wrapped(getattr(owner, name), call))


def swap_all(stand_ins: Mapping[int, Any], *, but: Container[str] = ()) -> None:
    """Put stand-ins for functions into all loaded modules.

    The functions are given by their ``id``. Modules named in ``but`` keep them.
    """
    for module in [m for name, m in [*sys.modules.items()] if name not in but]:
        if isinstance(module, ModuleType):
            for name, value in [*vars(module).items()]:
                if id(value) in stand_ins:
                    put(module, name, stand_ins[id(value)])


def when_imported(changes: Mapping[str, Callable[[Any], None]]) -> None:
    """Change modules, either now or as soon as the program imports them."""

    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        change = changes.get(name)
        spec = None if change is None else PathFinder.find_spec(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is not None and change is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                change(module)

            loader.exec_module = exec_module
        return spec

    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)
    for name, change in changes.items():
        if name in sys.modules:
            change(sys.modules[name])


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those of its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def leave(code: int) -> NoReturn:
    """Exit without Python's own cleanup, since threads of the program may wait forever."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
