"""Popular claims are corrected where they apply, and only there."""

from __future__ import annotations

from oom_messages import case_of, new_style
from oom_snapshots import calm

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.model.case import Case


def corrections(case):
    return " ".join(diagnose(case).corrections)


def test_corrections_full_device_contradict_the_printed_hint():
    text = new_style("48.00 MiB", "2.93 GiB", "12.00 MiB", "2.91 GiB", "7.31 MiB")

    assert "unconditionally" in corrections(case_of(text))


def test_corrections_fragmentation_leaves_the_hint_alone():
    text = new_style("500.00 MiB", "3.81 GiB", "488.00 MiB", "2.67 GiB", "673.42 MiB")

    assert "unconditionally" not in corrections(case_of(text))
    assert "empty_cache" in corrections(case_of(text))


def test_corrections_twenty_mib_is_a_segment_not_a_tensor():
    text = new_style("20.00 MiB", "4.00 GiB", "10.00 MiB", "3.98 GiB", "2.00 MiB")

    assert "not necessarily 20 MiB" in corrections(case_of(text))
    assert "last straw" not in corrections(case_of(text))


def test_corrections_private_pools_are_free_cache():
    text = new_style(
        "200.00 MiB", "500.00 MiB", "140.00 MiB", "360.00 MiB", "0 bytes", pools="180.00 MiB"
    )

    assert "not live memory" in corrections(case_of(text))


def test_corrections_own_process_in_a_container():
    text = new_style(
        "1.00 GiB", "14.75 GiB", "0.80 GiB", "13.20 GiB", "622.00 MiB",
        processes="Process 5543 has 13.94 GiB memory in use. ",
    )  # fmt: skip

    assert "Process 5543 is not another process" in corrections(case_of(text))


def test_corrections_harmless_cache_against_the_rule_of_thumb():
    assert "30%" in corrections(Case(snapshot=calm()))
