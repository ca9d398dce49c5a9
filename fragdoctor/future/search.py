"""The settings worth trying on a recorded run, the search over them and for the smallest capacity.

One list serves every command: ``analyze`` tries the usual values of each key, ``simulate --sweep``
all values and sensible pairs. Every candidate is replayed exactly; nothing is extrapolated. Two
threads work at a time, since the native replay releases the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from fragdoctor._native import _ext
from fragdoctor.errors import ConfigError
from fragdoctor.future.whatif import WhatIf, conditions_of, remakes_start_of
from fragdoctor.model.hooks import report_progress
from fragdoctor.model.settings import Era, is_same_conf, parse_conf
from fragdoctor.model.simulation import Outlook, Prospect, ReplayResult
from fragdoctor.trace.replay import PAGE_BYTES, Reproduction
from fragdoctor.units import format_mebibytes

USUAL: Final = {
    "expandable_segments": ("True",),
    "max_split_size_mb": ("32", "64", "128", "256", "512"),
    "roundup_power2_divisions": ("2", "4", "8"),
    "garbage_collection_threshold": ("0.6", "0.8"),
}
"""The values that most guides suggest; only a few, since every analysis tries them."""

LAST_RESORT: Final = "roundup_power2_divisions"
"""The key that makes every block larger: it is tried where no other key serves the recording.

