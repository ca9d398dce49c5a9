"""The fullest GPU of a table that people paste: nvidia-smi's or gpustat's."""

from __future__ import annotations

import re
from typing import Final

from fragdoctor.model.case import GPU_TABLE, OomMessage
from fragdoctor.units import MIB

_ROWS: Final = re.compile(
    r"(?:^\[(?P<index>\d{1,3})\][^|\n]{1,80}\|[^|\n]{1,60})?"
    r"\|\s{0,8}(?P<used>\d{1,7})(?:MiB)?\s?/\s{0,4}(?P<total>\d{1,7})\s?M(?:iB|B)\b",
    re.MULTILINE,
)
_SHORTAGE: Final = re.compile(r"out[\s_-]of[\s_-](?:\w{1,10}\s)?memory|\bOOM\b", re.IGNORECASE)
_MIN_USED: Final = 512 * MIB
"""More than a desktop and a context; less is nobody's program."""

MAX_CHARS: Final = 256 * 1024


def fullest_gpu(text: str) -> OomMessage | None:
    """Return the fullest GPU of a table, where the text also speaks of memory that ran out."""
    head = text[:MAX_CHARS]
    rows = list(enumerate(_ROWS.finditer(head)))
    if not rows or not _SHORTAGE.search(head):
        return None
    n, row = max(rows, key=lambda one: int(one[1]["used"]) / max(1, int(one[1]["total"])))
    used, total = int(row["used"]) * MIB, int(row["total"]) * MIB
    if not _MIN_USED <= used <= total:
        return None
    return OomMessage(
        kind="driver-no-figures",
        backend="cuda",
        is_device_oom=True,
        sub_kind=GPU_TABLE,
        variant=GPU_TABLE,
        device_index=int(row["index"] or n),
        total_bytes=total,
        free_bytes=total - used,
        line=head.count("\n", 0, row.start()) + 1,
        text=" ".join(row.group().split()),
    )
