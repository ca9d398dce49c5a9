"""When growth is worth a verdict rather than a line in the table."""

from __future__ import annotations

from typing import Final

from fragdoctor.analysis.result import DeviceAnalysis, Growth
from fragdoctor.rules.context import Context

STEADY_SHARE: Final = 0.8
"""A leak grows in nearly every step; caches and warm-up stop after the first ones."""

MIN_STEPS: Final = 4
"""Fewer steps cannot tell growth from the filling of buffers and optimizer state."""

MANY_STEPS: Final = 8
"""Something kept every tenth step is a leak too, once it was seen often enough."""

LARGE_SHARE: Final = 0.05
"""Survivors of at least a twentieth of live memory: less is no reason for a verdict."""


def leading_growth(context: Context, analysis: DeviceAnalysis) -> Growth | None:
    """Return the growth that a verdict should be about, the largest significant one."""
    del context
    significant = [g for g in analysis.growth if is_significant(g, analysis)]
    return max(significant, key=lambda g: g.survivor_bytes, default=None)


def total_growth(analysis: DeviceAnalysis) -> int:
    """Return the bytes of all survivors of significant growth: a graph leaks by many lines."""
    return sum(g.survivor_bytes for g in analysis.growth if is_significant(g, analysis))


def is_significant(growth: Growth, analysis: DeviceAnalysis) -> bool:
    """Tell whether a growth is steady, long and large enough to be called a leak."""
    is_regular = growth.steadiness >= STEADY_SHARE or growth.n_steps >= MANY_STEPS
    return (
        is_regular
        and growth.n_steps >= MIN_STEPS
        and growth.survivor_bytes >= LARGE_SHARE * max(1, analysis.active_bytes)
    )