Of 198 failures in ``tests/truth``, another key serves 106, and rounding does no better in any of
them; of the other 92, rounding serves 2.
"""

OTHERS: Final = {
    "max_split_size_mb": ("20", "48", "96", "192", "384"),
    "roundup_power2_divisions": ("1", "16", "[256:1,512:2,1024:4,>:8]"),
    "large_segment_size_mb": ("32", "64", "128"),
}
"""The values between and beyond, for a sweep."""


def usual_confs(key: str) -> tuple[str, ...]:
    """Return the setting strings with the usual values of a key."""
    return tuple(f"{key}:{value}" for value in USUAL[key])


def _all_confs(key: str) -> list[str]:
    return [f"{key}:{value}" for value in (*USUAL.get(key, ()), *OTHERS.get(key, ()))]


def usual_candidates(
    reproduction: Reproduction, torch_version: str | None = None, *, last_resort: bool = False
) -> tuple[str, ...]:
    """Return each key alone with its usual values, provided the version knows it.

    ``last_resort`` says whether to return those of ``LAST_RESORT``, or those of the other keys.
    """
    wanted = (c for key in USUAL if (key == LAST_RESORT) == last_resort for c in usual_confs(key))
    return _known(wanted, reproduction, torch_version)


def sweep_candidates(reproduction: Reproduction, torch_version: str | None) -> tuple[str, ...]:
    """Return each key alone over all its values, and sensible pairs.

    Garbage collection does nothing without a memory fraction, so it comes with one unless one is
    in force. Expandable segments and ``max_split_size_mb`` exclude each other: oversize rules still
    apply to expandable blocks, and reserved memory can grow without bound.
    """
    divisions = usual_confs("roundup_power2_divisions")
    segments = _all_confs("large_segment_size_mb")
    limit = "" if reproduction.conditions.allowed_bytes is not None else _LIMIT
    collect = [f"{conf}{limit}" for conf in usual_confs("garbage_collection_threshold")]
    wanted = [
        "",
        *_all_confs("expandable_segments"),
        *_all_confs("max_split_size_mb"),
        *_all_confs("roundup_power2_divisions"),
        *segments,
        *collect,
        *(f"expandable_segments:True,{other}" for other in (*divisions, *segments)),
        *(f"max_split_size_mb:{mb},{d}" for mb in (64, 128, 256) for d in divisions),
        *(f"max_split_size_mb:{mb},{c}" for mb in (128, 256) for c in collect),
    ]
    return _known(wanted, reproduction, torch_version)


_LIMIT: Final = ",per_process_memory_fraction:0.95"


def _known(
    wanted: Iterable[str], reproduction: Reproduction, torch_version: str | None
) -> tuple[str, ...]:
    """Return the strings that the version accepts, without the recorded one and duplicates.

    Without a version, keys that came after the recording's version are left out: an unknown key is
    an error at first use of the device.
    """
    low = reproduction.trace.snapshot.provenance.version_low  # no newer than the recording's
    oldest = {Era.SEGMENT_COUNTER: "2.13.0", Era.BLOCK_COUNTER: "2.12.0", Era.ADDRESS: "2.1.0"}
    known_low = (low if low.count(".") > 1 else f"{low}.0") if low else ""
    version = torch_version or known_low or oldest[reproduction.conditions.era]
    recorded = reproduction.conditions.settings.conf
    known = []
    for conf in dict.fromkeys(wanted):
        if is_same_conf(conf, recorded):
            continue
        try:
            parse_conf(conf, version)
        except ConfigError:
            continue
        known.append(conf)
    return tuple(known)


def best_of(results: Sequence[ReplayResult]) -> ReplayResult | None:
    """Return the result that fits and ranks first; None if none fits."""
    fitting = [r for r in results if r.fits and r.is_conclusive]
    return min(fitting, key=rank_of, default=None)


def rank_of(result: ReplayResult) -> tuple[Prospect, int, int, int, int]:
    """Return a sort key of results that serve every recorded request, the best first.

    How the run goes on decides, then how much room is left: later steps may be larger. The price
    for each run comes last: retries (each waits for the device) and driver calls.
    """
    return (
        Prospect.of(result.outlook),
        -steps_won(result.outlook),
        -result.room_bytes,
        result.retries,
        result.driver_calls,
    )


def steps_won(outlook: Outlook | None) -> int:
    """Return how many steps a run makes before it fails again, or 0 if it may not fail."""
    return (outlook.fails_after_steps or 0) if outlook is not None else 0


def gaining(results: Sequence[ReplayResult], recorded: ReplayResult) -> list[ReplayResult]:
    """Return the results that are better than the recorded one and worse in nothing.

    If the recorded settings fail, any result that fits gains.
    """
    if not recorded.fits:
        return list(results)
    had = recorded.retries, recorded.peak_reserved_bytes
    return [
        r
        for r in results
        if r.retries <= had[0]
        and r.peak_reserved_bytes <= had[1]
        and (r.retries, r.peak_reserved_bytes) != had
    ]


def pareto_of(results: Sequence[ReplayResult]) -> tuple[ReplayResult, ...]:
    """Return the results that none beats in both peak reserved memory and driver calls, by peak."""
    known = [r for r in results if r.is_conclusive] or list(results)
    fitting = [r for r in known if r.fits] or known
    front: list[ReplayResult] = []
    for result in sorted(fitting, key=lambda r: (r.peak_reserved_bytes, r.driver_calls)):
        if not front or result.driver_calls < front[-1].driver_calls:
            front.append(result)
    return tuple(front)


# Work spent on one search for the smallest capacity, in operations: a second or two.
SEARCH_OPERATIONS = 20_000_000
MIN_REPLAYS = 24
MAX_HALVINGS = 12
_ENDLESS = 2**50


def with_smallest_capacity(  # noqa: PLR0913 - one question of a what-if
    reproduction: Reproduction,
    what_if: WhatIf,
    result: ReplayResult,
    operations: _ext.NativeOps | None = None,
    look: Callable[[WhatIf], Outlook | None] | None = None,
    *,
    is_steady: bool = False,
) -> ReplayResult:
    """Return the result with the smallest capacity at which every request is served.

    With ``is_steady``, it is the smallest such that every larger capacity serves them too.

    With ``look``, which says how the run continues in a what-if, it is the smallest at which the
    whole run continues, as far as that is known.

    Fitting is not monotone in capacity: a flush at the right moment can let a run pass on a
    smaller device. So the search walks upward from the lower bound (peak requested bytes), jumping
    over capacities at which the run would be exactly the same, until it has used up its work.
    """
    search = _CapacitySearch(reproduction, what_if, operations or reproduction.operations)
    smallest, note = search.run(is_steady=is_steady)
    if look is not None and smallest is not None:
        whole, about = search.whole_run(smallest, look)
        outlook = None if result.outlook is None else replace(result.outlook, needs_bytes=whole)
        result = replace(result, outlook=outlook)
        smallest, note = whole or smallest, about or note
    return replace(result, smallest_capacity_bytes=smallest, smallest_capacity_note=note)


def is_served(
    reproduction: Reproduction, operations: _ext.NativeOps, capacity_bytes: int, *, is_steady: bool
) -> bool:
    """Return whether requests are served at a capacity; if ``is_steady``, at every larger one too.

    The check stops when the work allowed for one search is used up.
    """
    search = _CapacitySearch(reproduction, WhatIf(), operations)
    if not is_steady:
        return search.fits(capacity_bytes)[0]
    failing, _ = search.walk(capacity_bytes, _ENDLESS, wanted=False)
    return failing is None


class _CapacitySearch:
    """Walks the capacities of one what-if within a bounded number of replays."""

    def __init__(
        self, reproduction: Reproduction, what_if: WhatIf, operations: _ext.NativeOps
    ) -> None:
        self.reproduction = reproduction
        self.what_if = what_if
        self.operations = operations
        n_operations = max(operations.facts()["n_ops"], 1)
        self.n_left = max(MIN_REPLAYS, SEARCH_OPERATIONS // n_operations)

    def fits(self, capacity: int) -> tuple[bool, int | None]:
        """Return whether the run fits, and the smallest capacity at which anything would change."""
        self.n_left -= 1
        report_progress(f"Looking for the smallest capacity, at most {self.n_left} more replays")
        what_if = replace(self.what_if, capacity_bytes=capacity)
        conditions = conditions_of(self.reproduction, what_if)
        remade = remakes_start_of(self.reproduction, conditions)
        raw = self.operations.replay(conditions.native(), True, remade)
        change = raw["same_below_bytes"]
        if conditions.allowed_bytes is not None:
            change = capacity + PAGE_BYTES  # the fraction's limit moves with the capacity
        return raw["fits"], change

    def run(self, *, is_steady: bool) -> tuple[int | None, str]:
        """Return the smallest capacity, and a note about it."""
        what_if = replace(self.what_if, capacity_bytes=_ENDLESS, memory_fraction=None)
        endless = conditions_of(self.reproduction, what_if)
        remade = remakes_start_of(self.reproduction, endless)
        raw = self.operations.replay(replace(endless, allowed_bytes=None).native(), False, remade)
        if not raw["fits"]:
            return None, "a request fails at any capacity"
        # Not peak active: a cached block may be larger than the request, but it need not be.
        low = _pages_up(raw["peak_requested_bytes"])
        high = _pages_up(raw["peak_reserved_bytes"])
        found = _least(low, high, lambda c: self.fits(c)[0], self.n_left - MIN_REPLAYS // 2)
        smallest, is_complete = self.walk(low, found, wanted=True)
        if smallest is None:
            smallest = found
        if not is_complete:
            return smallest, "not every smaller capacity was tried"
        failing, is_complete = self.walk(smallest, high, wanted=False)
        while is_steady and failing is not None and is_complete:
            above, is_complete = self.walk(failing, high, wanted=True)
            smallest = high if above is None else above
            failing, is_complete = self.walk(smallest, high, wanted=False)
        if failing is not None:
            return smallest, (
                f"not monotone: it fits here, but not with {format_mebibytes(failing)}; "
                f"from {format_mebibytes(high)} on it always fits"
            )
        return smallest, "" if is_complete else "not every larger capacity was tried"

    def whole_run(
        self, low: int, look: Callable[[WhatIf], Outlook | None]
    ) -> tuple[int | None, str]:
        """Return the smallest capacity at which the run survives its continuation, by halving.

        Returns None, with the reason, if no capacity is enough.
        """

        def outlook_at(capacity: int) -> Outlook | None:
            return look(replace(self.what_if, capacity_bytes=capacity))

        endless = outlook_at(_ENDLESS)
        if endless is None or endless.peak_reserved_bytes is None:
            return None, ""
        if endless.growth_bytes_per_step:
            each = format_mebibytes(endless.growth_bytes_per_step)
            return None, f"of the recorded part: each step keeps {each} more, which never ends"

        def goes_on(capacity: int) -> bool:
            found = outlook_at(capacity)
            return found is not None and not found.fails

        high = max(_pages_up(endless.peak_reserved_bytes), low)
        least = _least(low, high, goes_on, MAX_HALVINGS)
        return least, "with the steps that follow, as far as they are known"

    def walk(self, low: int, high: int, *, wanted: bool) -> tuple[int | None, bool]:
        """Return the first capacity in [low, high) that fits (or fails), and if all were tried."""
        at = low
        while at < high:
            if self.n_left <= 0:
                return None, False
            is_fit, change = self.fits(at)
            if is_fit is wanted:
                return at, True
            if change is None:
                return None, True
            at = max(_pages_up(change), at + PAGE_BYTES)
        return None, True


def _least(low: int, high: int, is_enough: Callable[[int], bool], n_tries: int) -> int:
    """Return the smallest capacity that is enough, by halving at most ``n_tries`` times."""
    while high - low >= PAGE_BYTES and n_tries > 0:
        middle = (low + high) // 2 // PAGE_BYTES * PAGE_BYTES
        low, high = (low, middle) if is_enough(middle) else (middle + PAGE_BYTES, high)
        n_tries -= 1
    return high


def _pages_up(n_bytes: int) -> int:
    return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES
