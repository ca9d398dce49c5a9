"""Write the schemas of the JSON documents from the documents' types.

Run ``python tools/write_schemas.py`` after changing a field; a test compares the files in
``fragdoctor/report/schema`` with the output of this program.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Mapping, Sequence
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

import fragdoctor.report
from fragdoctor.gate.judgement import CheckReport
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.fleet import FleetReport
from fragdoctor.model.gpu_sharing import Sharing
from fragdoctor.model.memory_estimate import Estimate
from fragdoctor.model.prescription import Prescription
from fragdoctor.model.rehearsal import RehearsalResult, RehearsalSweep
from fragdoctor.model.simulation import Simulation
from fragdoctor.report.json import field_names, written
from fragdoctor.report.json_shapes import (
    SHAPES,
    CompareResult,
    ErrorResult,
    GpuTable,
    ModelTable,
    OomResult,
    Shape,
)
from fragdoctor.report.views.explain import Explanation

Json = dict[str, Any]

DOCUMENTS: Final[Mapping[str, tuple[type, str]]] = {
    "diagnosis": (Diagnosis, "analyze"),
    "oom": (OomResult, "oom"),
    "simulation": (Simulation, "simulate"),
    "check": (CheckReport, "check"),
    "compare": (CompareResult, "compare"),
    "fleet": (FleetReport, "analyze RANKS"),
    "estimate": (Estimate, "estimate"),
    "gpus": (GpuTable, "estimate --list-gpus"),
    "models": (ModelTable, "estimate --list-models"),
    "processes": (Sharing, "pack"),
    "explain": (Explanation, "explain"),
    "rehearsal": (RehearsalResult, "rehearse"),
    "rehearsals": (RehearsalSweep, "rehearse --batch LIST"),
    "prescription": (Prescription, "rehearse --cure"),
    "error": (ErrorResult, "COMMAND"),
}
"""Name of a schema -> the type of its document, and the command that prints it."""

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
PROMISE: Final = "Bytes are integers; null is unknown. Within 1.x, fields are only added."
TYPES: Final = "types"
"""The schema with the types that the other schemas refer to."""

_PLAIN: Final[Mapping[Any, Json]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    Any: {},
    types.NoneType: {"type": "null"},
}
_ENTRY: Final = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*)$")


def schemas() -> dict[str, Json]:
    """Return the schema of each document, and of the types that the documents share, by name.

    Every field is required, and additional fields are allowed.
    """
    made = _Schemas()
    found: dict[str, Json] = {}
    for name, (kind, command) in DOCUMENTS.items():
        root = made.object(kind)
        found[name] = {
            "$schema": DIALECT,
            "title": f"fragdoctor {command} --format json",
            "description": PROMISE,
            **{k: v for k, v in root.items() if k != "description"},
        }
    found[TYPES] = {
        "$schema": DIALECT,
        "title": "The types that fragdoctor's documents share",
        "$defs": dict(sorted(made.definitions.items())),
    }
    return found


def pretty(value: Any, indent: str = "", before: int = 0) -> str:
    """Return JSON in which each value that fits on a line of 100 columns takes a single line.

    Args:
        value: the value to write.
        indent: the indent of the line on which the value begins.
        before: number of characters on that line before the value, without the indent.
    """
    line = json.dumps(value)
    if not isinstance(value, dict | list) or len(indent) + before + len(line) < 100:
        return line
    inner = indent + "  "
    items = (
        [(f"{json.dumps(k)}: ", v) for k, v in value.items()]
        if isinstance(value, dict)
        else [("", v) for v in value]
    )
    rows = ",\n".join(f"{inner}{k}{pretty(v, inner, len(k))}" for k, v in items)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{rows}\n{indent}{closing}"


class _Schemas:
    """Collects the definitions that the documents need."""

    def __init__(self) -> None:
        self.definitions: dict[str, Json] = {}
        self._named: dict[str, Any] = {}

    def object(self, kind: type) -> Json:
        """Return the schema of a type with fields."""
        properties = self._properties(kind)
        text = inspect.getdoc(kind) or ""
        return {
            "description": text.split("\n\n")[0].replace("\n", " ").replace("``", ""),
            "type": "object",
            "properties": properties,
            "required": list(properties),
        }

    def _properties(self, kind: type) -> dict[str, Json]:
        shape = SHAPES.get(kind, Shape())
        hints = _hints(kind)
        described = _described(kind)
        found = {name: self.of(hint) for name, (hint, _) in shape.computed.items()}
        for name, key in written(kind):
            if name in shape.inline:
                found |= self._properties(hints[name])
                continue
            made = self.of(hints[name])
            if name in shape.null:
                made = _nullable(made)
            found[key] = {"description": described[name], **made} if name in described else made
        for name in shape.properties:
            found[name] = self.of(get_type_hints(getattr(kind, name).fget)["return"])
        if "schema_version" in found:
            found["schema_version"] = {"type": "string", "pattern": r"^1\.[0-9]+$"}
        return found

    def of(self, hint: Any) -> Json:
        """Return the schema of a type."""
        if hint in _PLAIN:
            return dict(_PLAIN[hint])
        origin, arguments = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            return self._union(arguments)
        if isinstance(origin, type):
            return self._collection(origin, arguments)
        if isinstance(hint, type) and issubclass(hint, IntEnum):
            return {"enum": [m.name.lower() for m in hint]}
        if isinstance(hint, type) and issubclass(hint, Enum):
            return {"enum": [m.value or None for m in hint]}
        if isinstance(hint, type) and field_names(hint):
            return self._reference(hint)
        raise TypeError(f"{hint} has no schema")

    def _collection(self, origin: type, arguments: Sequence[Any]) -> Json:
        if issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        if origin is tuple and Ellipsis not in arguments:
            items = [self.of(a) for a in arguments]
            return {"type": "array", "prefixItems": items, "items": False}
        return {"type": "array", "items": self.of(arguments[0])}

    def _union(self, arguments: Sequence[Any]) -> Json:
        parts = [self.of(a) for a in arguments]
        if all(set(p) == {"type"} for p in parts):
            names = list(dict.fromkeys(p["type"] for p in parts))
            # "number" already covers integers.
            names = [n for n in names if n != "integer" or "number" not in names]
            return {"type": names[0] if len(names) == 1 else names}
        if parts[-1] == {"type": "null"} and len(parts) == 2:
            return _nullable(parts[0])
        return {"anyOf": parts}

    def _reference(self, kind: Any) -> Json:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
        if self._named.setdefault(name, kind) is not kind:
            raise TypeError(f"Two types are called {name}: {kind} and {self._named[name]}")
        if name not in self.definitions:
            self.definitions[name] = {}  # a type may contain itself
            self.definitions[name] = self.object(kind)
        return {"$ref": f"{TYPES}-1.0.schema.json#/$defs/{name}"}


def _nullable(made: Json) -> Json:
    if set(made) == {"type"} and isinstance(made["type"], str):
        return {"type": [made["type"], "null"]}
    if "enum" in made:
        return {"enum": [*made["enum"], None]} if None not in made["enum"] else made
    return {"anyOf": [made, {"type": "null"}]}


def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _described(kind: type) -> dict[str, str]:
    """Return the descriptions of the fields in the docstring's section ``Attributes:``."""
    _, _, section = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        entry = _ENTRY.match(line)
        if entry is not None:
            names = entry.group(1).split(", ")
            found |= dict.fromkeys(names, entry.group(2))
        elif line.startswith(" " * 8) and names:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            names = []
    known = field_names(kind)
    return {k: v.replace("``", "").replace("None", "null") for k, v in found.items() if k in known}


def main() -> None:
    """Write every schema to the package ``fragdoctor.report``."""
    folder = Path(fragdoctor.report.__file__).parent / "schema"
    for name, made in schemas().items():
        (folder / f"{name}-1.0.schema.json").write_text(pretty(made) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
