"""Popular claims are corrected where they apply, and only there."""

from __future__ import annotations

from oom_messages import case_of, new_style

from fragdoctor.diagnosis.pipeline import diagnose


def corrections(case):
    return " ".join(diagnose(case).corrections)


def test_corrections_twenty_mib_is_a_segment_not_a_tensor():
    text = new_style("20.00 MiB", "4.00 GiB", "10.00 MiB", "3.98 GiB", "2.00 MiB")

    assert "not necessarily 20.00 MiB" in corrections(case_of(text))
    assert "last straw" not in corrections(case_of(text))


def test_corrections_private_pools_are_free_cache():
    text = new_style(
        "200.00 MiB", "500.00 MiB", "140.00 MiB", "360.00 MiB", "0 bytes", pools="180.00 MiB"
    )

    assert "not live memory" in corrections(case_of(text))
