"""Continues a cut-off run with another recording of the same program that goes further.

A run that failed in its first step does not say what the rest of the step needs. A rehearsal of
the program, or a healthy run on a larger device, does: its requests, replayed under the settings
and capacity of the failed run, are where that run was headed. The two are aligned by the user's
own lines; where sizes differ (another batch), they are scaled line by line.
"""

from __future__ import annotations

import os
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from fragdoctor._native import _ext
from fragdoctor.errors import SimulationError
from fragdoctor.future.alignment import ROUNDED_BYTES, Requests, align, shifts_of
from fragdoctor.future.outlook import Outlooks
from fragdoctor.future.steps import Steps
from fragdoctor.model.arrays import median
from fragdoctor.model.marks import PROGRAM
from fragdoctor.model.simulation import Outlook, OutlookBasis, OutlookState, ReplayResult
from fragdoctor.model.snapshot import I64
from fragdoctor.trace.operations import Operations, OpKind
from fragdoctor.trace.replay import Conditions, result_of
from fragdoctor.trace.reproduction import reproduce
from fragdoctor.trace.trace import Trace
from fragdoctor.units import format_count, format_share, format_size, plural

MIN_SHARED: Final = 0.8
"""Share of the requests with a line of their own that the other recording must also make."""

SAME_SHARE: Final = 0.99
"""Share of the aligned requests that have the same size in a run with the same batch; workspaces of
libraries differ between devices."""

Rows = npt.NDArray[np.uint32]

Site = tuple[str, int, str, str, str]
"""The user's own line (file without its folder, line, function) and the innermost function below it
(file, function): a line such as ``model(x)`` makes many kinds of requests."""


