"""The JSON documents: the contract of today is kept, and the schemas are those of the types."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import checks
import diagnoses
import jsonschema
import numpy as np
import pytest
from msgspec.structs import replace
from schemas import SCHEMAS, must_fit, must_fit_exactly, schema
from write_schemas import schemas

from fragdoctor.model.finding import Evidence
from fragdoctor.report.base import RenderOptions, render
from fragdoctor.report.json import document_of, dumps, error_document
from fragdoctor.report.views.explain import find

MADE = schemas()
RESULTS: dict[str, tuple[str, Any]] = {
    **{f"diagnosis-{n}": ("analyze", make) for n, make in diagnoses.ALL.items()},
    **{f"oom-{n}": ("oom", make) for n, make in diagnoses.ALL.items()},
    **{f"check-{n}": ("check", make) for n, make in checks.ALL.items()},
    "simulation": ("simulate", diagnoses.simulation),
    "explain": ("explain", lambda: find(None)),
}


@pytest.mark.parametrize("name", MADE)
def test_schema_is_that_of_the_types(name: str) -> None:
    """After a change of a field: python tools/write_schemas.py"""
    assert MADE[name] == schema(name)


def test_every_schema_is_made() -> None:
    assert {p.name for p in SCHEMAS.iterdir()} == {f"{name}-1.0.schema.json" for name in MADE}


PROMISED = {
    "oom": "messages verdict checklist findings recommendations",
    "diagnosis": "verdict checklist devices stranders holders fidelity findings recommendations "
    "rejected",
    "simulation": "baseline results fidelity",
    "error": "error",
}
PROMISED_OF_TYPES = {
    "oom_message": "kind backend is_device_oom device_index requested_bytes total_bytes free_bytes "
    "allocated_bytes reserved_bytes reserved_unallocated_bytes process_bytes other_processes "
    "private_pools_bytes limit_bytes rank line",
    "verdict": "cause confidence summary device outlook",
    "checklist_item": "id title status value detail",
    "device_figures": "device reserved_bytes allocated_bytes active_bytes requested_bytes "
    "free_cached_bytes releasable_bytes stranded_free_bytes largest_free_block_bytes "
    "peak_allocated_bytes peak_reserved_bytes alloc_retries ooms capacity_bytes n_events",
    "fidelity_report": "share era reason",
    "recommendation": "rank code title setting locations predicted confidence cost caveats",
    "predicted": "fits peak_reserved_bytes retries method outlook",
    "outlook": "state steps fails_after_steps needs_bytes peak_reserved_bytes "
    "growth_bytes_per_step basis reason likely",
    "error_facts": "code message hint offset",
    "rehearsed_oom": "step event requested_bytes location",
}
"""Scripts and CI jobs of users read these names."""


@pytest.mark.parametrize("name", PROMISED)
def test_document_keeps_the_fields_that_were_promised(name: str) -> None:
    assert set(PROMISED[name].split()) <= set(schema(name)["properties"])


@pytest.mark.parametrize("name", PROMISED_OF_TYPES)
def test_type_keeps_the_fields_that_were_promised(name: str) -> None:
    assert set(PROMISED_OF_TYPES[name].split()) <= set(schema("types")["$defs"][name]["properties"])


@pytest.mark.parametrize("name", RESULTS)
def test_document_fits_its_schema_exactly(name: str) -> None:
    view, make = RESULTS[name]
    kind = name.split("-", maxsplit=1)[0]

    document = json.loads(render(view, "json", make(), RenderOptions()))

    must_fit_exactly(document, kind)


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
        Evidence("nan", float("nan"), "count", "x"),  # type: ignore[arg-type]
        Evidence("numpy", np.int64(7), "bytes", "x"),  # type: ignore[arg-type]
    )
    odd = replace(one, verdict=replace(one.verdict, evidence=evidence))

    document = json.loads(dumps(document_of("analyze", odd)))

    assert [e["value"] for e in document["verdict"]["evidence"]] == [None, 7]
