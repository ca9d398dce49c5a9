"""Tables of ``torch.cuda.memory_summary()``, PyTorch 1.4 to 2.15, alone or inside a log.

Sizes are floors in the unit of their column, powers of 1024 (``KB`` of 1.x means the same as
``KiB`` of 2.x); counts end in nothing, ``K`` or ``M``, powers of 1000.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from fragdoctor.model.stats import MemoryStats
from fragdoctor.readers.cleaning import plain_lines

_TITLE: Final = re.compile(
    r"memory summary\s*,\s*device(?:\s+id)?\s*:?\s*(?:cuda:)?(\d{1,6})", re.IGNORECASE
)
_OOMS: Final = re.compile(r"(?:CUDA|HIP|XPU)\s+OOMs\s*:\s*(\d{1,18})", re.IGNORECASE)
_RETRIES: Final = re.compile(r"(?:cuda|hip)?Malloc\s+retries\s*:\s*(\d{1,18})", re.IGNORECASE)
_CELL: Final = re.compile(r"(\d{1,18})\s*([KMGTP]i?B|B|[KM])?", re.IGNORECASE)
_ROWS: Final = {
    "allocated memory": "allocated_bytes",
    "active memory": "active_bytes",
    "requested memory": "requested_bytes",
    "gpu reserved memory": "reserved_bytes",
    "non-releasable memory": "inactive_split_bytes",
    "allocations": "allocation",
    "active allocs": "active",
    "gpu reserved segments": "segment",
    "non-releasable allocs": "inactive_split",
    "oversize allocations": "oversize_allocations",
    "oversize gpu segments": "oversize_segments",
}
_SUB_ROWS: Final = {"from large pool": "large_pool", "from small pool": "small_pool"}
_COLUMNS: Final = ("current", "peak", "allocated", "freed")
_POWERS: Final = {"K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_WITHOUT_POOLS: Final = frozenset({"oversize_allocations", "oversize_segments"})


def looks_like_summary(text: str) -> bool:
    """Return whether a text holds a table of ``memory_summary()``."""
    return ("Cur Usage" in text and "Peak Usage" in text) or (
        "memory summary" in text and "device ID" in text
    )


@dataclass(slots=True)
class _Table:
    label: str
    device: int | None = None
    values: dict[str, int] = field(default_factory=dict)
    resolution: int = 1
    family: str = ""

    def stats(self) -> MemoryStats:
        return MemoryStats(
            values=self.values,
            device=self.device,
            resolution_bytes=self.resolution,
            origin="memory_summary",
            label=self.label,
        )


def read_summaries(text: str, label: str = "") -> Iterator[MemoryStats]:
    """Yield one ``MemoryStats`` for each table, in the order of the text."""
    if not looks_like_summary(text):
        return
    table: _Table | None = None
    for number, raw in enumerate(text.split("\n"), start=1):
        if "|" not in raw and "memory summary" not in raw:
            continue
        for line in plain_lines(raw[:2000]):
            title = _TITLE.search(line)
            if title or ("Cur Usage" in line and (table is None or table.values.keys() - _HEADER)):
                if table is not None and table.values:
                    yield table.stats()
                table = _Table(f"{label}:{number}" if label else f"line {number}")
                table.device = int(title.group(1)) if title else None
            if table is not None:
                _read_line(table, line)
    if table is not None and table.values:
        yield table.stats()


_HEADER: Final = frozenset({"num_ooms", "num_alloc_retries"})


def _read_line(table: _Table, line: str) -> None:
    for pattern, name in ((_OOMS, "num_ooms"), (_RETRIES, "num_alloc_retries")):
        match = pattern.search(line)
        if match:
            table.values[name] = int(match.group(1))
    cells = [cell.strip() for cell in line.split("|")]
    cells = cells[:-1] if cells and not cells[-1] else cells
    if len(cells) < 5:
        return
    name, figures = " ".join(cells[-5].lower().split()), cells[-4:]
    family, pool = _ROWS.get(name), "all"
    if family is not None:
        table.family = family
    elif name in _SUB_ROWS and table.family:
        family, pool = table.family, _SUB_ROWS[name]
    if family is None:
        return
    for column, cell in zip(_COLUMNS, figures, strict=True):
        match = _CELL.fullmatch(cell)
        if match is None:
            continue
        unit = match.group(2) or ""
        factor = _factor(unit)
        key = f"{family}.{column}" if family in _WITHOUT_POOLS else f"{family}.{pool}.{column}"
        table.values[key] = int(match.group(1)) * factor
        if unit.upper().endswith("B"):
            table.resolution = max(table.resolution, factor)


def _factor(unit: str) -> int:
    power = _POWERS.get(unit[:1].upper(), 0)
    is_size = unit.upper().endswith("B")
    return int(1024**power if is_size else 1000**power)
