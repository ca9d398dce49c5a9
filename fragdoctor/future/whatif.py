"""What-ifs: the same requests under other settings, another capacity, or with changed code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from fragdoctor._native import _ext
from fragdoctor.errors import SimulationError
from fragdoctor.future.other_run import OtherRun
from fragdoctor.future.outlook import Outlooks
from fragdoctor.future.repetition import BoundedContainer
from fragdoctor.model.conf_keys import parse_version
from fragdoctor.model.hooks import report_progress
from fragdoctor.model.settings import AllocatorSettings, era_of, is_same_conf, parse_conf
from fragdoctor.model.simulation import Outlook, OutlookState, ReplayResult
from fragdoctor.trace.operations import Operations, OpKind
from fragdoctor.trace.replay import Conditions, Reproduction, allowed_by, result_of
from fragdoctor.units import plural

N_THREADS = 2  # the native replay releases the interpreter lock

OPEN = (
    "not known: restarted on an empty device, the run has no trouble even as recorded, so the "
    "cause is older than the recording"
)

ROUNDED = (
    "not known: the recording has the failed request only as roundup_power2_divisions rounded it; "
    "the original size may be small enough"
)

MISSED = (
    "the model does not run out of memory where the recorded run did, so it cannot say what is "
    "enough"
)

LIMIT = (
    "the recording does not say what the memory fraction allows; the run fails with the least that "
    "explains it, but may not with more"
)


class WhatIf(Struct, frozen=True):
    """What differs from the recorded run; None and "" mean as recorded.

    Attributes:
        conf: setting string that replaces the recorded settings.
        capacity_bytes: what PyTorch could have of the device.
        memory_fraction: as for ``set_per_process_memory_fraction``.
        torch_version: version whose rules and keys apply.
        allowed_bytes: limit by a memory fraction that the recording does not state; None means the
            smallest limit that explains the recording.
        edit: name of the changed code, for people.
    """

    conf: str | None = None
    capacity_bytes: int | None = None
    memory_fraction: float | None = None
    torch_version: str = ""
    allowed_bytes: int | None = None
    edit: str = ""


def default_capacity(reproduction: Reproduction) -> int | None:
    """Return what PyTorch could have in the recorded run, as far as the file shows it.

    It is exact if a request failed, and the smallest amount that explains the run if the cache was
    flushed to make room; otherwise None.
    """
    if reproduction.capacity_is_exact:
        return reproduction.conditions.capacity_bytes
    if reproduction.operations.facts()["n_flushed"] > 0:
        return reproduction.conditions.capacity_bytes
    return None


def conditions_of(reproduction: Reproduction, what_if: WhatIf) -> Conditions:
    """Return the model's conditions for a what-if.

    Raises:
        ConfigError: if the settings or the version are wrong.
        SimulationError: if a memory fraction is of an unknown amount.
    """
    recorded = reproduction.conditions
    version = what_if.torch_version
    settings = _settings(reproduction, what_if)
    era = era_of(version) if version else recorded.era
    capacity = what_if.capacity_bytes
    if capacity is None:
        capacity = default_capacity(reproduction)
    fraction = what_if.memory_fraction
    if fraction is None and what_if.conf is not None:
        fraction = settings.memory_fraction
    allowed = None
    if fraction is not None:
        if capacity is None:
            raise SimulationError(
                "A memory fraction needs the size of the device, which the file does not say.",
                hint="Give the capacity too.",
            )
        allowed = allowed_by(fraction, capacity, version)
    elif what_if.capacity_bytes is None:
        # Whatever holds under the least limit that explains the recording holds under all.
        allowed = what_if.allowed_bytes or reproduction.least_allowed_bytes
    return Conditions(
        settings, era, capacity, allowed, memory_fraction=fraction, torch_version=version
    )


def _settings(reproduction: Reproduction, what_if: WhatIf) -> AllocatorSettings:
    if what_if.conf is None:
        return reproduction.conditions.settings
    return parse_conf(what_if.conf, what_if.torch_version or None)


def replay_what_if(
    reproduction: Reproduction,
    what_if: WhatIf,
    operations: _ext.NativeOps | None = None,
    *,
    remakes_start: bool | None = None,
    outlooks: Outlooks | None = None,
) -> ReplayResult:
    """Return what the model does with the requests of a trace in a what-if.

    Args:
        reproduction: reproduction of the trace.
        what_if: what differs.
        operations: edited requests; those of the reproduction if None.
        remakes_start: whether blocks older than the trace are requested anew; if None, only if the
            kind of segment changes.
        outlooks: the futures of these requests, to look beyond them; if None, only the recorded
            part is played.

    Raises:
        ConfigError: if the settings or the version are wrong.
        SimulationError: if the what-if cannot be replayed.
    """
    conditions = conditions_of(reproduction, what_if)
    is_remade = (
        remakes_start_of(reproduction, conditions) if remakes_start is None else remakes_start
    )
    outlook = None
    if outlooks is None:
        requests = operations or reproduction.operations
        raw = requests.replay(conditions.native(), remake_initial=is_remade)
    else:
        raw, outlook = outlooks.replay(conditions, remakes_start=is_remade)
    note = ""
    if is_remade:
        n_blocks = reproduction.trace.lives.n_initial
        note = (
            f"the {plural(n_blocks, 'block')} older than the trace "
            f"{'is' if n_blocks == 1 else 'are'} requested again, as if the setting had been on "
            "from the start"
        )
    result = result_of(raw, conditions, edit=what_if.edit, note=note)
    return replace(result, outlook=outlook)


def remakes_start_of(reproduction: Reproduction, conditions: Conditions) -> bool:
    """Return whether blocks older than the trace are requested anew.

    With the recorded kind of segment they stay where they are, which keeps the fragmentation from
    before. With expandable segments switched on or off they would have been somewhere else
    altogether, and old segments that can be neither grown nor returned would distort the answer.
    """
    recorded = reproduction.conditions.settings.expandable_segments
    is_switched = conditions.settings.expandable_segments != recorded
    return is_switched and reproduction.trace.initial_reserved_bytes > 0


class FairReplay:
    """Replays what-ifs of one reproduction fairly, whether or not its trace begins late.

    Under other settings, a program would have had another layout when the recording began, and the
    file does not say which. So such a what-if is replayed from two starts, the recorded layout and
    an empty device on which the live blocks are made first; only what follows from both is treated
    as known.
    """

    def __init__(
        self,
        reproduction: Reproduction,
        max_steps: int | None = None,
        other: OtherRun | None = None,
        container: BoundedContainer | None = None,
    ) -> None:
        """Take a reproduction.

        Args:
            reproduction: reproduction of the trace.
            max_steps: how many whole steps to play after the current one. If None, play until the
                steps repeat.
            other: a recording of the same program that goes further; it says how the run continues
                wherever the code is as recorded.
            container: a container with a limit that is filling up.
        """
        self.reproduction = reproduction
        self.other = other
        self._max_steps = max_steps
        self._container = container
        self._is_late = reproduction.trace.lives.n_initial > 0
        self._turn = threading.Lock()
        self._done: dict[WhatIf, ReplayResult] = {}

    @cached_property
    def _shows_trouble(self) -> bool:
        """Whether a start from empty shows the trouble of the recorded run; costs one replay."""
        made = replay_what_if(self.reproduction, WhatIf(), remakes_start=True)
        recorded = self.reproduction.result
        return made.fits == recorded.fits and (
            not made.fits or (made.retries > 0) == (recorded.retries > 0)
        )

    @property
    def _misses_failure(self) -> bool:
        """Whether the model serves every request of a run in which one failed."""
        reproduction = self.reproduction
        return reproduction.result.fits and reproduction.comparison["n_failed"] > 0

    @cached_property
    def _outlooks(self) -> Outlooks:
        """The futures of the requests as recorded."""
        reproduction = self.reproduction
        return Outlooks(
            reproduction.trace,
            reproduction.operations,
            self._max_steps,
            container=self._container,
        )

    def step_needs_bytes(self) -> int | None:
        """Return what must be live at once in the current step, or None if that is not known."""
        other = None if self.other is None else self.other.step_needs_bytes()
        return self._outlooks.step_needs_bytes() if other is None else other

    def outlooks_of(self, operations: _ext.NativeOps | None) -> Outlooks:
        """Return the futures of edited requests, or of the recorded ones if None."""
        if operations is None:
            return self._outlooks
        return Outlooks(
            self.reproduction.trace,
            operations,
            self._max_steps,
            is_edited=True,
            recorded=self._outlooks,
        )

    def look_of(
        self, operations: _ext.NativeOps | None
    ) -> Callable[[WhatIf], Outlook | None] | None:
        """Return a function that says how requests continue, or None if no whole step is known."""
        reproduction, outlooks = self.reproduction, self.outlooks_of(operations)
        other = self.other if operations is None else None
        if outlooks.repetition is None and other is None:
            return None

        def look(what_if: WhatIf) -> Outlook | None:
            own = replay_what_if(reproduction, what_if, operations, outlooks=outlooks).outlook
            return own if other is None or own is None else self._known_better(what_if, own)

        return look

    def _known_better(self, what_if: WhatIf, own: Outlook) -> Outlook:
        """Return how the run continues, by the other recording if it knows more."""
        other = self.other
        if other is None or not other.knows_better_than(own):
            return own
        return other.outlook(conditions_of(self.reproduction, what_if))

    def replay(
        self, what_if: WhatIf, operations: _ext.NativeOps | None = None, *, looks_on: bool = True
    ) -> ReplayResult:
        """Return what the model does in a what-if; ``is_conclusive`` says whether that is known.

        Args:
            what_if: what differs.
            operations: edited requests; those of the reproduction if None.
            looks_on: whether to play what comes after the recorded part too.

        Raises:
            ConfigError: if the settings or the version are wrong.
            SimulationError: if the what-if cannot be replayed.
        """
        if operations is not None or not looks_on:
            return self._replayed(what_if, operations, looks_on=looks_on)
        if what_if not in self._done:
            self._done[what_if] = self._unless_limit(what_if, self._continued(what_if))
        return self._done[what_if]

    def _continued(self, what_if: WhatIf) -> ReplayResult:
        """Return the result of a what-if, continued by what knows best how the run goes on."""
        result = self._replayed(what_if, None, looks_on=True)
        if self._is_late and self.other is not None and not (result.fits and result.is_conclusive):
            whole = self.other.whole(conditions_of(self.reproduction, what_if))
            if whole is not None:
                return whole
        if result.fits and self._misses_failure:
            result = replace(result, note=f"not known: {MISSED}", is_conclusive=False)
            if result.outlook is not None and not result.outlook.fails:
                result = replace(result, outlook=Outlook(OutlookState.OPEN, reason=MISSED))
        elif result.fits and result.outlook is not None:
            result = replace(result, outlook=self._known_better(what_if, result.outlook))
        return result

    def replay_all(self, what_ifs: Sequence[WhatIf]) -> list[ReplayResult]:
        """Return the result of :meth:`replay` for each what-if.

        Raises:
            ConfigError: if the settings or the version of one are wrong.
            SimulationError: if one cannot be replayed.
        """
        results: list[ReplayResult] = []
        with ThreadPoolExecutor(N_THREADS) as pool:
            for result in pool.map(self.replay, what_ifs):
                results.append(result)
                report_progress("Replaying", len(results), len(what_ifs))
        return results

    def _replayed(
        self, what_if: WhatIf, operations: _ext.NativeOps | None, *, looks_on: bool
    ) -> ReplayResult:
        recorded = self.reproduction.conditions.settings.conf
        outlooks = None
        if looks_on:
            with self._turn:  # work out only once what comes next
                outlooks = self.outlooks_of(operations)
        if not self._is_late or what_if.conf is None or is_same_conf(what_if.conf, recorded):
            made = replay_what_if(self.reproduction, what_if, operations, outlooks=outlooks)
            return self._unless_rounded(made, what_if, operations)
        made = replay_what_if(
            self.reproduction, what_if, operations, remakes_start=True, outlooks=outlooks
        )
        if not made.fits or self._shows_trouble:
            return made
        kept = replay_what_if(
            self.reproduction, what_if, operations, remakes_start=False, outlooks=outlooks
        )
        # No such start exists under a limit below what was reserved when the recording began.
        if kept.fits and (kept.margin_bytes or 0) >= 0:
            return max((kept, made), key=lambda r: (r.retries, r.peak_reserved_bytes))
        return replace(made, note=OPEN, is_conclusive=False)

    def _unless_limit(self, what_if: WhatIf, result: ReplayResult) -> ReplayResult:
        """Return a result; it is open if only the smallest possible limit makes it fail.

        If the likeliest limit does too, the failure comes no sooner than under that limit.
        """
        likeliest = self.reproduction.conditions.allowed_bytes
        used = conditions_of(self.reproduction, what_if).allowed_bytes
        if likeliest is None or used is None or used >= likeliest or not _fails(result):
            return result
        more = replace(what_if, allowed_bytes=likeliest)
        later = self._continued(more)
        if _fails(later):
            return later if result.fits else result
        if not result.fits:
            return replace(result, note=f"not known: {LIMIT}", is_conclusive=False)
        return replace(later, outlook=Outlook(OutlookState.OPEN, reason=LIMIT))

    def _unless_rounded(
        self, made: ReplayResult, what_if: WhatIf, operations: _ext.NativeOps | None
    ) -> ReplayResult:
        """Return a result; it is inconclusive if a failed request may have been small enough.

        A snapshot has the size of a failed request as rounded by ``roundup_power2_divisions``.
        Without that setting, the request is smaller by less than one division of the power of two.
        """
        settings = self.reproduction.conditions.settings
        divisions = settings.roundup_power2_divisions
        now = _settings(self.reproduction, what_if).roundup_power2_divisions
        if made.fits or not settings.roundup_is_on or now == divisions:
            return made
        fewest = min(d for d in divisions if d > 1)
        base = operations or self.reproduction.operations
        asked = Operations.of(base)
        is_failed = asked.kind == OpKind.FAILED
        size = asked.size.copy()
        power = [1 << max((s - 1).bit_length() - 1, 0) for s in size[is_failed].tolist()]
        size[is_failed] -= np.array(power, np.uint64) // np.uint64(fewest) - np.uint64(1)
        least = replay_what_if(self.reproduction, what_if, asked.with_size(size).native(base))
        return replace(made, note=ROUNDED, is_conclusive=False) if least.fits else made


def _fails(result: ReplayResult) -> bool:
    return not result.fits or (result.outlook is not None and result.outlook.fails)


def check_version(torch_version: str | None) -> str:
    """Return the version text, or "" for None.

    Raises:
        ConfigError: if it is not a version.
    """
    if torch_version is None:
        return ""
    parse_version(torch_version)
    return torch_version
