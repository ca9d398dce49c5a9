"""Finding the reproduction: the recorded run, reproduced as well as the file allows.

Whatever the file does not record is found by trying: the order of equal free blocks (by version),
the memory that PyTorch could have, the device's memory, a memory fraction, and settings that only
the trace betrays. A guess is replayed, compared with the recording, and kept if it reproduces more.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from fragdoctor._native import _ext
from fragdoctor.errors import SimulationError
from fragdoctor.model.hooks import report_progress
from fragdoctor.model.settings import AllocatorSettings, Era, era_of
from fragdoctor.model.snapshot import Action
from fragdoctor.trace.allocator import UNLIMITED
from fragdoctor.trace.replay import Conditions, Reproduction, is_foreign
from fragdoctor.trace.trace import Trace

N_LIMITS_TRIED = 24


def eras_of(trace: Trace, torch_version: str | None) -> list[Era]:
    """Return the orders to try, likeliest first."""
    if torch_version is not None:
        return [era_of(torch_version)]
    snapshot = trace.snapshot
    low = snapshot.provenance.version_low
    rows = snapshot.events.device_slice(trace.device)
    has_pools = bool((snapshot.events.pool[rows] >= 0).any())
    has_new = bool((snapshot.events.action[rows] == Action.ANNOTATE).any())
    if has_new or low.startswith(("2.13", "2.14", "2.15")):
        return [Era.SEGMENT_COUNTER, Era.BLOCK_COUNTER, Era.ADDRESS]
    if has_pools:
        return [Era.BLOCK_COUNTER, Era.SEGMENT_COUNTER, Era.ADDRESS]
    return [Era.ADDRESS, Era.BLOCK_COUNTER, Era.SEGMENT_COUNTER]


def recorded_capacity(trace: Trace) -> int | None:
    """Return what PyTorch could have at the last failed request that says so, if there is one."""
    known = trace.oom_capacity_bytes[trace.oom_capacity_bytes >= 0]
    if not len(known):
        return None
    return max(int(known[-1]), trace.totals.peak_reserved_bytes)


def limits_of(
    trace: Trace,
    lowest_need_bytes: int | None,
    device_total_bytes: int | None,
    stated: tuple[int, int] | None,
) -> Iterator[int]:
    """Yield what a memory fraction may have allowed, likeliest first.

    The limit lies between the peak of reserved memory and the least that a failed request would
    have needed, and, if a message or a bundle states it, within that figure's rounding. People set
    round fractions, so these come first.
    """
    low = trace.totals.peak_reserved_bytes
    high = 2 * low + 1
    if len(trace.oom_rows) and lowest_need_bytes is not None:
        high = max(min(high, lowest_need_bytes), low + 1)
    if stated is not None and low <= stated[1] and stated[0] < high:
        low, high = max(low, stated[0]), min(high, stated[1] + 1)
    seen: set[int] = set()
    said = trace.settings.memory_fraction
    fractions = [p / 100 for p in (*range(10, 100, 10), *range(5, 100, 10), *range(1, 100))]
    total = device_total_bytes or recorded_capacity(trace)
    if total is not None:
        for fraction in fractions if said is None else [said, *fractions]:
            limit = int(fraction * total)
            if low <= limit < high and limit not in seen and len(seen) < N_LIMITS_TRIED:
                seen.add(limit)
                yield limit
    for i in range(N_LIMITS_TRIED):
        yield low + (high - low) * i // N_LIMITS_TRIED


# Rounds of treating unexplained frees as calls of empty_cache(), and completed frees as late ones.
MAX_ROUNDS = 3
# Work to spend on finding a memory fraction, and on the order of old blocks: half a second at most.
LIMIT_OPERATIONS = 5_000_000
MIN_TRIES = 4
LEARNING_OPERATIONS = 2_000_000
MAX_LEARNING = 10
# Operations that decide the order of equal blocks: of 44 recordings with 10,000 to 335,000 requests
# and a sound trace, none is reproduced better by another order than the one these show.
PREFIX_OPERATIONS = 10_000


class _Guess(Struct, frozen=True):
    """A set of values for what the file does not record."""

    era: Era
    settings: AllocatorSettings
    capacity_bytes: int | None
    allowed_bytes: int | None = None


class _Finder:
    """Tries guesses on one trace and keeps the best one."""

    def __init__(
        self,
        trace: Trace,
        torch_version: str | None,
        device_total_bytes: int | None,
        stated: tuple[int, int] | None,
    ) -> None:
        self.trace = trace
        self.total = device_total_bytes
        known = trace.snapshot.limits.get(trace.device)
        self.stated = stated if known is None else (known, known)
        self.capacity = recorded_capacity(trace)
        self.best: Reproduction | None = None
        self._n_tried = 0
        self._operations: dict[tuple[object, ...], _ext.NativeOps] = {}
        self.eras = eras_of(trace, torch_version)
        if len(self.eras) > 1 and trace.n_requests > PREFIX_OPERATIONS:
            # The beginning of a long trace shows the order well enough.
            shares: dict[Era, float] = {}
            for era in self.eras:
                shares[era] = self._address_share(era)
                if shares[era] == 1.0:
                    break
            self.eras = [max(shares, key=shares.__getitem__)]

    def try_(self, guess: _Guess) -> Reproduction:
        """Replay a guess, then retry with what the comparison suggests as long as that helps."""
        rows, late = frozenset[int](), frozenset[int]()
        best: Reproduction | None = None
        for _ in range(MAX_ROUNDS):
            one = self._replay(guess, rows, late)
            if best is None or one.score > best.score:
                best = one
            before, comparison = (rows, late), one.comparison
            del one  # otherwise its requests would stay in memory beside the best and the next ones
            rows = rows | set(comparison["unexplained_frees"])
            late = late | set(comparison["early_completions"])
            if (rows, late) == before:
                break
        assert best is not None  # noqa: S101 - the loop ran
        if self.best is None or best.score > self.best.score:
            self.best = best
        return best

    def _address_share(self, era: Era) -> float:
        """Return the share of addresses reproduced at the beginning of the trace."""
        guess = _Guess(era, self.trace.settings, self.capacity)
        one = self._replay(guess, frozenset(), frozenset(), PREFIX_OPERATIONS)
        return one.score[1]

    def _operations_for(
        self, limit: int, rows: frozenset[int], late: frozenset[int], *, collects: bool
    ) -> _ext.NativeOps:
        key = (limit, rows, late, collects)
        if key not in self._operations:
            self._operations.clear()  # only the last operations can be what the next guess needs
            try:
                self._operations[key] = _ext.NativeOps(
                    self.trace.native,
                    limit_bytes=limit,
                    is_collecting=collects,
                    empty_cache_rows=sorted(rows),
                    late_rows=sorted(late),
                    device_total_bytes=self.total or 0,
                )
            except ValueError as error:
                raise SimulationError(f"The trace cannot be replayed: {error}.") from error
        return self._operations[key]

    def _replay(
        self,
        guess: _Guess,
        rows: frozenset[int],
        late: frozenset[int],
        max_ops: int = UNLIMITED,
    ) -> Reproduction:
        capacity, allowed = guess.capacity_bytes, guess.allowed_bytes
        limits = [b for b in (capacity, allowed) if b is not None]
        collects = allowed is not None and guess.settings.garbage_collection_threshold > 0
        self._n_tried += 1
        report_progress(f"Reproducing the recorded run, attempt {self._n_tried}")
        operations = self._operations_for(min(limits, default=0), rows, late, collects=collects)
        if not limits:
            # The smallest capacity at which every recorded segment fits: the requests that would
            # have exceeded it are those whose flush the file shows.
            capacity = operations.facts()["peak_reserved_bytes"]
        conditions = Conditions(
            guess.settings, guess.era, capacity, allowed, self.total, capacity_is_least=not limits
        )
        raw, comparison = operations.replay_recorded(conditions.native(), max_ops)
        least = allowed
        if allowed is not None and self.trace.settings.memory_fraction is None:
            peak = self.trace.totals.peak_reserved_bytes
            is_stated = self.stated is not None and self.stated[0] <= allowed <= self.stated[1]
            least = max(peak, self.stated[0]) if self.stated is not None and is_stated else peak
        return Reproduction(
            self.trace,
            conditions,
            operations,
            raw,
            comparison,
            capacity_is_exact=self.capacity is not None,
            least_allowed_bytes=least,
        )


def reproduce(
    trace: Trace,
    *,
    torch_version: str | None = None,
    device_total_bytes: int | None = None,
    stated_limit: tuple[int, int] | None = None,
) -> Reproduction:
    """Return the best reproduction of a trace.

    If the version that wrote the file is unknown, every order of blocks is tried. The device's
    memory, if known, is the base of a memory fraction. ``stated_limit`` is the least and the most
    that the process was allowed, as a message states it; a bundle's limit is exact.

    Raises:
        ConfigError: if it is not a version.
        SimulationError: if there is nothing to replay, or the trace is not that of the native
            allocator.
    """
    _check(trace)
    told = torch_version, device_total_bytes, stated_limit
    finder = _Finder(trace, *told)
    best = _over_eras(finder)
    has_maps = bool((trace.events.action == Action.SEGMENT_MAP).any())
    if best.score[0] < 1.0 and has_maps and not trace.settings.expandable_segments:
        # The trace shows a setting that the file does not record.
        settings = trace.settings.changed(expandable_segments=True)
        other = Trace.of(trace.snapshot, trace.device, settings, trace.stacks)
        shown = _Finder(other, *told)
        better = _over_eras(shown)
        if better.score > best.score:
            finder, best = shown, better
    # A memory fraction would explain a failure while the driver had room, and, with garbage
    # collection set, segments freed before a request that would not have exceeded the capacity.
    has_failed = best.comparison["n_failed"] > best.comparison["n_failed_equal"]
    collects = best.trace.settings.garbage_collection_threshold > 0
    if best.score[0] < 1.0 and (has_failed or collects):
        best = _over_limits(finder, best)
    return _learned(best)


def _check(trace: Trace) -> None:
    backend = trace.snapshot.settings.backend
    if backend != "native":
        raise SimulationError(
            f"The snapshot was made with the backend {backend}, which the model does not know."
        )
    hint = "Record from the start on: fragdoctor run train.py"
    n_live = trace.lives.n_initial
    if trace.n_requests == 0 or (trace.n_events == 1 and n_live > 0):
        what = "no request" if trace.n_events else "no trace"
        if trace.n_requests:
            what = "one event only"
        raise SimulationError(
            f"The snapshot holds {what} of device {trace.device}: nothing to replay.", hint=hint
        )
    if is_foreign(trace):
        raise SimulationError(
            "Trace and segments contradict each other in "
            f"{sum(trace.contradictions.values())} places: "
            "another allocator made this file, or events are missing.",
            hint=hint,
        )


def _learned(best: Reproduction) -> Reproduction:
    """Return the reproduction, taking the order of blocks older than the trace from addresses.

    Among free blocks of equal size, the one made first is taken (2.12), and the trace of a ring
    buffer that lost its beginning does not say which that was, except by which was taken. What is
    learned is used as a fact about the start; the replay that is compared gets no hints.
    """
    if best.is_exact or best.trace.initial_reserved_bytes == 0:
        return best
    n_operations = max(best.operations.facts()["n_ops"], 1)
    # If only addresses differ, there is little to gain: a long trace is left as it is.
    budget = LEARNING_OPERATIONS if best.score[0] < 1.0 else LEARNING_OPERATIONS // 4
    n_rounds = min(MAX_LEARNING, budget // n_operations)
    if best.conditions.era is not Era.BLOCK_COUNTER:
        n_rounds = 0
    conditions, operations = best.conditions.native(), best.operations
    for i in range(n_rounds):
        report_progress("Learning the order of old blocks", i, n_rounds)
        operations = operations.learned(conditions)
        raw, comparison = operations.replay_recorded(conditions)
        one = replace(best, operations=operations, raw=raw, comparison=comparison)
        if one.score > best.score:
            best = one
        if best.is_exact:
            break
    return best


def _over_eras(finder: _Finder) -> Reproduction:
    best: Reproduction | None = None
    for era in finder.eras:
        one = finder.try_(_Guess(era, finder.trace.settings, finder.capacity))
        if best is None or one.score > best.score:
            best = one
        if one.is_exact:
            break
    assert best is not None  # noqa: S101 - there is always an era
    return best


def _over_limits(finder: _Finder, best: Reproduction) -> Reproduction:
    """Return the better of the reproduction and those with a memory fraction in force.

    The order of equal blocks that reproduced most without the fraction is tried first, but the
    effects of the fraction may have made a wrong order look better, so the others are tried next.
    """
    n_operations = max(best.operations.facts()["n_ops"], 1)
    need = best.operations.facts()["lowest_need_bytes"]
    limits = list(limits_of(finder.trace, need, finder.total, finder.stated))
    n_left = max(MIN_TRIES, LIMIT_OPERATIONS // n_operations)
    first = best.conditions.era
    for era in sorted(finder.eras, key=lambda era: era is not first):
        found = best.conditions.allowed_bytes
        for limit in limits[:n_left] if found is None else [found, *limits][:n_left]:
            n_left -= 1
            one = finder.try_(_Guess(era, finder.trace.settings, finder.capacity, limit))
            if one.score > best.score:
                best = one
            if one.is_exact:
                return best
            if one.score[0] == 1.0:
                break  # only addresses differ, and no limit changes those
    return best
