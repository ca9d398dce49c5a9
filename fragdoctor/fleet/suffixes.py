"""What the end of a file's name says of it."""

from __future__ import annotations

from typing import Final

_PACKED: Final = ("", ".gz", ".zst")
SNAPSHOTS: Final = tuple(s + p for s in (".pickle", ".pkl") for p in _PACKED)
TEXTS: Final = tuple(
    s + p for s in (".txt", ".log", ".out", ".err", ".stderr", ".stdout") for p in _PACKED
)
STATS: Final = tuple(s + p for s in (".json", ".jsonl") for p in _PACKED)
LOOKED_AT: Final = (*SNAPSHOTS, *TEXTS, *STATS, ".html", ".zip")
