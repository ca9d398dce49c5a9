"""The groups in which a command's help lists its options.

An option may name its group itself (``rich_help_panel``); what this table does not know is the
command's own and comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

OWN: Final = "Options"

GROUPS: Final = {
    "A model without a config.json": (
        "--family",
        "--vocab",
        "--layers",
        "--hidden",
        "--heads",
        "--kv-heads",
        "--ffn",
        "--positions",
    ),
    "Training": (
        "--optimizer",
        "--master-weights",
        "--grad-dtype",
        "--grad-accumulation",
        "--checkpointing",
        "--lora",
        "--lora-targets",
        "--dora",
        "--offload",
        "--logits",
        "--keep-logits",
        "--dropout",
    ),
    "Several GPUs": (
        "--zero",
        "--fsdp",
        "--tensor-parallel",
        "--sequence-parallel",
        "--context-parallel",
        "--pipeline-parallel",
        "--expert-parallel",
    ),
    "Inference": (
        "--inference",
        "--new-tokens",
        "--kv-dtype",
        "--cache",
        "--gpu-memory-utilization",
        "--max-num-seqs",
        "--max-num-batched-tokens",
    ),
    "A rehearsal in place of formulas": ("--model", "--input-shape", "--input-dtype", "--loss"),
    "The program": (
        "--module",
        "--python",
        "--devices",
        "--world-size",
        "--rank",
        "--assume",
        "--allow-writes",
        "--time-limit",
    ),
    "Cure": ("--cure", "--time", "--no-rehearse", "--rehearse-time"),
    "Input": (
        "--capacity",
        "--device",
        "--memory-fraction",
        "--torch-version",
        "--request",
        "--batch",
        "--continue-with",
        "--path-map",
        "--headroom",
        "--context",
    ),
    "Several ranks": (
        "--workers",
        "--dask",
        "--timeout",
        "--worker-memory",
        "--replay",
        "--rank-pages",
    ),
    "Gate": ("--fail-on", "--exit-zero", "--fail-on-growth"),
    "Output": (
        "--format",
        "--table",
        "--report",
        "--output",
        "--zip",
        "--force",
        "--quiet",
        "--full",
        "--no-color",
        "--no-diagnosis",
    ),
    "General": ("--no-config", "--config", "--help"),
}
"""By heading, in the order in which they are printed: the long names of their options."""

_GROUP_OF: Final = {name: group for group, names in GROUPS.items() for name in names}


def grouped(options: Iterable[Any]) -> list[tuple[str, Sequence[Any]]]:
    """Return the options of a command by heading, each group in the command's own order."""
    found: dict[str, list[Any]] = {}
    for option in options:
        named = getattr(option, "rich_help_panel", None)
        known = (_GROUP_OF[name] for name in option.opts if name in _GROUP_OF)
        found.setdefault(named or next(known, OWN), []).append(option)
    own = [heading for heading in found if heading not in GROUPS]
    order = [*own, *(heading for heading in GROUPS if heading in found)]
    return [(heading, found[heading]) for heading in order]
