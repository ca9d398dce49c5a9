"""What-ifs: the same requests under other settings, another capacity, or with changed code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fragdoctor._native import _ext
from fragdoctor.allocator.fidelity import Baseline
from fragdoctor.allocator.replay import PAGE_BYTES, Conditions, allowed_by, result_of
from fragdoctor.errors import SimulationError
from fragdoctor.model.hooks import tell
from fragdoctor.model.settings import AllocatorSettings, era_of, parse_conf, parse_version
from fragdoctor.model.simulation import ReplayResult
from fragdoctor.units import format_mebibytes, plural

# Work spent on one search for a smallest capacity, in operations: a second or two.
SEARCH_OPERATIONS = 20_000_000
MIN_REPLAYS = 24
_ENDLESS = 2**50


@dataclass(frozen=True, slots=True)
class Scenario:
    """What differs from the recorded run; None and "" mean as recorded.

    Attributes:
        conf: setting string that replaces the recorded settings.
        capacity_bytes: what PyTorch could have of the device.
        memory_fraction: as for ``set_per_process_memory_fraction``.
        torch_version: whose rules and keys apply.
        device_total_bytes: base of the fraction; None = the capacity.
        edit: name of the changed code, for people.
    """

    conf: str | None = None
    capacity_bytes: int | None = None
    memory_fraction: float | None = None
    torch_version: str = ""
    device_total_bytes: int | None = None
    edit: str = ""


def default_capacity(baseline: Baseline) -> int | None:
    """Return what PyTorch could have in the recorded run, as far as the file shows it.

    Exact where a request failed; the least that explains the run where the cache was flushed to
    make room; else None.
    """
    if baseline.capacity_is_exact:
        return baseline.conditions.capacity_bytes
    if baseline.operations.facts()["n_flushed"] > 0:
        return baseline.conditions.capacity_bytes
    return None


def conditions_of(baseline: Baseline, scenario: Scenario) -> Conditions:
    """Return what a scenario means for the model.

    Raises:
        ConfigError: the settings or the version are wrong.
        SimulationError: a memory fraction of an unknown amount.
    """
    recorded = baseline.conditions
    version = scenario.torch_version
    settings = _settings(baseline, scenario)
    era = era_of(version) if version else recorded.era
    capacity = scenario.capacity_bytes
    if capacity is None:
        capacity = default_capacity(baseline)
    fraction = scenario.memory_fraction
    if fraction is None and scenario.conf is not None:
        fraction = settings.memory_fraction
    total = scenario.device_total_bytes
    allowed = None
    if fraction is not None:
        base = total or capacity
        if base is None:
            raise SimulationError(
                "A memory fraction needs the size of the device, which the file does not say.",
                hint="Give the capacity too.",
            )
        allowed = allowed_by(fraction, base, version)
    elif scenario.capacity_bytes is None:
        allowed = recorded.allowed_bytes
    return Conditions(settings, era, capacity, allowed, total, fraction, version)


def _settings(baseline: Baseline, scenario: Scenario) -> AllocatorSettings:
    if scenario.conf is None:
        return baseline.conditions.settings
    settings = parse_conf(scenario.conf, scenario.torch_version or None)
    if settings.backend != "native":
        raise SimulationError(
            f"The model knows the native allocator, not {settings.backend}.",
            hint="Leave backend out of the settings.",
        )
    return settings


def replay_scenario(
    baseline: Baseline,
    scenario: Scenario,
    operations: _ext.NativeOps | None = None,
    *,
    remakes_start: bool | None = None,
) -> ReplayResult:
    """Return what the model does with the requests of a trace in a scenario.

    Args:
        baseline: of the trace.
        scenario: what differs.
        operations: edited requests; those of the baseline where None.
        remakes_start: whether blocks older than the trace are requested anew; where None, only
            if the kind of segment changes.

    Raises:
        ConfigError: the settings or the version are wrong.
        SimulationError: the scenario cannot be replayed.
    """
    conditions = conditions_of(baseline, scenario)
    is_remade = _remakes_start(baseline, conditions) if remakes_start is None else remakes_start
    raw = (operations or baseline.operations).replay(conditions.native(), remake_initial=is_remade)
    note = ""
    if is_remade:
        n_blocks = len(baseline.prepared.undone.block_address)
        note = (
            f"the {plural(n_blocks, 'block')} older than the trace "
            f"{'is' if n_blocks == 1 else 'are'} requested anew, as if the setting had been on "
            "from the start"
        )
    return result_of(raw, conditions, edit=scenario.edit, note=note)


def _remakes_start(baseline: Baseline, conditions: Conditions) -> bool:
    """Return whether blocks older than the trace are requested anew.

    Under the recorded kind of segment they stay where they lie: that keeps the fragmentation of
    the time before. With expandable segments switched on or off they would have been elsewhere
    altogether, and old segments that can be neither grown nor returned would distort the answer.
    """
    recorded = baseline.conditions.settings.expandable_segments
    is_switched = conditions.settings.expandable_segments != recorded
    return is_switched and baseline.prepared.undone.initial_reserved_bytes > 0


def with_smallest_capacity(
    baseline: Baseline,
    scenario: Scenario,
    result: ReplayResult,
    operations: _ext.NativeOps | None = None,
) -> ReplayResult:
    """Return the result with the smallest capacity at which every request is served.

    Fitting is not monotone in capacity: a flush at the right moment can let a run pass on a
    smaller device. So the capacities are walked upward from the lower bound (peak requested bytes),
    jumping over those at which the run would be the very same, as far as the work allowed goes.
    """
    search = _CapacitySearch(baseline, scenario, operations or baseline.operations)
    smallest, note = search.run()
    return replace(result, smallest_capacity_bytes=smallest, smallest_capacity_note=note)


class _CapacitySearch:
    """Walks capacities of one scenario, within a bounded number of replays."""

    def __init__(self, baseline: Baseline, scenario: Scenario, operations: _ext.NativeOps) -> None:
        self.baseline = baseline
        self.scenario = scenario
        self.operations = operations
        n_operations = max(operations.facts()["n_ops"], 1)
        self.n_left = max(MIN_REPLAYS, SEARCH_OPERATIONS // n_operations)

    def fits(self, capacity: int) -> tuple[bool, int | None]:
        """Return whether the run fits, and the least capacity at which anything would change."""
        self.n_left -= 1
        tell(f"Looking for the smallest capacity, at most {self.n_left} replays more")
        scenario = replace(self.scenario, capacity_bytes=capacity)
        conditions = conditions_of(self.baseline, scenario)
        remade = _remakes_start(self.baseline, conditions)
        raw = self.operations.replay(conditions.native(), True, remade)
        change = raw["same_below_bytes"]
        if conditions.allowed_bytes is not None:
            change = capacity + PAGE_BYTES  # the fraction's limit moves with the capacity
        return raw["fits"], change

    def run(self) -> tuple[int | None, str]:
        """Return the smallest capacity, and what there is to say about it."""
        scenario = replace(self.scenario, capacity_bytes=_ENDLESS, memory_fraction=None)
        endless = conditions_of(self.baseline, scenario)
        remade = _remakes_start(self.baseline, endless)
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


ProgressCallback = Callable[[int, int], None]


def check_version(torch_version: str | None) -> str:
    """Return the version text, or "" for None.

    Raises:
        ConfigError: it is not a version.
    """
    if torch_version is None:
        return ""
    parse_version(torch_version)
    return torch_version
