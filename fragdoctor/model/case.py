"""Everything known about one process: any part may be missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fragdoctor.model.bundle import BundleFacts
from fragdoctor.model.oom import OomLog, OomMessage
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.model.stats import StatsSeries


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the user told us and a file may lack."""

    capacity_bytes: int | None = None
    request_bytes: int | None = None
    device: int | None = None
    memory_fraction: float | None = None
    torch_version: str | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs of one diagnosis.

    Attributes:
        snapshot: the memory snapshot, if one was given.
        oom: messages of one text or log, if one was given.
        stats: statistics, if some were given.
        overrides: what the user said on the command line.
        sources: the names of the inputs, in the order given; hostile text.
        bundle: the manifest, where the inputs came as a bundle of ``fragdoctor run``.
    """

    snapshot: Snapshot | None = None
    oom: OomLog | None = None
    stats: StatsSeries | None = None
    overrides: Overrides = field(default_factory=Overrides)
    sources: Sequence[str] = ()
    bundle: BundleFacts | None = None

    @property
    def primary_message(self) -> OomMessage | None:
        """The message that the case is about: that of the first cause."""
        if self.oom is None or not self.oom.messages:
            return None
        index = self.oom.primary if 0 <= self.oom.primary < len(self.oom.messages) else 0
        return self.oom.messages[index]
