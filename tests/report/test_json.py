"""The JSON documents: the contract of today is kept, and the schemas are those of the types."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import checks
import diagnoses
import jsonschema
import numpy as np
import pytest
from schemas import SCHEMAS, must_fit, must_fit_exactly, schema
from write_schemas import DOCUMENTS
from write_schemas import schema as made_schema

from fragdoctor.model.finding import Evidence
from fragdoctor.report.base import RenderOptions, render
from fragdoctor.report.json import document_of, dumps, error_document
from fragdoctor.report.views.explain import find

FIRST = Path(__file__).parent / "schema_1_0"
"""The schemas of the first version: what was promised then still holds."""

RESULTS: dict[str, tuple[str, Any]] = {
    **{f"diagnosis-{n}": ("analyze", make) for n, make in diagnoses.ALL.items()},
    **{f"oom-{n}": ("oom", make) for n, make in diagnoses.ALL.items()},
    **{f"check-{n}": ("check", make) for n, make in checks.ALL.items()},
    "simulation": ("simulate", diagnoses.simulation),
    "explain": ("explain", lambda: find(None)),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_schema_is_that_of_the_types(name: str) -> None:
    """After a change of a field: python tools/write_schemas.py"""
    assert made_schema(name) == schema(name)


def keys(node: Any, path: str = "") -> set[str]:
    """Return the paths of all keys that a schema lists, with its references followed."""
    root = node

    def walk(node: Any, path: str, seen: tuple[str, ...]) -> set[str]:
        found: set[str] = set()
        if isinstance(node, list):
            return found.union(*(walk(n, path, seen) for n in node))
        if not isinstance(node, dict):
            return found
        reference = node.get("$ref")
        if reference and reference not in seen:
            target = root["$defs"][reference.rsplit("/", 1)[-1]]
            found |= walk(target, path, (*seen, reference))
        for key, inner in node.get("properties", {}).items():
            found |= {f"{path}.{key}"} | walk(inner, f"{path}.{key}", seen)
        for part in ("items", "anyOf", "allOf", "oneOf"):
            found |= walk(node.get(part), path, seen)
        return found

    return walk(node, path, ())


@pytest.mark.parametrize("path", sorted(FIRST.iterdir()), ids=lambda path: path.name.split("-1")[0])
def test_schema_lists_every_key_of_the_first_version(path: Path) -> None:
    now = keys(json.loads((SCHEMAS / path.name).read_text()))

    assert keys(json.loads(path.read_text())) - now == set()


@pytest.mark.parametrize("name", RESULTS)
def test_document_fits_its_schema_exactly_and_that_of_the_first_version(name: str) -> None:
    view, make = RESULTS[name]
    kind = name.split("-", maxsplit=1)[0]

    document = json.loads(render(view, "json", make(), RenderOptions()))

    must_fit_exactly(document, kind)
    if (FIRST / f"{kind}-1.0.schema.json").exists():
        must_fit(document, kind, folder=FIRST)


def test_error_document_fits_its_schema_exactly() -> None:
    document = error_document("truncated_snapshot", "It ends.", "Copy again.", 12)

    must_fit_exactly(document, "error")
    assert {"error"} == set(document)


def test_oom_document_has_the_messages_in_their_order() -> None:
    document = document_of("oom", diagnoses.several_messages())

    assert [m["line"] for m in document["messages"]] == [118, 131, 140]
    assert document["primary"] == 0


def test_document_bytes_are_integers_and_unknown_is_null() -> None:
    document = json.loads(render("analyze", "json", diagnoses.two_devices(), RenderOptions()))

    def walk(value: Any, key: str = "") -> None:
        if isinstance(value, dict):
            for k, v in value.items():
                walk(v, k)
        elif isinstance(value, list):
            for v in value:
                walk(v, key)
        elif key.endswith("_bytes"):
            assert value is None or type(value) is int, key

    walk(document)
    assert document["devices"][1]["peak_reserved_bytes"] is None


def test_schema_missing_field_is_refused() -> None:
    broken = deepcopy(document_of("analyze", diagnoses.healthy()))
    del broken["verdict"]["cause"]

    with pytest.raises(jsonschema.ValidationError):
        must_fit(broken, "diagnosis")


def test_dumps_output_is_ascii_whatever_the_names_hold() -> None:
    hostile = diagnoses.planted(diagnoses.fragmentation(), "\x1b[2J\u202e\ud800</script>\x9b")

    text = render("analyze", "json", hostile, RenderOptions())

    assert text.isascii()
    assert "\x1b" not in text
    assert "\\ud800" not in text
    assert json.loads(text)["verdict"]["summary"] == "\x1b[2J\u202e\ufffd</script>\x9b"


def test_dumps_numbers_that_json_lacks_become_null() -> None:
    one = diagnoses.healthy()
    evidence = (
        Evidence("nan", float("nan"), "share", "x"),
        Evidence("numpy", np.int64(7), "bytes", "x"),  # type: ignore[arg-type]
    )
    odd = replace(one, verdict=replace(one.verdict, evidence=evidence))

    document = json.loads(dumps(document_of("analyze", odd)))

    assert [e["value"] for e in document["verdict"]["evidence"]] == [None, 7]
