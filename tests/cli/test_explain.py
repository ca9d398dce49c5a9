from __future__ import annotations

import pytest
from command_line import Run

from fragdoctor.rules.registry import RULES
from fragdoctor.rules.rule import HEADINGS


def test_explain_lists_every_rule(run: Run) -> None:
    done = run("explain")

    assert (done.code, done.err) == (0, "")
    for rule in RULES:
        assert rule.code in done.out
        assert rule.name in done.out


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_explain_prints_each_rule_with_all_headings(rule: object, run: Run) -> None:
    code = rule.code  # type: ignore[attr-defined]

    lines = run("explain", code).out.splitlines()

    assert lines[0].startswith(f"{code} ")
    for heading in HEADINGS:
        assert heading.rstrip(".") in lines


@pytest.mark.parametrize("spelling", [RULES[0].code.lower(), RULES[0].name, f" {RULES[0].code} "])
def test_explain_finds_other_spellings(spelling: str, run: Run) -> None:
    assert run("explain", spelling).out.startswith(RULES[0].code)


@pytest.mark.parametrize("wrong", ["FD999", "FD1O1", "nonsense", "FD"])
def test_explain_unknown_code_is_2_and_points_to_the_list(wrong: str, run: Run) -> None:
    done = run("explain", wrong)

    assert (done.code, done.out) == (2, "")
    assert "fragdoctor explain" in done.err


def test_explain_typo_suggests_the_rule(run: Run) -> None:
    assert f"Did you mean {RULES[0].name}?" in run("explain", RULES[0].name[:-1]).err


@pytest.mark.parametrize(
    ("words", "term"),
    [
        (["gradient", "checkpointing"], "activations"),
        (["inactive_split"], "stranded memory"),
        (["PYTORCH_ALLOC_CONF"], "allocator setting"),
        (["pinned memory"], "page-locked memory"),
    ],
)
def test_explain_finds_terms_by_the_words_of_pytorch(words: list[str], term: str, run: Run) -> None:
    assert run("explain", *words).out.startswith(f"{term} ")
