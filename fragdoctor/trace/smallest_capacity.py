"""The smallest capacity at which a what-if still serves every request."""

from __future__ import annotations

from dataclasses import replace

from fragdoctor._native import _ext
from fragdoctor.model.hooks import report_progress
from fragdoctor.model.simulation import Outlook, OutlookState, ReplayResult
from fragdoctor.trace.outlook import Outlooks
from fragdoctor.trace.replay import PAGE_BYTES, Reproduction
from fragdoctor.trace.whatif import WhatIf, conditions_of, remakes_start_of, replay_what_if
from fragdoctor.units import format_mebibytes

# Work spent on one search for a smallest capacity, in operations: a second or two.
SEARCH_OPERATIONS = 20_000_000
MIN_REPLAYS = 24
MAX_HALVINGS = 12
_ENDLESS = 2**50


def with_smallest_capacity(
    reproduction: Reproduction,
    what_if: WhatIf,
    result: ReplayResult,
    operations: _ext.NativeOps | None = None,
    outlooks: Outlooks | None = None,
) -> ReplayResult:
    """Return the result with the smallest capacity at which every request is served.

    With outlooks that is the least at which the whole run goes on, as far as it is known.

    Fitting is not monotone in capacity: a flush at the right moment can let a run pass on a
    smaller device. So the capacities are walked upward from the lower bound (peak requested bytes),
    jumping over those at which the run would be the very same, as far as the work allowed goes.
    """
    search = _CapacitySearch(reproduction, what_if, operations or reproduction.operations)
    smallest, note = search.run()
    if outlooks is not None and smallest is not None and outlooks.continuation is not None:
        whole, about = search.whole_run(smallest, outlooks)
        outlook = None if result.outlook is None else replace(result.outlook, needs_bytes=whole)
        result = replace(result, outlook=outlook)
        smallest, note = whole or smallest, about or note
    return replace(result, smallest_capacity_bytes=smallest, smallest_capacity_note=note)


class _CapacitySearch:
    """Walks capacities of one what-if, within a bounded number of replays."""

    def __init__(
        self, reproduction: Reproduction, what_if: WhatIf, operations: _ext.NativeOps
    ) -> None:
        self.reproduction = reproduction
        self.what_if = what_if
        self.operations = operations
        n_operations = max(operations.facts()["n_ops"], 1)
        self.n_left = max(MIN_REPLAYS, SEARCH_OPERATIONS // n_operations)

    def fits(self, capacity: int) -> tuple[bool, int | None]:
        """Return whether the run fits, and the least capacity at which anything would change."""
        self.n_left -= 1
        report_progress(f"Looking for the smallest capacity, at most {self.n_left} replays more")
        what_if = replace(self.what_if, capacity_bytes=capacity)
        conditions = conditions_of(self.reproduction, what_if)
        remade = remakes_start_of(self.reproduction, conditions)
        raw = self.operations.replay(conditions.native(), True, remade)
        change = raw["same_below_bytes"]
        if conditions.allowed_bytes is not None:
            change = capacity + PAGE_BYTES  # the fraction's limit moves with the capacity
        return raw["fits"], change

    def run(self) -> tuple[int | None, str]:
        """Return the smallest capacity, and what there is to say about it."""
        what_if = replace(self.what_if, capacity_bytes=_ENDLESS, memory_fraction=None)
        endless = conditions_of(self.reproduction, what_if)
        remade = remakes_start_of(self.reproduction, endless)
        raw = self.operations.replay(replace(endless, allowed_bytes=None).native(), False, remade)
        if not raw["fits"]:
            return None, "a request fails at any capacity"
        # Not peak active: a cached block may be larger than the request, but need not be.
        low = _pages_up(raw["peak_requested_bytes"])
        high = _pages_up(raw["peak_reserved_bytes"])
        found = self._bisect(low, high)
        smallest, is_complete = self._walk(low, found, wanted=True)
        if smallest is None:
            smallest = found
        if not is_complete:
            return smallest, "not every smaller capacity was tried"
        failing, is_complete = self._walk(smallest, high, wanted=False)
        if failing is not None:
            return smallest, (
                f"not monotone: it fits here, but not with {format_mebibytes(failing)}; "
                f"from {format_mebibytes(high)} on it always fits"
            )
        return smallest, "" if is_complete else "not every larger capacity was tried"

    def whole_run(self, low: int, outlooks: Outlooks) -> tuple[int | None, str]:
        """Return the least capacity at which the run goes on after the recorded part, by halving.

        None, with the reason, where none is enough.
        """

        def outlook_at(capacity: int) -> Outlook | None:
            what_if = replace(self.what_if, capacity_bytes=capacity)
            return replay_what_if(
                self.reproduction, what_if, self.operations, outlooks=outlooks
            ).outlook

        endless = outlook_at(_ENDLESS)
        if endless is None or endless.peak_reserved_bytes is None:
            return None, ""
        if endless.growth_bytes_per_step:
            each = format_mebibytes(endless.growth_bytes_per_step)
            return None, f"of the recorded part: each step keeps {each} more, which never ends"
        high = max(_pages_up(endless.peak_reserved_bytes), low)
        for _ in range(MAX_HALVINGS):
            if high - low < PAGE_BYTES:
                break
            middle = (low + high) // 2 // PAGE_BYTES * PAGE_BYTES
            found = outlook_at(middle)
            if found is None or found.state is OutlookState.FAILS:
                low = middle + PAGE_BYTES
            else:
                high = middle
        return high, "with the steps that follow, as far as they are known"

    def _bisect(self, low: int, high: int) -> int:
        """Return a capacity that fits, by halving; only a start, for lack of monotony."""
        while low < high and self.n_left > MIN_REPLAYS // 2:
            middle = (low + high) // 2 // PAGE_BYTES * PAGE_BYTES
            if self.fits(middle)[0]:
                high = middle
            else:
                low = middle + PAGE_BYTES
        return high

    def _walk(self, low: int, high: int, *, wanted: bool) -> tuple[int | None, bool]:
        """Return the first capacity in [low, high) that fits (or fails), and if all were seen."""
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


def _pages_up(n_bytes: int) -> int:
    return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES
