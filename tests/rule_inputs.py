"""Inputs that show one pattern each, and functions to try a rule on them."""

from __future__ import annotations

from builders import MIB, alloc, block, columns, oom, segment, segment_alloc
from builders import settings as recorded
from builders import snapshot as assembled
from oom_messages import new_style, process
from oom_snapshots import LINE, at

from fragdoctor.diagnosis.pipeline import build_contexts
from fragdoctor.rules.registry import find_rule
from fragdoctor.rules.rule import run_rules

FULL = new_style("48.00 MiB", "2.93 GiB", "12.00 MiB", "2.91 GiB", "7.31 MiB")
SHARED_DEVICE = new_style(
    "128.00 MiB", "8.00 GiB", "68.00 MiB", "1.10 GiB", "20.34 MiB",
    processes=process(4242, "6.35 GiB"), own="1.59 GiB",
)  # fmt: skip


def found(code, case):
    """Return what one rule finds."""
    return list(run_rules([find_rule(code)], build_contexts(case)).findings)


def assert_finds(code, shows, shows_not):
    """Assert that the rule finds its pattern in one case, and nothing in the other."""
    assert {code} == {f.code for f in found(code, shows)}
    assert found(code, shows_not) == []


def settings_snapshot(conf="", **changes):
    """Return a healthy run with this settings string and these recorded settings."""
    low = at(0)
    events = [segment_alloc(low, 20 * MIB), alloc(low, 20 * MIB)]
    return columns(
        assembled(
            segment(low, block(20 * MIB, "active_allocated")),
            events=events,
            conf=recorded(PYTORCH_CUDA_ALLOC_CONF=conf, **changes),
        )
    )


def caught_snapshot():
    """Return a run that continued after a failed request."""
    low = at(0)
    events = [
        oom(4000 * MIB, 500 * MIB, frames=LINE),
        segment_alloc(low, 20 * MIB),
        alloc(low, 20 * MIB),
    ]
    return columns(assembled(segment(low, block(20 * MIB, "active_allocated")), events=events))
