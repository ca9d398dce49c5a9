"""JSON: the same facts as the text, with byte counts as integers and unknowns as null.

The documents follow the types of the model, except where ``json_shapes`` says otherwise.
``schema/*.schema.json`` describe them; ``tools/write_schemas.py`` makes them from the same types.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum, IntEnum
from functools import cache
from typing import Any

from fragdoctor.report import escape
from fragdoctor.report.json_shapes import SHAPES, WRAPPERS, ErrorFacts, ErrorResult, Shape

Json = dict[str, Any]


def document_of(view: str, result: Any, **more: Any) -> Json:
    """Return the document of a command as plain values.

    ``view`` is a key of ``base.VIEWS``; ``more`` holds further arguments of that view.
    """
    wrap = WRAPPERS.get(view)
    document: Json = plain(result if wrap is None else wrap(result, **more))
    return document


def error_document(code: str, message: str, hint: str, offset: int | None) -> Json:
    """Return the document to write to standard output when there is no result."""
    document: Json = plain(ErrorResult(ErrorFacts(code, message, hint, offset)))
    return document


def dumps(document: Json) -> str:
    """Return a document as ASCII JSON, ending in a newline.

    Everything beyond ASCII is written as an escape, so that no control or bidirectional character
    reaches a terminal; numbers that JSON cannot express become null.
    """
    return json.dumps(plain(document), indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def plain(value: Any) -> Any:  # noqa: PLR0911 - one line a type
    """Return a value in JSON's types: numbers, strings, lists and objects."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return value.name.lower() if isinstance(value, IntEnum) else value.value or None
    if isinstance(value, str):
        return escape.json_text(str(value))
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if field_names(value.__class__):
        return _object(value)
    if isinstance(value, Mapping):
        return {escape.json_text(str(k)): plain(v) for k, v in value.items()}
    if isinstance(value, Sequence | AbstractSet):
        return [plain(v) for v in value]
    if hasattr(value, "item"):  # a numpy scalar
        return plain(value.item())
    return escape.json_text(str(value))


def _object(value: Any) -> Json:
    shape = SHAPES.get(type(value), Shape())
    document: Json = {name: plain(read(value)) for name, (_, read) in shape.computed.items()}
    for name, key in written(value.__class__):
        inner = getattr(value, name)
        if name in shape.inline:
            document |= _object(inner)
        else:
            document[key] = None if name in shape.null and not inner else plain(inner)
    for name in shape.properties:
        document[name] = plain(getattr(value, name))
    return document


@cache
def field_names(kind: type) -> tuple[str, ...]:
    """Return the fields of a type, or an empty tuple if it has none.

    Types that are also used inside the user's program are dataclasses, all others ``Struct``.
    """
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    names: tuple[str, ...] = getattr(kind, "__struct_fields__", ())
    return names


@cache
def written(kind: type) -> tuple[tuple[str, str], ...]:
    """Return the fields of a type that go into a document, each with its key."""
    shape = SHAPES.get(kind, Shape())
    names = field_names(kind)
    kept = [n for n in names if (not shape.only or n in shape.only) and n not in shape.without]
    keyed = ((n, shape.names.get(n, n)) for n in kept)
    return tuple((n, key) for n, key in keyed if key not in shape.computed)
