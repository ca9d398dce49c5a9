from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import diagnoses
import jsonschema
import numpy as np
import pytest

import fragdoctor.report
from fragdoctor.model.finding import Evidence
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.json import (
    diagnosis_document,
    dumps,
    error_document,
    oom_document,
    render_diagnosis,
    simulation_document,
)

SCHEMAS = Path(fragdoctor.report.__file__).parent / "schema"
# The fields of the contract, as a caller relies on them.
CONTRACT = {
    "": "schema_version verdict checklist devices pins holders fidelity findings recommendations "
    "rejected",
    "verdict": "cause confidence summary device",
    "checklist": "id title status value detail",
    "devices": "device reserved_bytes allocated_bytes active_bytes requested_bytes "
    "free_cached_bytes releasable_bytes pinned_free_bytes largest_free_block_bytes "
    "peak_allocated_bytes peak_reserved_bytes alloc_retries ooms capacity_bytes n_events",
    "fidelity": "share era reason",
    "recommendations": "rank code title setting locations predicted confidence cost caveats",
    "rejected": "rank code title setting locations predicted confidence cost caveats",
}
MESSAGE_CONTRACT = (
    "kind backend is_device_oom device_index requested_bytes total_bytes free_bytes "
    "allocated_bytes reserved_bytes reserved_unallocated_bytes process_bytes other_processes "
    "private_pools_bytes limit_bytes rank line"
)
RESULT_CONTRACT = (
    "conf capacity_bytes fits oom_event peak_reserved_bytes peak_allocated_bytes "
    "final_reserved_bytes retries ooms driver_calls smallest_capacity_bytes"
)


def schema(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((SCHEMAS / f"{name}-1.0.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(loaded)
    return loaded


def closed(value: Any) -> Any:
    """Return a schema in which every listed object forbids unlisted keys."""
    if isinstance(value, dict):
        value = {k: closed(v) for k, v in value.items()}
        if "properties" in value and value.get("type") == "object":
            value["additionalProperties"] = False
    return [closed(v) for v in value] if isinstance(value, list) else value


def first(document: dict[str, Any], key: str) -> dict[str, Any]:
    value = document[key] if key else document
    return value[0] if isinstance(value, list) else value


@pytest.mark.parametrize("name", diagnoses.ALL)
def test_diagnosis_document_fits_its_schema_exactly(name: str) -> None:
    document = json.loads(render_diagnosis(diagnoses.ALL[name](), RenderOptions()))

    jsonschema.validate(document, schema("diagnosis"))
    jsonschema.validate(document, closed(schema("diagnosis")))


@pytest.mark.parametrize("name", diagnoses.ALL)
def test_oom_document_fits_its_schema_exactly(name: str) -> None:
    document = json.loads(dumps(oom_document(diagnoses.ALL[name]())))

    jsonschema.validate(document, closed(schema("oom")))


def test_simulation_document_fits_its_schema_exactly() -> None:
    document = json.loads(dumps(simulation_document(diagnoses.simulation())))

    jsonschema.validate(document, closed(schema("simulation")))
    assert set(RESULT_CONTRACT.split()) <= set(document["results"][0])
    assert set(RESULT_CONTRACT.split()) <= set(document["baseline"])


def test_error_document_fits_its_schema_exactly() -> None:
    document = error_document("truncated_snapshot", "It ends.", "Copy again.", 12)

    jsonschema.validate(document, closed(schema("error")))
    assert {"error"} == set(document)


@pytest.mark.parametrize("key", CONTRACT)
def test_diagnosis_document_has_the_fields_of_the_contract(key: str) -> None:
    document = diagnosis_document(diagnoses.fragmentation())

    assert set(CONTRACT[key].split()) <= set(first(document, key))


def test_oom_document_messages_have_the_fields_of_the_contract() -> None:
    document = oom_document(diagnoses.several_messages())

    assert set(MESSAGE_CONTRACT.split()) <= set(document["messages"][0])
    assert [m["line"] for m in document["messages"]] == [118, 131, 140]
    assert document["primary"] == 0


def test_diagnosis_document_bytes_are_integers_and_unknown_is_null() -> None:
    document = json.loads(render_diagnosis(diagnoses.two_devices(), RenderOptions()))

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
    document = diagnosis_document(diagnoses.healthy())
    broken = deepcopy(document)
    del broken["verdict"]["cause"]

    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema("diagnosis"))


def test_dumps_output_is_ascii_whatever_the_names_hold() -> None:
    hostile = diagnoses.planted(diagnoses.fragmentation(), "\x1b[2J\u202e\ud800</script>\x9b")

    text = render_diagnosis(hostile, RenderOptions())

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

    values = [e["value"] for e in json.loads(dumps(diagnosis_document(odd)))["verdict"]["evidence"]]

    assert values == [None, 7]
