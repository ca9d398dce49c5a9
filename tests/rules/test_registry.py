"""The table of rules: complete, sorted, documented."""

from __future__ import annotations

import pytest

from fragdoctor.model.finding import Severity
from fragdoctor.rules.registry import RULES, explanation, find_rule
from fragdoctor.rules.rule import HEADINGS


def test_registry_is_sorted_by_unique_code():
    codes = [rule.code for rule in RULES]

    assert sorted(set(codes)) == codes
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_rule_is_documented_under_every_heading(rule):
    for heading, text in explanation(rule.text):
        assert text, f"{rule.code} lacks {heading}"
    assert "/" not in dict(explanation(rule.text))["References"].replace("http://", "")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_rule_attributes_are_well_formed(rule):
    assert rule.code.startswith("FD")
    assert rule.code[2:].isdigit()
    assert rule.summary
    assert not rule.summary.endswith(".")
    assert rule.severity in Severity


def test_headings_are_the_seven_of_the_contract():
    assert len(HEADINGS) == 7


def test_find_rule_takes_code_or_name_in_any_case():
    assert find_rule("fd101") is find_rule("Stranded-Free-Memory")
    assert find_rule("FD999") is None
