"""The schemas of the JSON documents; each is read, and checked to be valid, once per process."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from referencing import Registry, Resource

import fragdoctor.report

SCHEMAS = Path(fragdoctor.report.__file__).parent / "schema"


@cache
def schema(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(
        (SCHEMAS / f"{name}-1.0.schema.json").read_text(encoding="utf-8")
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


def must_fit(document: Any, name: str) -> None:
    _validator(name, is_closed=False).validate(document)


def must_fit_exactly(document: Any, name: str) -> None:
    """Also fail if the document holds a key that its schema does not list."""
    _validator(name, is_closed=True).validate(document)


@cache
def _validator(name: str, *, is_closed: bool) -> jsonschema.Draft202012Validator:
    whole, shared = (closed(s) if is_closed else s for s in (schema(name), schema("types")))
    registry = Registry().with_resource("types-1.0.schema.json", Resource.from_contents(shared))
    return jsonschema.Draft202012Validator(whole, registry=registry)
