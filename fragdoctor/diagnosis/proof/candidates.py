"""The popular allocator settings, each tried on the recorded trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fragdoctor.diagnosis.remedies.gates import is_too_new
from fragdoctor.diagnosis.remedies.plan import Plan
from fragdoctor.model.settings import is_same_conf


@dataclass(frozen=True, slots=True)
class Candidate:
    """One setting to try.

    Attributes:
        code: code of the remedy that it belongs to; the best of a family speaks for it.
        title: what it does, for people.
        conf: the whole setting string, what is set already included.
        added: the part that is new.
    """

    code: str
    title: str
    conf: str
    added: str


FAMILIES: Final[tuple[tuple[str, str, str, tuple[str, ...]], ...]] = (
    (
        "expandable-segments",
        "Use expandable segments",
        "expandable_segments",
        ("expandable_segments:True",),
    ),
    (
        "max-split-size",
        "Keep large blocks whole",
        "max_split_size_mb",
        tuple(f"max_split_size_mb:{n}" for n in (32, 64, 128, 256, 512)),
    ),
    (
        "roundup-divisions",
        "Round sizes up to divisions of a power of two",
        "roundup_power2_divisions",
        tuple(f"roundup_power2_divisions:{n}" for n in (2, 4, 8)),
    ),
    (
        "garbage-collection-threshold",
        "Return old unused segments early",
        "garbage_collection_threshold",
        tuple(f"garbage_collection_threshold:{x}" for x in (0.6, 0.8)),
    ),
)
"""The settings that every guide names: sizes around those of common blocks, powers of two."""

DEFAULTS: Final = ("default-settings", "Go back to the default settings")


def candidates(plan: Plan) -> list[Candidate]:
    """Return what to try: every family that the PyTorch version knows, and the defaults."""
    present = plan.settings.conf if plan.settings is not None else ""
    found: dict[str, Candidate] = {}
    for code, title, key, confs in FAMILIES:
        if is_too_new(plan, key) or (key == "expandable_segments" and plan.expandable_is_on):
            continue
        for added in confs:
            conf = plan.with_present(added)
            if not is_same_conf(conf, present):
                found.setdefault(conf, Candidate(code, title, conf, added))
    if present.strip():
        found.setdefault("", Candidate(*DEFAULTS, "", "the default settings"))
    return list(found.values())
