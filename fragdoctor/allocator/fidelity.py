"""How exactly the model reproduces a file, and under which of the settings that it does not say.

A baseline replays the trace under its recorded settings, with new segments placed where the file
recorded them, and compares every segment event and the final layout. What the file does not record
is found by trying: the order of equal free blocks (it differs by version), calls of
``empty_cache()``, a memory fraction, the size of large segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from fragdoctor._native import _ext
from fragdoctor.allocator.model import UNLIMITED
from fragdoctor.allocator.replay import Conditions, result_of
from fragdoctor.allocator.trace_ops import PreparedTrace, prepare
from fragdoctor.model.diagnosis import FidelityReport
from fragdoctor.model.settings import AllocatorSettings, Era, era_of
from fragdoctor.model.simulation import ReplayResult
from fragdoctor.model.snapshot import Action, SegmentType
from fragdoctor.units import MIB, plural

# Of taking unexplained frees for calls of empty_cache(), and completed frees for late ones.
MAX_ROUNDS = 3
N_LIMITS_TRIED = 24
# Work spent on finding a memory fraction, and operations from which the order of equal blocks is
# told: a fraction of a second each.
LIMIT_OPERATIONS = 5_000_000
MIN_TRIES = 4
PREFIX_OPERATIONS = 100_000
FOREIGN_SHARE = 0.2  # of events that contradict the segments: not this allocator's trace
ERA_NAMES = {
    Era.ADDRESS: "address",
    Era.BLOCK_COUNTER: "block_counter",
    Era.SEGMENT_COUNTER: "segment_counter",
}


@dataclass(frozen=True)
class Baseline:
    """The recorded run, reproduced as well as the file allows.

    Attributes:
        conditions: recorded and inferred, under which it reproduces best.
        operations: the trace as requests; what-ifs replay the same.
        comparison: counts of what the model did as recorded; see ``replay.h``.
        capacity_is_exact: the capacity was read off a failed request; else it is the least that
            explains the run (or None).
        fraction_is_inferred: the run was limited by a memory fraction that the file does not tell.
    """

    prepared: PreparedTrace
    conditions: Conditions
    operations: _ext.NativeOps
    raw: dict[str, Any]
    comparison: dict[str, Any]
    capacity_is_exact: bool = False
    fraction_is_inferred: bool = False

    @property
    def score(self) -> tuple[float, float]:
        """Share reproduced, then share of addresses: what the choice goes by."""
        c = self.comparison
        n = c["n_requests"]
        return share_of(c), c["n_same_address"] / n if n else 1.0

    @property
    def is_exact(self) -> bool:
        """Whether nothing at all differs."""
        return self.score == (1.0, 1.0)

    @property
    def result(self) -> ReplayResult:
        """The baseline as a result."""
        return result_of(self.raw, self.conditions)


def share_of(comparison: dict[str, Any]) -> float:
    """Return the share of segment events, failures and final blocks that the model reproduced."""
    c = comparison
    equal = c["n_segment_events_equal"] + c["n_failed_equal"] + c["n_final_blocks_equal"]
    events = max(c["n_segment_events"], c["n_segment_events_model"])
    of = events + c["n_failed"] + c["n_failed_model_only"] + c["n_final_blocks"]
    return float(equal / of) if of else 1.0


@dataclass(frozen=True, slots=True)
class _Guess:
    """A set of values for what the file does not record."""

    era: Era
    settings: AllocatorSettings
    capacity_bytes: int | None
    allowed_bytes: int | None = None


class _Finder:
    """Tries guesses on one trace and keeps the best."""

    def __init__(self, prepared: PreparedTrace, device_total_bytes: int | None) -> None:
        self.prepared = prepared
        self.total = device_total_bytes or _total_by_reservations(prepared)
        self.capacity = _recorded_capacity(prepared)
        self.best: Baseline | None = None
        self._operations: dict[tuple[object, ...], _ext.NativeOps] = {}

    def try_(self, guess: _Guess) -> Baseline:
        """Replay under a guess, and again with what the comparison suggests, while that helps."""
        rows, late = frozenset[int](), frozenset[int]()
        best: Baseline | None = None
        for _ in range(MAX_ROUNDS):
            one = self._replay(guess, rows, late)
            if best is None or one.score > best.score:
                best = one
            before = rows, late
            rows = rows | set(one.comparison["unexplained_frees"])
            late = late | set(one.comparison["early_completions"])
            if (rows, late) == before:
                break
        assert best is not None  # noqa: S101 - the loop ran
        if self.best is None or best.score > self.best.score:
            self.best = best
        return best

    def address_share(self, guess: _Guess) -> float:
        """Return the share of addresses reproduced in the beginning of the trace."""
        one = self._replay(guess, frozenset(), frozenset(), PREFIX_OPERATIONS)
        return one.score[1]

    def _operations_for(
        self, limit: int, rows: frozenset[int], late: frozenset[int], *, collects: bool
    ) -> _ext.NativeOps:
        key = (limit, rows, late, collects)
        if key not in self._operations:
            self._operations.clear()  # the last is what the next guess asks for, if any
            self._operations[key] = _ext.NativeOps(
                self.prepared.trace,
                limit_bytes=limit,
                is_collecting=collects,
                empty_cache_rows=sorted(rows),
                late_rows=sorted(late),
                device_total_bytes=self.total or 0,
            )
        return self._operations[key]

    def _replay(
        self,
        guess: _Guess,
        rows: frozenset[int],
        late: frozenset[int],
        max_ops: int = UNLIMITED,
    ) -> Baseline:
        capacity, allowed = guess.capacity_bytes, guess.allowed_bytes
        limits = [b for b in (capacity, allowed) if b is not None]
        collects = allowed is not None and guess.settings.garbage_collection_threshold > 0
        operations = self._operations_for(min(limits, default=0), rows, late, collects=collects)
        if not limits:
            # The least that lets every recorded segment come: requests that would have gone
            # above it are those whose flush the file shows.
            capacity = operations.facts()["peak_reserved_bytes"]
        conditions = Conditions(guess.settings, guess.era, capacity, allowed, self.total)
        raw, comparison = operations.replay_recorded(conditions.native(), max_ops)
        return Baseline(
            self.prepared,
            conditions,
            operations,
            raw,
            comparison,
            capacity_is_exact=self.capacity is not None,
            fraction_is_inferred=allowed is not None,
        )


def find_baseline(
    prepared: PreparedTrace,
    *,
    torch_version: str | None = None,
    device_total_bytes: int | None = None,
) -> Baseline:
    """Return the best reproduction of a trace.

    Args:
        prepared: the trace.
        torch_version: that wrote the file, if known; else every order of blocks is tried.
        device_total_bytes: memory of the device, if known; base of a memory fraction.

    Raises:
        ConfigError: the version is not one.
    """
    finder = _Finder(prepared, device_total_bytes)
    best = _over_eras(finder, prepared.settings, torch_version)
    if best.score[0] == 1.0:
        return best
    other = _with_inferred_settings(prepared)
    if other is not None:
        shown = _Finder(other, device_total_bytes)
        better = _over_eras(shown, other.settings, torch_version)
        if better.score > best.score:
            finder, best = shown, better
    if best.score[0] < 1.0 and _may_be_limited(best):
        best = _over_limits(finder, best, device_total_bytes)
    return best


def _over_eras(finder: _Finder, settings: AllocatorSettings, torch_version: str | None) -> Baseline:
    guesses = [
        _Guess(era, settings, finder.capacity) for era in _eras(finder.prepared, torch_version)
    ]
    if len(guesses) > 1 and finder.prepared.n_requests > PREFIX_OPERATIONS:
        # The beginning of a long trace shows the order well enough.
        guesses = [max(guesses, key=finder.address_share)]
    best: Baseline | None = None
    for guess in guesses:
        one = finder.try_(guess)
        if best is None or one.score > best.score:
            best = one
        if one.is_exact:
            break
    assert best is not None  # noqa: S101 - there is always an era
    return best


def _over_limits(finder: _Finder, best: Baseline, device_total_bytes: int | None) -> Baseline:
    """Return the best of the baseline and of those with a memory fraction in force."""
    n_operations = max(best.operations.facts()["n_ops"], 1)
    n_tries = max(MIN_TRIES, LIMIT_OPERATIONS // n_operations)
    for limit in islice(_limits(best, device_total_bytes), n_tries):
        guess = _Guess(best.conditions.era, finder.prepared.settings, finder.capacity, limit)
        one = finder.try_(guess)
        if one.score > best.score:
            best = one
        if one.is_exact:
            break
    return best


def _eras(prepared: PreparedTrace, torch_version: str | None) -> list[Era]:
    """Return the orders to try, likeliest first."""
    if torch_version is not None:
        return [era_of(torch_version)]
    snapshot = prepared.snapshot
    low = snapshot.provenance.version_low
    rows = snapshot.events.device_slice(prepared.device)
    has_pools = bool((snapshot.events.pool[rows] >= 0).any())
    has_new = bool((snapshot.events.action[rows] == Action.ANNOTATE).any())
    if has_new or low.startswith(("2.13", "2.14", "2.15")):
        return [Era.SEGMENT_COUNTER, Era.BLOCK_COUNTER, Era.ADDRESS]
    if has_pools:
        return [Era.BLOCK_COUNTER, Era.SEGMENT_COUNTER, Era.ADDRESS]
    return [Era.ADDRESS, Era.BLOCK_COUNTER, Era.SEGMENT_COUNTER]


def _recorded_capacity(prepared: PreparedTrace) -> int | None:
    """Return what PyTorch could have when a request failed (the last that says), if any did."""
    known = prepared.oom_capacity_bytes[prepared.oom_capacity_bytes >= 0]
    if not len(known):
        return None
    return max(int(known[-1]), prepared.peak_reserved_bytes)


def _total_by_reservations(prepared: PreparedTrace) -> int | None:
    """Return the device's memory as the distance of its address reservations shows it.

    Expandable segments reserve 9/8 of it per stream and pool class; None where fewer than two
    reservations are seen, or they lie closer than the memory that was in use.
    """
    native, undone = prepared.columns.native, prepared.undone
    maps = np.nonzero(native["action"] == Action.SEGMENT_MAP)[0]
    starts = native["address"][maps].astype(np.float64)
    keys = native["stream"][maps].astype(np.int64) * 2 + (native["size"][maps] == 2 * MIB)
    bases = [float(starts[keys == key].min()) for key in np.unique(keys)]
    old = undone.segment_is_expandable
    bases += [float(a) for a in undone.segment_address[old & undone.segment_is_small]][:1]
    bases += [float(a) for a in undone.segment_address[old & ~undone.segment_is_small]][:1]
    gaps = np.diff(np.unique(bases))
    if not len(gaps):
        return None
    total = int(gaps.min() * 8 / 9)
    return total if total >= prepared.peak_reserved_bytes else None


def _with_inferred_settings(prepared: PreparedTrace) -> PreparedTrace | None:
    """Return the trace under settings that it shows and its settings do not say, if it does."""
    settings = prepared.settings
    native = prepared.columns.native
    changes: dict[str, Any] = {}
    has_maps = bool((native["action"] == Action.SEGMENT_MAP).any())
    if has_maps and not settings.expandable_segments:
        changes["expandable_segments"] = True
    size = _large_segment_bytes(prepared)
    if size is not None and size != settings.large_segment_bytes:
        changes["large_segment_bytes"] = size
        changes["max_non_split_rounding_bytes"] = size
    if not changes:
        return None
    return prepare(prepared.snapshot, prepared.device, replace(settings, **changes))


def _large_segment_bytes(prepared: PreparedTrace) -> int | None:
    """Return the segment size of requests of 1 to 10 MiB as the trace shows it, if it does."""
    native = prepared.columns.native
    action, size = native["action"], native["size"]
    first = np.nonzero((action[:-1] == Action.SEGMENT_ALLOC) & (action[1:] == Action.ALLOC))[0]
    first = first[(size[first + 1] > MIB) & (size[first + 1] < 9 * MIB)]
    if not len(first):
        return None
    sizes, counts = np.unique(size[first], return_counts=True)
    likeliest = int(sizes[counts.argmax()])
    return likeliest if 10 * MIB < likeliest < 2**40 else None


def _may_be_limited(best: Baseline) -> bool:
    """Return whether a memory fraction would explain what the baseline does not.

    Either a request failed while the driver had room for it, or segments went before a request
    that would not have exceeded the capacity, with garbage collection set.
    """
    if best.comparison["n_failed"] > best.comparison["n_failed_equal"]:
        return True
    return best.prepared.settings.garbage_collection_threshold > 0


def _limits(best: Baseline, device_total_bytes: int | None) -> Iterator[int]:
    """Yield what a memory fraction may have allowed, likeliest first.

    It lies between the peak of reserved memory and the least that a failed request would have
    needed. People set round fractions, so these come first.
    """
    prepared = best.prepared
    low = prepared.peak_reserved_bytes
    high = _highest_limit(best)
    seen: set[int] = set()
    said = prepared.settings.memory_fraction
    fractions = [p / 100 for p in (*range(10, 100, 10), *range(5, 100, 10), *range(1, 100))]
    for total in _totals(prepared, device_total_bytes):
        for fraction in fractions if said is None else [said, *fractions]:
            limit = int(fraction * total)
            if low <= limit < high and limit not in seen and len(seen) < N_LIMITS_TRIED:
                seen.add(limit)
                yield limit
    for end in (min(high, _collection_bound(prepared)), high):
        for i in range(N_LIMITS_TRIED if end > low else 0):
            yield low + (end - low) * i // N_LIMITS_TRIED


def _totals(prepared: PreparedTrace, device_total_bytes: int | None) -> list[int]:
    if device_total_bytes is not None:
        return [device_total_bytes]
    capacity = _recorded_capacity(prepared)
    return [] if capacity is None else [capacity]


def _highest_limit(best: Baseline) -> int:
    """Return a bound (excluded) of what a memory fraction can have allowed."""
    low = best.prepared.peak_reserved_bytes
    need: int | None = best.operations.facts()["lowest_need_bytes"]
    if not len(best.prepared.oom_rows) or need is None:
        return 2 * low + 1
    return max(min(2 * low + 1, need), low + 1)


def _collection_bound(prepared: PreparedTrace) -> int:
    """Return what was allowed at most (excluded) if every run of frees was a collection.

    A collection starts above threshold x allowed. A flush may start below, so this bound only
    says where to look first.
    """
    threshold = prepared.settings.garbage_collection_threshold
    is_free = prepared.columns.native["action"] == Action.SEGMENT_FREE
    first = np.nonzero(is_free[1:] & ~is_free[:-1])[0]  # the event before each run
    if threshold <= 0 or not len(first):
        return 0
    lowest = int(prepared.undone.reserved_bytes[first].min())
    return int(lowest / threshold) + 1


def report(best: Baseline) -> FidelityReport:
    """Return the fidelity of a baseline, with its parts and the reason where it is not exact."""
    c, prepared = best.comparison, best.prepared
    details = {
        "segment_events": {
            "recorded": c["n_segment_events"],
            "model": c["n_segment_events_model"],
            "equal": c["n_segment_events_equal"],
        },
        "final_blocks": {"total": c["n_final_blocks"], "equal": c["n_final_blocks_equal"]},
        "addresses": {"total": c["n_requests"], "equal": c["n_same_address"]},
        "failed_requests": {
            "recorded": c["n_failed"],
            "equal": c["n_failed_equal"],
            "model_only": c["n_failed_model_only"],
        },
        "peak_reserved": {
            "recorded_bytes": prepared.peak_reserved_bytes,
            "model_bytes": best.raw["peak_reserved_bytes"],
        },
        "retries": {
            "recorded": best.operations.facts()["n_flushed"],
            "model": best.raw["retries"],
        },
        "inferred_empty_cache": best.operations.facts()["n_inferred_empty_cache"],
        "first_difference_event": c["first_difference_event"],
        "contradictions": dict(prepared.undone.contradictions),
    }
    return FidelityReport(
        share=share_of(c),
        era=ERA_NAMES[best.conditions.era],
        reason=_reason(best),
        details=details,
    )


def is_foreign(prepared: PreparedTrace) -> bool:
    """Return whether trace and segments contradict each other as no trace of this allocator does.

    Completions without request do not count: they are what ``skip_actions`` leaves.
    """
    counts = dict(prepared.undone.contradictions)
    counts.pop("completed_unrequested", None)
    return sum(counts.values()) > FOREIGN_SHARE * max(prepared.n_events, 1)


def _reason(best: Baseline) -> str:
    if best.is_exact:
        return ""
    prepared, c = best.prepared, best.comparison
    reasons = []
    if is_foreign(prepared):
        reasons.append("trace and segments contradict each other: not this allocator's recording")
    elif prepared.undone.contradictions:
        n = sum(prepared.undone.contradictions.values())
        reasons.append(f"{n} events contradict the rest of the file: events are missing")
    if prepared.undone.initial_reserved_bytes > 0:
        reasons.append(
            "the trace begins late or lost its oldest events, and the order in which the free "
            "blocks of that time were made is not recorded"
        )
        if not prepared.undone.block_size_is_known.all():
            reasons.append("the rounded size of blocks made before it is not recorded either")
    if c["n_failed"] > c["n_failed_equal"]:
        reasons.append("a request failed for a reason that the file does not show")
    if (prepared.snapshot.segments.kind == SegmentType.UNKNOWN).any():
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