class OtherRun:
    """A recording with whole steps in which a cut-off run is located.

    Attributes:
        is_same: whether every request that both recordings have has the same size.
        note: how they were aligned, in a sentence.

    Nothing comes after a recording of a whole program.

    Args:
        trace: trace of the run that was cut off.
        operations: its requests.
        other: trace of the same program with at least one whole step.
        max_steps: how many whole steps to play after the cut-off one. If None, until they repeat.

    Raises:
        SimulationError: if they do not belong together, or the other one has no whole step.
    """

    def __init__(
        self,
        trace: Trace,
        operations: _ext.NativeOps,
        other: Trace,
        max_steps: int | None = None,
    ) -> None:
        reproduction = reproduce(other)
        self._n_before, n_theirs = _n_whole_steps(trace), _n_whole_steps(other)
        if not n_theirs:
            raise SimulationError(
                "The recording to continue with holds no whole step.",
                hint="Record a step to its end: fragdoctor rehearse train.py",
            )
        self._other = other
        self._is_whole = any(mark.name == PROGRAM for mark in other.snapshot.annotations)
        theirs = Operations.of(reproduction.operations)
        sites: dict[Site, int] = {}
        at_operation, found = _requests(other, theirs, sites)
        mine = Operations.of(operations)
        at, own = _requests(trace, mine, sites, None if trace.is_cut else n_theirs)
        first = 0
        if trace.is_cut:
            rows = theirs.row[at_operation]
            shifts = shifts_of(own, found)
            shift = int(shifts[self._nearest(trace, mine.row[at[-1:]], shifts + len(own), rows)])
            first, own = max(shift, 0), own.part(max(-shift, 0), len(own))
            last = rows[min(first + len(own), len(found)) - 1]
            self._n_before = max(int(Steps.of(other).at(last)), 0)
        at, mate = align(own, found.part(first, len(found)), is_cut=True)
        mate = mate + first
        n_own, n_shared = int(own.tells.sum()), int(own.tells[at].sum())
        if not n_own or n_shared < MIN_SHARED * n_own:
            raise SimulationError(
                "The two recordings do not belong together: "
                f"{format_share(n_shared, n_own) if n_own else 'none'} of the requests come from "
                "lines that make equally many in both.",
                hint="Continue with a recording of the same program: fragdoctor rehearse train.py",
            )
        ratio = _ratios(own, found, at, mate)
        self.is_same = bool((ratio == 1).all())
        native = reproduction.operations
        if not self.is_same:
            size = theirs.size.copy()
            scaled = np.maximum(np.rint(found.size * ratio), 1).astype(np.uint64)
            size[at_operation] = np.where(ratio == 1, size[at_operation], scaled)
            native = theirs.with_size(size).native(reproduction.operations)
        self._asked = max_steps
        self._n_ahead = n_theirs - self._n_before
        beyond = None if max_steps is None else max(max_steps + 1 - self._n_ahead, 0)
        beyond = 0 if self._is_whole else beyond  # what comes after the end is not asked for
        self._outlooks = Outlooks(other, native, beyond, is_edited=not self.is_same)
        self.note = (
            f"The other recording holds {plural(n_theirs, 'whole step')}, no more than this "
            "one, so this one's own steps say how the run goes on."
        )
        if self.goes_further:
            how = "with the same sizes" if self.is_same else "with sizes scaled line by line"
            self.note = (
                "The other recording says how the run goes on: "
                f"{format_count(len(at))} of {format_count(len(own))} requests were matched by "
                f"line and order, {how}."
            )

    def _nearest(self, trace: Trace, end: Rows, n_made: I64, rows: Rows) -> int:
        """Return after which of some numbers of requests live memory is nearest to a trace's end.

        Where steps are alike, that tells at which of them a recording without its start ends.
        """
        ends = rows[np.clip(n_made, 1, len(rows)) - 1]
        had, have = (
            one.totals.at(at)[:, 0].astype(np.int64)
            for one, at in ((trace, end), (self._other, ends))
        )
        return int(np.abs(have - had).argmin())

    @property
    def goes_further(self) -> bool:
        """Whether this recording has whole steps after those of the run that was cut off."""
        return self._n_ahead > 0

    def knows_better_than(self, own: Outlook) -> bool:
        """Return whether to trust this recording rather than the run's own steps.

        If sizes differ, the later steps of this recording are no more than a guess: whatever whole
        steps of the run itself decide then stands.
        """
        is_decided = own.state is not OutlookState.OPEN and self._n_before > 0
        return self.goes_further and (self.is_same or not is_decided)

    def whole(self, conditions: Conditions) -> ReplayResult | None:
        """Return the replay of the program from its start, or None if it does not hold.

        That is what a run does whose recording lost its start, if this one has the same requests
        and all of them.
        """
        if not (self._is_whole and self.is_same and self.goes_further):
            return None
        raw, ahead = self._replayed(conditions)
        result = result_of(raw, conditions)
        return replace(result, outlook=self._as_asked(raw, ahead)) if result.fits else None

    def step_needs_bytes(self) -> int | None:
        """Return the highest live memory of the cut-off step, or None if sizes were scaled."""
        rows, n = Steps.of(self._other).rows, self._n_before
        if not self.is_same or n >= len(rows):
            return None
        first = rows[n] if n else 0
        states = np.append(first, rows[n + 1 : n + 2])
        return int(self._other.totals.envelope("allocated_bytes", states)[1][0])

    def outlook(self, conditions: Conditions) -> Outlook:
        """Return how the run continues under some conditions, going by the other recording.

        That is likely, not certain, if sizes had to be scaled.
        """
        return self._as_asked(*self._replayed(conditions))

    def _replayed(self, conditions: Conditions) -> tuple[Any, Outlook]:
        """Return what the other recording does under some conditions, and what comes after it."""
        return self._outlooks.replay(conditions, remakes_start=self._other.lives.n_initial > 0)

    def _as_asked(self, raw: Any, ahead: Outlook) -> Outlook:
        """Return how the run continues over as many steps as were asked for."""
        found, asked = self._found(raw, ahead), self._asked
        if asked is not None and max(found.fails_after_steps or 0, found.steps or 0) > asked:
            found = replace(
                found, state=OutlookState.HOLDS, steps=asked, fails_after_steps=None, reason=""
            )
        if self.is_same or found.state is OutlookState.OPEN:
            return found
        return replace(
            found,
            state=OutlookState.OPEN,
            likely=found.state,
            reason="the other recording asks for other sizes",
        )

    def _found(self, raw: Any, found: Outlook) -> Outlook:
        """Return how the run continues, counted from the step in which it was cut off."""
        basis = OutlookBasis.COMPLETE if self.is_same else OutlookBasis.SCALED
        grows = found.likely is OutlookState.FAILS and bool(found.growth_bytes_per_step)
        peak = int(raw["peak_reserved_bytes"])
        if not self._is_whole:
            peak = max(peak, found.peak_reserved_bytes or 0)
        likely = found.likely if grows else None
        found = replace(found, basis=basis, peak_reserved_bytes=peak, likely=likely)
        if not raw["fits"]:
            step = int(Steps.of(self._other).at(np.array([raw["oom_event"] or 0]))[0])
            return replace(
                found,
                state=OutlookState.FAILS,
                likely=None,
                steps=None,
                fails_after_steps=max(step - self._n_before, 0),
                reason=f"a request of {format_size(raw['oom_bytes'])} fails",
            )
        if self._is_whole and self.goes_further:
            return replace(
                found,
                state=OutlookState.HOLDS,
                likely=None,
                steps=self._n_ahead - 1,
                fails_after_steps=None,
                growth_bytes_per_step=0,
                reason="",
            )
        if found.state is OutlookState.FAILS or grows:
            after = self._n_ahead + (found.fails_after_steps or 0)
            return replace(found, fails_after_steps=max(after, 0))
        if found.state is OutlookState.OPEN and self.goes_further:
            # Whatever is open comes after the whole steps that were asked for and were served.
            return replace(
                found,
                state=OutlookState.HOLDS,
                steps=self._n_ahead - 1,
                fails_after_steps=None,
                reason="",
            )
        return replace(found, steps=max(self._n_ahead - 1 + (found.steps or 0), 0))


