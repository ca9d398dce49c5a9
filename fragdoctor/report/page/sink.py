"""Where the graphics' data go: one blob of arrays, one set of text tables."""

from __future__ import annotations

from dataclasses import dataclass

from fragdoctor.model.snapshot import Snapshot
from fragdoctor.report.page.blob import BlobWriter
from fragdoctor.report.page.text_tables import CodeOwners, SnapshotStacks, TextTables


@dataclass(frozen=True, slots=True)
class Sink:
    """What every part of one page writes to."""

    blob: BlobWriter
    tables: TextTables
    stacks: SnapshotStacks

    @classmethod
    def of(cls, snapshot: Snapshot, owners: CodeOwners, scale: float = 1.0) -> Sink:
        """Return an empty sink for the stacks of one snapshot; ``scale`` is of ``TextTables``."""
        tables = TextTables(scale)
        return cls(BlobWriter(), tables, SnapshotStacks(snapshot, tables, owners))
