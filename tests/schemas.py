"""The schemas of the JSON documents: each is read, and checked to be one, once in a process."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

import fragdoctor.report

SCHEMAS = Path(fragdoctor.report.__file__).parent / "schema"


@cache
def schema(name: str, folder: Path = SCHEMAS) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(
        (folder / f"{name}-1.0.schema.json").read_text(encoding="utf-8")
    )
    jsonschema.Draft202012Validator.check_schema(loaded)
    return loaded


def closed(value: Any) -> Any:
    """Return a schema in which every listed object forbids unlisted keys."""
    if isinstance(value, dict):
        value = {k: closed(v) for k, v in value.items()}
        if "properties" in value and value.get("type") == "object":
            value["additionalProperties"] = False
    return [closed(v) for v in value] if isinstance(value, list) else value


def must_fit(document: Any, name: str, *, folder: Path = SCHEMAS) -> None:
    _validator(name, folder, is_closed=False).validate(document)


def must_fit_exactly(document: Any, name: str) -> None:
    """Fail also where the document holds a key that its schema does not list."""
    _validator(name, SCHEMAS, is_closed=True).validate(document)


@cache
def _validator(name: str, folder: Path, *, is_closed: bool) -> jsonschema.Draft202012Validator:
    whole = schema(name, folder)
    return jsonschema.Draft202012Validator(closed(whole) if is_closed else whole)
