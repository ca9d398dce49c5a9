"""One replay: the requests of a trace, served by the allocator model under given conditions.

A :class:`Reproduction` is the replay under the recorded settings, with new segments placed where
the file recorded them (``reproduction.py`` finds it). Comparing every segment event and the final
layout shows how exactly the model reproduces the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from fragdoctor._native import _ext
from fragdoctor.model.conf_keys import parse_version
from fragdoctor.model.settings import AllocatorSettings, Era
from fragdoctor.model.simulation import FidelityReport, ReplayResult
from fragdoctor.model.snapshot import SegmentType
from fragdoctor.trace.allocator import native_config
from fragdoctor.trace.trace import Trace
from fragdoctor.units import MIB, plural

PAGE_BYTES = 2 * MIB  # the driver's granularity


class Conditions(Struct, frozen=True):
    """The conditions that a trace is replayed under.

    Attributes:
        settings: settings of the allocator.
        era: how free blocks of equal size are ordered.
        capacity_bytes: what PyTorch could have of the device; None means unlimited.
        allowed_bytes: what a memory fraction allows of it; None means that no fraction is set.
        device_total_bytes: base of the reservations of expandable segments; None: the capacity.
        capacity_is_least: whether the capacity is only what the recorded run needed, so that the
            device may be far larger.
        memory_fraction: the fraction itself, if it is known; for people.
        torch_version: version asked for, "" for the recording's own.
    """

    settings: AllocatorSettings
    era: Era
    capacity_bytes: int | None = None
    allowed_bytes: int | None = None
    device_total_bytes: int | None = None
    capacity_is_least: bool = False
    memory_fraction: float | None = None
    torch_version: str = ""

    @property
    def limit_bytes(self) -> int | None:
        """The most that may be reserved, or None if nothing limits it."""
        limits = (self.capacity_bytes, self.allowed_bytes)
        return min((b for b in limits if b is not None), default=None)

    def native(self) -> _ext.AllocatorConfig:
        """Return the conditions in the form that the native model takes.

        Raises:
            SimulationError: if the settings choose another allocator than the native one.
        """
        total = self.device_total_bytes or self.capacity_bytes or 0
        config = native_config(
            self.settings,
            era=self.era,
            capacity_bytes=self.capacity_bytes,
            device_total_bytes=total or None,
        )
        config.device_total_is_least = self.capacity_is_least and self.device_total_bytes is None
        config.memory_fraction = -1.0
        if self.allowed_bytes is not None:
            # The model computes floor(fraction * total), which must be the allowed bytes exactly.
            total = max(total, self.allowed_bytes, 1)
            config.device_total_bytes = total
            config.memory_fraction = min((self.allowed_bytes + 0.5) / total, 1.0)
            config.fraction_of_one_counts = True
        return config


def allowed_by(fraction: float, total_bytes: int, torch_version: str) -> int | None:
    """Return floor(fraction x total), or None if the fraction counts as not set.

    From 2.10 on, a fraction of 1.0 switches the limit off; earlier, it limits to the whole device
    (and makes garbage collection work).
    """
    if fraction >= 1.0 and (not torch_version or parse_version(torch_version) >= (2, 10, 0)):
        return None
    return int(fraction * total_bytes)


def result_of(
    raw: Mapping[str, Any], conditions: Conditions, *, edit: str = "", note: str = ""
) -> ReplayResult:
    """Return the native replay's output as a result.

    The result's ``capacity_bytes`` is what the run could have: the lesser of the capacity and what
    the memory fraction allows.
    """
    if raw["is_cut_short"]:
        stop = "stopped early: it flushes more often than a genuine run does"
        note = f"{note}; {stop}" if note else stop
    return ReplayResult(
        conf=conditions.settings.conf,
        capacity_bytes=conditions.limit_bytes,
        fits=raw["fits"] and not raw["is_cut_short"],
        oom_event=raw["oom_event"],
        peak_reserved_bytes=raw["peak_reserved_bytes"],
        peak_allocated_bytes=raw["peak_allocated_bytes"],
        final_reserved_bytes=raw["final_reserved_bytes"],
        retries=raw["retries"],
        ooms=raw["ooms"],
        driver_calls=raw["driver_calls"],
        edit=edit,
        peak_active_bytes=raw["peak_active_bytes"],
        oom_bytes=raw["oom_bytes"],
        n_replayed=raw["n_replayed"],
        memory_fraction=conditions.memory_fraction,
        torch_version=conditions.torch_version,
        note=note,
    )


FOREIGN_SHARE = 0.2  # share of events contradicting the segments: not this allocator's trace
ERA_NAMES = {
    Era.ADDRESS: "address",
    Era.BLOCK_COUNTER: "block_counter",
    Era.SEGMENT_COUNTER: "segment_counter",
}


class Reproduction(Struct, frozen=True, dict=True):
    """The recorded run, reproduced as well as the file allows.

    Attributes:
        conditions: the recorded and inferred conditions under which it reproduces best.
        operations: the trace as requests; what-ifs replay the same ones.
        comparison: counts of what the model did as recorded; see ``replay.h``.
        capacity_is_exact: whether the capacity was read off a failed request; if not, it is the
            smallest that explains the run (or None).
        least_allowed_bytes: the least that a memory fraction allowed in the recorded run, or None
            without one. Between it and the failed request's need, any limit explains the run.
    """

    trace: Trace
    conditions: Conditions
    operations: _ext.NativeOps
    raw: dict[str, Any]
    comparison: dict[str, Any]
    capacity_is_exact: bool = False
    least_allowed_bytes: int | None = None

    @property
    def score(self) -> tuple[float, float]:
        """Share reproduced, then share of equal addresses: the basis of the choice."""
        c = self.comparison
        n = c["n_requests"]
        return share_of(c), c["n_same_address"] / n if n else 1.0

    @property
    def is_exact(self) -> bool:
        """Whether nothing differs at all."""
        return self.score == (1.0, 1.0)

    @property
    def result(self) -> ReplayResult:
        """The reproduction as a result."""
        return result_of(self.raw, self.conditions)


def share_of(comparison: dict[str, Any]) -> float:
    """Return the share of segment events, failures and final blocks that the model reproduced."""
    c = comparison
    equal = c["n_segment_events_equal"] + c["n_failed_equal"] + c["n_final_blocks_equal"]
    events = max(c["n_segment_events"], c["n_segment_events_model"])
    of = events + c["n_failed"] + c["n_failed_model_only"] + c["n_final_blocks"]
    return float(equal / of) if of else 1.0


def report(best: Reproduction) -> FidelityReport:
    """Return the fidelity of a reproduction, and what keeps it from being exact."""
    era = ERA_NAMES[best.conditions.era]
    return FidelityReport(share_of(best.comparison), era, _reason(best))


def is_foreign(trace: Trace) -> bool:
    """Return whether trace and segments contradict each other more than this allocator's could.

    Completions without a request do not count: ``skip_actions`` leaves them.
    """
    counts = dict(trace.contradictions)
    counts.pop("completed_unrequested", None)
    return sum(counts.values()) > FOREIGN_SHARE * max(trace.n_events, 1)


def _reason(best: Reproduction) -> str:
    if best.is_exact:
        return ""
    trace, c = best.trace, best.comparison
    reasons = []
    if trace.contradictions:
        n = sum(trace.contradictions.values())
        verb = "contradicts" if n == 1 else "contradict"
        reasons.append(f"{plural(n, 'event')} {verb} the rest of the file: events are missing")
    if trace.initial_reserved_bytes > 0:
        reasons.append(
            "the trace begins late or lost its oldest events, and the order in which the free "
            "blocks of that time were made is not recorded"
        )
        if not trace.initial["block_size_is_known"].all():
            reasons.append("the rounded size of blocks made before it is not recorded either")
    if c["n_failed"] > c["n_failed_equal"]:
        reasons.append("a request failed for a reason that the file does not show")
    if (trace.snapshot.segments.kind == SegmentType.UNKNOWN).any():
        reasons.append("the file does not say which pool a segment belongs to")
    if not reasons:
        reasons.append("something that the file does not record influenced the allocator")
    if share_of(c) == 1.0:
        n = c["n_requests"] - c["n_same_address"]
        verb = "lies" if n == 1 else "lie"
        return f"{plural(n, 'block')} {verb} elsewhere, without effect on segments: " + "; ".join(
            reasons
        )
    return "; ".join(reasons)
