"""Finds objects of the program from its names: breadth first, without running its code.

Objects are read as the collector reads them (``gc.get_referents``) and by slots of built-in types:
no attribute of a program's object is looked up, no key of its compared, hashed or printed.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PYTHON = os.path.dirname(os.path.abspath(os.__file__))
_OWN_GROUPS = 3
"""The first groups of ``root_groups``: the user's own names."""

_OPTIMIZED = 0x1  # inspect.CO_OPTIMIZED: locals of a function, which f_locals copies
_NO_VALUES = (
    int, float, complex, str, bytes, bytearray, bool, type(None), types.CodeType,
    types.BuiltinFunctionType, types.ModuleType, types.WrapperDescriptorType, property,
    types.GetSetDescriptorType, types.MemberDescriptorType, type(len), type(threading.Lock()),
)  # fmt: skip
_type_dict = type.__dict__["__dict__"].__get__
_type_mro = type.__dict__["__mro__"].__get__


module_globals: Any = types.ModuleType.__dict__["__dict__"].__get__  # type: ignore[index]


class Root(NamedTuple):
    """A name of the program from which objects are reached.

    Attributes:
        name: name of the variable.
        value: its value.
        scope: ``train()``, the function whose local variable it is; "" for a global.
        place: file, line and function of the frame; None for a global.
    """

    name: str
    value: Any
    scope: str
    place: tuple[str, int, str] | None


def is_users(filename: str) -> bool:
    """Return whether a file is the user's own: neither installed nor part of Python itself."""
    return not (
        "site-packages" in filename
        or "dist-packages" in filename
        or filename.startswith((_HERE, _PYTHON, "<frozen", "<string>", "<__array"))
    )


def class_is(kind: type, base: type) -> bool:
    """Return whether a class derives from another, without calling either of them."""
    return any(c is base for c in _type_mro(kind))


def dict_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an instance or class, or None if it has none of its own."""
    if class_is(type(value), type):
        names = (d for d in gc.get_referents(value) if type(d) is dict)
        return next((d for d in names if "__module__" in d), None)
    for c in _type_mro(type(value)):
        found = _type_dict(c).get("__dict__")
        if found is not None:
            if type(found) is not types.GetSetDescriptorType:
                return None
            result = found.__get__(value)
            return result if type(result) is dict else None
    return None


def frame_locals(frame: types.FrameType) -> dict[str, Any]:
    """Return the locals of a frame, without the frame holding any of them longer than before.

    Up to Python 3.12, a frame keeps the dict that it shows, with everything in it; if nobody else
    has that dict, its copies of locals are removed again.
    """
    shown = frame.f_locals
    found = {k: v for k, v in list(shown.items()) if type(k) is str}
    code = frame.f_code
    if code.co_flags & _OPTIMIZED and type(shown) is dict and sys.getrefcount(shown) <= 3:
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            shown.pop(name, None)
    del shown  # a profiler may hold this frame: the next look would see another holder
    return found


def running_frames() -> list[types.FrameType]:
    """Return the frames of all threads, outermost first; this thread's frames come first."""
    found: list[types.FrameType] = []
    me = threading.get_ident()
    frames = sys._current_frames()
    for thread in sorted(frames, key=lambda t: t != me):
        stack = []
        frame: types.FrameType | None = frames[thread]
        while frame is not None:
            if not frame.f_code.co_filename.startswith(_HERE):
                stack.append(frame)
            frame = frame.f_back
        found += reversed(stack)
    # It holds the frame that is running here: a cycle that keeps all frames with their locals.
    frames.clear()
    return found


def root_groups() -> Iterator[list[Root]]:
    """Yield the names of the program, starting with those that its author knows best."""
    frames = running_frames()
    own = [f for f in frames if is_users(f.f_code.co_filename)]
    modules = [(n, m) for n, m in list(sys.modules.items()) if is_others_module(m)]
    mine = [(n, m) for n, m in modules if n == "__main__" or is_users(_file_of(m))]
    yield [
        *(r for n, m in mine if n == "__main__" for r in _globals(n, m)),
        *(r for f in own if f.f_code.co_flags & _OPTIMIZED for r in _locals(f)),
        *(r for f in own if not f.f_code.co_flags & _OPTIMIZED for r in _main_like(f, mine)),
    ]
    yield [r for n, m in mine if n != "__main__" for r in _globals(n, m)]
    yield _exceptions()
    others = [f for f in frames if f.f_code.co_flags & _OPTIMIZED and not any(f is o for o in own)]
    yield [r for f in others for r in _locals(f)]


def module_dicts() -> dict[int, str]:
    """Return the names of all modules by the IDs of the dicts that hold their globals."""
    found = [(n, module_globals(m)) for n, m in list(sys.modules.items()) if is_others_module(m)]
    return {id(names): n for n, names in found if names is not None}


def is_others_module(value: Any) -> bool:
    """Return whether a value of ``sys.modules`` is a module other than ours."""
    return class_is(type(value), types.ModuleType) and not _file_of(value).startswith(_HERE)


def _file_of(module: Any) -> str:
    names = module_globals(module)
    file = names.get("__file__") if names else None
    return file if type(file) is str else "<frozen"


