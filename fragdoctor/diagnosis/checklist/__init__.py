"""The checklist of PyTorch's documents in their order, then our own items.

Every item says which input answered it. One that no input answers is skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fragdoctor.diagnosis.checklist.memory import (
    check_capacity,
    check_fragmentation_ratio,
    check_gap,
    check_largest_free_block,
    check_retries,
)
from fragdoctor.diagnosis.checklist.surroundings import (
    check_capture_quality,
    check_growth,
    check_outside_pytorch,
    check_settings,
    check_size_diversity,
)
from fragdoctor.model.diagnosis import ChecklistItem, Verdict
from fragdoctor.rules.context import Context

ITEMS: Final[tuple[Callable[[Context, Verdict], ChecklistItem], ...]] = (
    check_capacity,
    check_gap,
    check_retries,
    check_largest_free_block,
    check_fragmentation_ratio,
    check_outside_pytorch,
    check_growth,
    check_size_diversity,
    check_capture_quality,
    check_settings,
)


def build_checklist(context: Context, verdict: Verdict) -> tuple[ChecklistItem, ...]:
    """Return the items for the device that the verdict is about."""
    return tuple(item(context, verdict) for item in ITEMS)
