"""The recorded run reproduced, and candidates replayed against it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from fragdoctor.diagnosis.remedies.remedy import Attempt, JudgedCase
from fragdoctor.errors import ConfigError, SimulationError
from fragdoctor.model.diagnosis import FidelityReport, Predicted
from fragdoctor.model.hooks import tell
from fragdoctor.model.simulation import ReplayResult, Simulation
from fragdoctor.trace.fidelity import Reproduction
from fragdoctor.trace.simulate import reproduce, return_free_memory, simulation_of
from fragdoctor.trace.whatif import FairReplay

USABLE_SHARE = 0.5  # below this the model runs another program than the recorded one
N_THREADS = 2  # the native replay releases the interpreter lock
# An edit makes a request list of its own, of 24 bytes each; lists longer than this take turns.
MAX_CONCURRENT_OPERATIONS = 1_000_000
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Bench:
    """A reproduced run to try things on."""

    reproduction: Reproduction
    simulation: Simulation
    fair_replay: FairReplay
    turn: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def is_exact(self) -> bool:
        """Whether what-ifs are replays, not estimates."""
        return self.simulation.method == "replay"

    @property
    def is_proof(self) -> bool:
        """Whether nothing at all of the recording differs, so that a replay proves its outcome."""
        return self.is_exact and self.simulation.fidelity.share == 1.0

    @property
    def is_usable(self) -> bool:
        """Whether the model follows the recorded run closely enough to estimate anything.

        It does if most of the recording is reproduced, and it fails where the recording does.
        """
        if self.is_exact:
            return True
        n_failed = self.reproduction.comparison["n_failed"]
        agrees = self.reproduction.comparison["n_failed_equal"] == n_failed
        return agrees and (self.simulation.fidelity.share or 0.0) >= USABLE_SHARE

    @property
    def recorded(self) -> ReplayResult:
        """The recorded run as the model reproduces it."""
        return self.simulation.baseline

    def run(
        self, attempts: Sequence[Attempt], progress: Progress | None = None
    ) -> list[ReplayResult | None]:
        """Return a result per attempt, None where the trace does not say enough for it."""
        results: list[ReplayResult | None] = []
        tell("Replaying", 0, len(attempts))
        with ThreadPoolExecutor(N_THREADS) as pool:
            for i, result in enumerate(pool.map(self._run, attempts), start=1):
                results.append(result)
                tell("Replaying", i, len(attempts))
                if progress is not None:
                    progress(i, len(attempts))
        return_free_memory(self.reproduction)
        return results

    def _run(self, attempt: Attempt) -> ReplayResult | None:
        try:
            if attempt.edit is None:
                return self.fair_replay.replay(attempt.what_if)
            with self._turn_to_edit():
                operations = attempt.edit.apply(self.reproduction)
                return self.fair_replay.replay(attempt.what_if, operations)
        except (SimulationError, ConfigError):
            return None  # the proposal stands untested, and says so

    def _turn_to_edit(self) -> AbstractContextManager[object]:
        n_operations = self.reproduction.operations.facts()["n_ops"]
        return self.turn if n_operations > MAX_CONCURRENT_OPERATIONS else nullcontext()

    def predicted(self, result: ReplayResult) -> Predicted:
        """Return a result as a prediction, with the fidelity of the reproduction beside it.

        An inconclusive one predicts nothing.
        """
        if not result.is_conclusive:
            return Predicted()
        return Predicted(
            fits=result.fits,
            peak_reserved_bytes=result.peak_reserved_bytes,
            retries=result.retries,
            method=self.simulation.method,
            driver_calls=result.driver_calls,
            margin_bytes=result.margin_bytes,
            fidelity_share=self.simulation.fidelity.share,
        )


def set_up(case: JudgedCase) -> tuple[Bench | None, FidelityReport]:
    """Return the bench for a case, None with the reason where its trace cannot be replayed."""
    analysis = case.context.analysis
    if analysis is None:
        return None, FidelityReport(reason="no snapshot was given")
    try:
        reproduction = reproduce(
            analysis.trace,
            torch_version=case.context.case.overrides.torch_version,
            device_total_bytes=case.context.total_bytes,
        )
    except SimulationError as error:
        return None, FidelityReport(reason=error.message)
    simulation = simulation_of(reproduction, ())
    return Bench(reproduction, simulation, FairReplay(reproduction)), simulation.fidelity