def _globals(name: str, module: Any) -> list[Root]:
    before = "" if name == "__main__" else f"{name}."
    names = module_globals(module) or {}
    pairs = list(names.items())
    return [Root(before + k, v, "", None) for k, v in pairs if type(k) is str and k[:2] != "__"]


def _locals(frame: types.FrameType) -> list[Root]:
    code = frame.f_code
    place = (code.co_filename, frame.f_lineno or 0, code.co_name)
    found = frame_locals(frame)
    return [Root(k, v, f"{code.co_name}()", place) for k, v in found.items() if k[:2] != "__"]


def _main_like(frame: types.FrameType, modules: list[tuple[str, Any]]) -> list[Root]:
    """Return the names of code that runs at top level but not as a module: ``runpy``, ``exec``."""
    names = frame.f_globals
    if any(module_globals(m) is names for _, m in modules):
        return []
    return [Root(k, v, "", None) for k, v in list(names.items()) if type(k) is str]


def _exceptions() -> list[Root]:
    """Return the exceptions being handled; their tracebacks keep frames."""
    current = getattr(sys, "_current_exceptions", None)
    found = [sys.exc_info()] if current is None else list(current().values())
    values = [e[1] if type(e) is tuple else e for e in found]
    values.append(getattr(sys, "last_value", None))
    return [Root("exception", e, "", None) for e in values if e is not None]


class ObjectSearch:
    """A walk from the names of the program to what they lead to, by the shortest way to each.

    Args:
        needed: IDs of the objects that are searched for to the end.
        wanted: IDs of further objects, searched for only below the user's own names.
        hidden: IDs of objects that no way may lead through: those that the search itself made.
        deadline: time by ``time.thread_time`` at which the search ends.

    Attributes:
        objects, parents: each object reached, and the index of the one before it; the value of the
            i-th of ``roots`` has ``-1 - i``.
        places: ID of an object -> its index here.
        is_complete: whether all needed objects were found, or nothing more is left to see.
    """

    def __init__(
        self, needed: set[int], wanted: set[int], hidden: set[int], deadline: float
    ) -> None:
        self.objects: list[Any] = []
        self.parents: list[int] = []
        self.roots: list[Root] = []
        self.places: dict[int, int] = {}
        self.is_complete = True
        self._missing = set(needed)
        self._wanted = wanted - needed
        self._hidden = hidden
        self._deadline = deadline
        self._leads: dict[int, bool] = {}
        self._metaclasses: set[int] = set()
        self._is_own_class: dict[int, bool] = {}

    def run(self) -> None:
        """Search name group by name group until all targets are found or time is up."""
        self._hidden |= {id(self), id(self.__dict__), id(self.objects), id(self.parents)}
        self._hidden |= {id(self.roots), id(self.places), id(self._missing), id(self._hidden)}
        for i, group in enumerate(root_groups()):
            if i >= _OWN_GROUPS:
                self._wanted = set()
                if not self._missing:
                    return
            self._hidden.add(id(group))
            begin = len(self.objects)
            for root in group:
                self._hidden.add(id(root))
                self._reach(root.value, -1 - len(self.roots))
                self.roots.append(root)
            if not self._walk(begin):
                self.is_complete = not self._missing
                return

    def _walk(self, begin: int) -> bool:
        objects, at = self.objects, begin
        while at < len(objects) and (self._missing or self._wanted):
            if at % 256 == 0 and time.thread_time() > self._deadline:
                return False
            children = self._children(objects[at])
            for i, child in enumerate(children):
                if i % 4096 == 4095 and time.thread_time() > self._deadline:
                    return False
                self._reach(child, at)
            at += 1
        return True

    def _reach(self, value: Any, parent: int) -> None:
        number = id(value)
        # A class is identified by its ID: its metaclass may have its own hash.
        if number in self.places or number in self._hidden or not gc.is_tracked(value):
            return
        kind = type(value)
        leads = self._leads.get(id(kind))
        if leads is None:
            leads = self._leads[id(kind)] = not any(class_is(kind, c) for c in _NO_VALUES)
            if class_is(kind, type):
                self._metaclasses.add(id(kind))
        if not leads or (id(kind) in self._metaclasses and not self._is_users_class(value)):
            return
        self.places[number] = len(self.objects)
        self.objects.append(value)
        self.parents.append(parent)
        self._missing.discard(number)
        self._wanted.discard(number)

    def _children(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind is types.FunctionType:
            return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
        if kind is types.FrameType:
            if value.f_code.co_filename.startswith(_HERE):
                return []
            return list(frame_locals(value).values())
        return gc.get_referents(value)

    def _is_users_class(self, kind: Any) -> bool:
        known = self._is_own_class.get(id(kind))
        if known is None:
            name = _type_dict(kind).get("__module__")
            module = sys.modules.get(name) if type(name) is str else None
            known = name == "__main__" or (module is not None and is_users(_file_of(module)))
            self._is_own_class[id(kind)] = known
        return known

    def way(self, place: int) -> tuple[Root, list[Any]]:
        """Return the name from which an object was reached, and the objects on the way to it."""
        found = []
        while place >= 0:
            found.append(self.objects[place])
            place = self.parents[place]
        return self.roots[-1 - place], found[::-1]
