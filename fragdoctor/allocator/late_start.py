"""What-ifs on traces that begin late: what was live before them was laid out under other settings.

A program under other settings would have had another layout when the recording began, and the file
does not say which. So such a what-if is replayed from two starts, the recorded layout and an empty
device on which the live blocks are made first, and only what follows from both is taken for known.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from fragdoctor._native import _ext
from fragdoctor.allocator.fidelity import Baseline
from fragdoctor.allocator.whatif import Scenario, replay_scenario
from fragdoctor.model.settings import is_same_conf
from fragdoctor.model.simulation import ReplayResult

OPEN = (
    "not known: made anew on an empty device the run has no trouble even as recorded, so what "
    "matters happened before the recording"
)


class LateStart:
    """Replays scenarios of one baseline fairly, whether or not its trace begins late."""

    def __init__(self, baseline: Baseline) -> None:
        self._baseline = baseline
        self._is_late = len(baseline.prepared.undone.block_address) > 0

    @cached_property
    def _shows_trouble(self) -> bool:
        """Whether a start from empty shows the trouble of the recorded run; one more replay."""
        made = replay_scenario(self._baseline, Scenario(), remakes_start=True)
        recorded = self._baseline.result
        return made.fits == recorded.fits and (
            not made.fits or (made.retries > 0) == (recorded.retries > 0)
        )

    def replay(self, scenario: Scenario, operations: _ext.NativeOps | None = None) -> ReplayResult:
        """Return what the model does in a scenario; ``is_conclusive`` says whether it is known.

        Raises:
            ConfigError: the settings or the version are wrong.
            SimulationError: the scenario cannot be replayed.
        """
        recorded = self._baseline.conditions.settings.conf
        if not self._is_late or scenario.conf is None or is_same_conf(scenario.conf, recorded):
            return replay_scenario(self._baseline, scenario, operations)
        made = replay_scenario(self._baseline, scenario, operations, remakes_start=True)
        if not made.fits or self._shows_trouble:
            return made
        kept = replay_scenario(self._baseline, scenario, operations, remakes_start=False)
        # A limit below what was reserved when the recording began has no such start.
        if kept.fits and (kept.margin_bytes or 0) >= 0:
            return max((kept, made), key=lambda r: (r.retries, r.peak_reserved_bytes))
        return replace(made, note=OPEN, is_conclusive=False)