def _n_whole_steps(trace: Trace) -> int:
    steps = Steps.of(trace)
    return max(len(steps) - int(not steps.is_last_complete), 0)


def _requests(
    trace: Trace, operations: Operations, sites: dict[Site, int], n_steps: int | None = None
) -> tuple[I64, Requests]:
    """Return the requests of a trace, up to the end of this many steps, and their operations."""
    kind = operations.kind
    at = np.flatnonzero((kind == OpKind.MALLOC) | (kind == OpKind.FAILED))
    rows = Steps.of(trace).rows
    if n_steps is not None and n_steps < len(rows):
        at = at[operations.row[at] < rows[n_steps]]
    stack = trace.events.stack[operations.row[at]]
    used, member = np.unique(stack, return_inverse=True)
    of_stack = np.array([_site_number(trace, int(one), sites) for one in used], np.int64)
    site = of_stack[member.reshape(-1)]
    size = operations.size[at].astype(np.int64)
    return at, Requests(site, -(-size // ROUNDED_BYTES) * ROUNDED_BYTES, site >= 0)


def _site_number(trace: Trace, stack: int, sites: dict[Site, int]) -> int:
    """Return the number of a stack's site, a new one for a new site; -1 without a user's line."""
    line = int(trace.stacks.lines_of(np.array([stack], np.int32))[0])
    if stack < 0 or line < 0:
        return -1
    own, inner = trace.snapshot.frame(line), trace.snapshot.stack(stack)[0]
    names = os.path.basename(own.filename), os.path.basename(inner.filename)  # noqa: PTH119 - as text
    return sites.setdefault(
        (names[0], own.line, own.function, names[1], inner.function), len(sites)
    )


def _ratios(own: Requests, found: Requests, at: I64, mate: I64) -> npt.NDArray[np.float64]:
    """Return how much larger each request of the other recording is in this run.

    Requests that this run also made give their own ratio. The others are scaled like their site,
    else like requests of their size (a gradient has the size of its tensor), else like the rest.
    """
    pair = own.size[at] / np.maximum(found.size[mate], 1)
    ratio = np.ones(len(found))
    if np.count_nonzero(pair == 1) >= SAME_SHARE * len(pair):
        return ratio
    by_size = _medians(found.size[mate], pair)
    by_site = _medians(found.site[mate], pair)
    changed = pair[pair != 1]
    rest = median(changed) if len(changed) else 1.0
    for i, (size, site) in enumerate(zip(found.size.tolist(), found.site.tolist(), strict=True)):
        ratio[i] = by_site.get(site, by_size.get(size, rest))
    ratio[mate] = pair
    return ratio


def _medians(keys: I64, values: npt.NDArray[np.float64]) -> dict[int, float]:
    order = np.argsort(keys, kind="stable")
    known, first = np.unique(keys[order], return_index=True)
    parts = np.split(values[order], first[1:])
    return {int(k): median(v) for k, v in zip(known, parts, strict=True)}
