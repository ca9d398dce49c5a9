"""Names a way through objects as the program would: ``agent.buffer[3]['obs']``."""

from __future__ import annotations

import itertools
import types
from collections import OrderedDict, deque
from typing import Any

from .object_search import Root, class_is, dict_of, frame_locals

CONTAINERS = (list, tuple, dict, set, frozenset, deque)
INSIDE_MODULES = ("_parameters", "_buffers", "_modules")
_MAX_KEY = 40
_MAX_NAME = 300
_SEARCHED = 100_000


def container_of(value: Any) -> type | None:
    """Return which built-in container a value is, or None if it is not one."""
    return next((c for c in CONTAINERS if class_is(type(value), c)), None)


def way_name(root: Root, way: list[Any]) -> str:
    """Return the name of the last object on a way that begins with the value of a root."""
    value, rest, name = root.value, way[1:], root.name
    if name in ("self", "cls") and root.place is not None:
        kind = value if class_is(type(value), type) else type(value)
        name = class_name(kind)
    parts = [name]
    keeper: Any = None  # the instance whose attributes ``value`` is
    is_module_part = False
    for child in rest:
        attributes = None if container_of(value) else dict_of(value)
        if attributes is child:
            keeper, value = value, child
            continue
        names = value if keeper is not None else None
        if keeper is None and not is_module_part and attributes is not None:
            is_attribute = any(v is child for v in list(attributes.values()))
            names = attributes if is_attribute else None
        if names is not None:
            key = _key_of(names, child)
            # By identity: a metaclass may have its own __eq__.
            is_dict = any(type(child) is kind for kind in (dict, OrderedDict))
            is_module_part = key in INSIDE_MODULES and is_dict
            if not is_module_part:
                parts.append(f".{key}")
        elif is_module_part:
            parts.append(f".{_key_of(value, child)}")
            is_module_part = False
        else:
            parts.append(_step(value, child))
        keeper, value = None, child
    # Repeated parts, as from a linked list, appear only once.
    kept = [p for i, p in enumerate(parts) if i < 2 or not (p == parts[i - 1] == parts[i - 2])]
    return "".join(kept)[:_MAX_NAME]


def class_name(kind: type) -> str:
    """Return the bare name of a class."""
    return str(type.__dict__["__name__"].__get__(kind))


def _step(value: Any, child: Any) -> str:  # noqa: PLR0911 - one line a type
    """Return how one object holds another, in Python syntax if possible."""
    kind = type(value)
    if any(k is types.CellType for k in (type(child), kind)) or kind is types.MethodType:
        return ""
    container = container_of(value)
    if container is not None:
        return _item(value, child, container)
    if type(child) is types.FrameType:
        return f" -> frame {child.f_code.co_name}()"
    frame = next((name for k, name in _RUNNING if k is kind), None)
    if kind is types.FrameType or frame is not None:
        return _local(value if frame is None else getattr(value, frame), child)
    if kind is types.FunctionType or kind is types.TracebackType:
        return ""
    if class_is(kind, BaseException) and type(child) is types.TracebackType:
        return " -> traceback"
    return _slot(value, child)


_RUNNING: tuple[tuple[type, str], ...] = (
    (types.GeneratorType, "gi_frame"),
    (types.CoroutineType, "cr_frame"),
    (types.AsyncGeneratorType, "ag_frame"),
)


def _item(value: Any, child: Any, container: type) -> str:
    if container is dict:
        key = _key_of(value, child)
        return f"[{key!r}]" if key else "[...]"
    if container is not list and container is not tuple:
        return "[...]"
    items = container.__getitem__(value, slice(_SEARCHED))
    place = next((i for i, v in enumerate(items) if v is child), None)
    return "[...]" if place is None else f"[{place}]"


def _local(frame: types.FrameType | None, child: Any) -> str:
    names = {} if frame is None else frame_locals(frame)
    found = next((k for k, v in names.items() if v is child), "")
    return f" -> {found}" if found else ""


def _slot(value: Any, child: Any) -> str:
    """Return the attribute of an instance with ``__slots__``, or "" if a built-in type holds it."""
    for c in type.__dict__["__mro__"].__get__(type(value)):
        for name, member in list(type.__dict__["__dict__"].__get__(c).items()):
            if type(member) is types.MemberDescriptorType:
                try:
                    if member.__get__(value) is child:
                        return f".{name}"
                except AttributeError:
                    continue
    return ""


def _key_of(names: Any, child: Any) -> str:
    """Return the key of a value in a dict, or "" if the key is not plain text or a number."""
    for key, value in itertools.islice(list(dict.items(names)), _SEARCHED):
        if value is child:
            is_plain = type(key) is str or type(key) is int
            return str(key)[:_MAX_KEY] if is_plain else ""
    return ""
