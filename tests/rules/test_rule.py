"""How rules are run, skipped and fingerprinted."""

from __future__ import annotations

from oom_messages import case_of
from oom_snapshots import calm, full, holes
from rule_inputs import SHARED_DEVICE

from fragdoctor.diagnosis.pipeline import build_contexts
from fragdoctor.model.case import Case
from fragdoctor.model.finding import Location
from fragdoctor.rules.registry import RULES
from fragdoctor.rules.rule import fingerprint, run_rules


def test_run_rules_every_rule_runs_or_is_skipped_with_a_reason():
    results = run_rules(RULES, build_contexts(Case()))

    assert not results.findings
    skipped = {s.code: s.reason for s in results.skipped}
    assert skipped["FD101"] == "no memory snapshot was given"
    assert skipped["FD402"] == "no memory statistics were given"
    assert all(skipped.values())


def test_run_rules_no_rule_is_skipped_where_its_input_is_there():
    results = run_rules(RULES, build_contexts(Case(snapshot=holes())))

    skipped = {s.code for s in results.skipped}
    assert not skipped & {"FD101", "FD102", "FD103", "FD201", "FD901", "FD904"}


def test_run_rules_findings_are_worst_first():
    results = run_rules(RULES, build_contexts(Case(snapshot=holes())))

    severities = [f.severity for f in results.findings]
    assert sorted(severities, reverse=True) == severities
    assert results.findings[0].code == "FD102"


def test_fingerprint_survives_other_paths_lines_and_addresses():
    here = (Location("/home/a/train.py", 12, "step"),)
    there = (Location("C:\\work\\train.py", 99, "step"),)
    other = (Location("/home/a/train.py", 12, "evaluate"),)

    assert fingerprint("FD101", here) == fingerprint("FD101", there)
    assert fingerprint("FD101", here) != fingerprint("FD101", other)
    assert fingerprint("FD101", here) != fingerprint("FD102", here)


def test_run_rules_quiet_on_a_healthy_snapshot():
    results = run_rules(RULES, build_contexts(Case(snapshot=calm())))

    assert [f.code for f in results.findings] == []


def test_findings_have_numbers_fingerprints_and_one_sentence():
    cases = [Case(snapshot=holes()), Case(snapshot=full()), case_of(SHARED_DEVICE)]
    for case in cases:
        for finding in run_rules(RULES, build_contexts(case)).findings:
            assert finding.message.endswith(".")
            assert finding.fingerprint
            assert len(finding.fingerprint) == 16
