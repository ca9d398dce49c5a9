"""``torch.cuda.memory_stats()`` and ``memory_summary()`` as numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Statistics of one device at one moment.

    Attributes:
        values: the flat form: ``allocated_bytes.all.peak`` -> int, ``num_alloc_retries`` -> int.
            From a summary the figures are floors of the printed unit.
        device: device index, None where the source does not say.
        resolution_bytes: 1 where exact; otherwise the unit of ``memory_summary`` (up to 1 GiB).
        origin: ``memory_stats`` or ``memory_summary``.
        label: position in a series (step, line), for people; hostile text.
    """

    values: Mapping[str, int]
    device: int | None = None
    resolution_bytes: int = 1
    origin: str = "memory_stats"
    label: str = ""

    def get(self, key: str) -> int | None:
        """Return one figure, None where the source lacks it."""
        return self.values.get(key)

    @property
    def allocated_bytes(self) -> int | None:
        """Current bytes of allocated blocks."""
        return self.get("allocated_bytes.all.current")

    @property
    def active_bytes(self) -> int | None:
        """Current bytes of allocated blocks and of blocks that wait for other streams."""
        return self.get("active_bytes.all.current")

    @property
    def reserved_bytes(self) -> int | None:
        """Current bytes of all segments."""
        return self.get("reserved_bytes.all.current")

    @property
    def requested_bytes(self) -> int | None:
        """Current bytes as asked for, before rounding (2.0+)."""
        return self.get("requested_bytes.all.current")

    @property
    def inactive_split_bytes(self) -> int | None:
        """Free bytes in segments that still hold a live block; 0 under expandable segments."""
        return self.get("inactive_split_bytes.all.current")

    @property
    def n_alloc_retries(self) -> int | None:
        """How often the allocator flushed its cache because cudaMalloc failed."""
        return self.get("num_alloc_retries")

    @property
    def n_ooms(self) -> int | None:
        """How often an OutOfMemoryError was raised."""
        return self.get("num_ooms")


@dataclass(frozen=True, slots=True)
class StatsSeries:
    """Statistics of one input: one per device, or a series over time (JSON lines)."""

    entries: Sequence[MemoryStats] = field(default_factory=tuple)
    is_series: bool = False

    def of_device(self, device: int | None) -> tuple[MemoryStats, ...]:
        """Return the entries of one device, oldest first; entries without a device match any."""
        return tuple(s for s in self.entries if device is None or s.device in (None, device))
