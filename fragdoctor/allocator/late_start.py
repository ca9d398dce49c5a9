"""What-ifs on traces that begin late: what was live before them was laid out under other settings.

A program under other settings would have had another layout when the recording began, and the file
does not say which. So such a what-if is replayed twice, from the recorded layout and from an empty
device on which the live blocks are made first, and only what both say is taken for known.
"""

from __future__ import annotations

from dataclasses import replace

from fragdoctor._native import _ext
from fragdoctor.allocator.fidelity import Baseline
from fragdoctor.allocator.whatif import Scenario, replay_scenario
from fragdoctor.model.simulation import ReplayResult

FROM_EMPTY = "replayed from an empty device: what was live before the recording is made anew"
OPEN = (
    "not known: it fails from the recorded layout and fits from an empty device, and the history "
    "between the two is not in the file"
)


class LateStart:
    """Replays scenarios of one baseline fairly, whether or not its trace begins late."""

    def __init__(self, baseline: Baseline) -> None:
        self._baseline = baseline
        self._is_late = len(baseline.prepared.undone.block_address) > 0
        self._made_anew: _ext.NativeOps | None = None
        self._is_served_from_empty = True
        if self._is_late:
            self._made_anew = baseline.operations.from_empty()
            recorded = replay_scenario(baseline, Scenario(), self._made_anew)
            self._is_served_from_empty = recorded.fits

    def replay(
        self, scenario: Scenario, operations: _ext.NativeOps | None = None
    ) -> ReplayResult:
        """Return what the model does in a scenario; ``is_conclusive`` says whether it is known.

        Raises:
            ConfigError: the settings or the version are wrong.
            SimulationError: the scenario cannot be replayed.
        """
        if self._made_anew is None or scenario.conf is None or self._is_as_recorded(scenario.conf):
            return replay_scenario(self._baseline, scenario, operations)
        anew = self._made_anew if operations is None else operations.from_empty()
        if not self._is_served_from_empty:  # the trouble is in the trace itself: compare there
            result = replay_scenario(self._baseline, scenario, anew)
            return replace(result, note=FROM_EMPTY)
        kept = replay_scenario(self._baseline, scenario, operations)
        made = replay_scenario(self._baseline, scenario, anew)
        if not made.fits:
            return replace(made, note=FROM_EMPTY)
        if not kept.fits:
            return replace(kept, note=OPEN, is_conclusive=False)
        return max((kept, made), key=lambda r: (r.retries, r.peak_reserved_bytes))

    def _is_as_recorded(self, conf: str) -> bool:
        recorded = self._baseline.conditions.settings.conf
        return "".join(conf.split()) == "".join(recorded.split())
