"""The search for the cheapest change that makes a program fit.

Each try is a rehearsal of the unchanged program with treatments applied from outside, in forks of
one process. Single treatments come first. The cheapest set of modules is checkpointed, and as many
micro-batches are made as necessary: more of them never need more. Combinations are tried only if no
single treatment that leaves the results as they are is enough.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from fragdoctor._native import _ext
from fragdoctor.analysis.pairs import find_pairs
from fragdoctor.analysis.phase_memory import find_phases
from fragdoctor.errors import ConfigError
from fragdoctor.future.simulator import trace_of
from fragdoctor.future.training_edits import requests_divided, rounded_to_blocks
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.finding import Location
from fragdoctor.model.prescription import Numerics, Place, Prescription, Treatment, Tried
from fragdoctor.model.rehearsal import Rehearsal
from fragdoctor.rehearsal import runner
from fragdoctor.rehearsal.prescription import catalogue, patch
from fragdoctor.rehearsal.prescription.batch_numbers import BatchNumber, batch_numbers, of_rows
from fragdoctor.rehearsal.prescription.batch_rows import mixing
from fragdoctor.rehearsal.prescription.checkpoints import Checkpoints, Plan
from fragdoctor.rehearsal.prescription.held import held_lines
from fragdoctor.rehearsal.prescription.need import Need
from fragdoctor.rehearsal.process import RehearsalConditions, Runs
from fragdoctor.rehearsal.programs import Program
from fragdoctor.rehearsal.sweep import with_batch
from fragdoctor.units import format_size

MAX_PARTS: Final = 64
MAX_GPUS: Final = 64
WORTH: Final = 0.98
"""Share of the peak: if parts half as large still need this much, smaller ones are not tried."""
MAX_SETS: Final = 8
"""Sets of checkpointed modules that are rehearsed with the same other treatments."""
SPARE: Final = 0.01
"""Share of the capacity that a change should leave: what a program needs on a GPU is known to 1%.
A run that just fits also flushes its cache again and again."""
FINE: Final = 0.005
"""Share of the capacity that sets of modules may leave unused beyond that."""
BESIDE: Final = ("chunked-loss", "step-in-backward")
"""Tried together with fewer checkpointed blocks, as they leave the results alone and cost less."""
LATE: Final = ("fused", "step-in-backward")
"""Tried after checkpointing, although they cost nothing: of 67 programs they let none fit."""
KEEPING_LESS: Final = (
    "step-in-backward", "state-on-host", "bf16-parameters", "adamw-8bit", "adafactor",
)  # fmt: skip
"""Change how much parameters, gradients and the optimizer's state take while it runs."""
ALONE: Final = ("accumulate", "checkpoint", "step-in-backward")
"""Not tried with everything else that lowers the need, if nothing is enough."""
ON_TOP: Final = ("autocast", "adamw-8bit")
"""Tried on top of checkpointing if nothing that leaves the results as they are is enough."""
EQUAL: Final = 3
"""Equal steps after which a try is stopped if those of the unchanged program repeat from there."""
LEAST_S: Final = 5.0
"""How long the changed program may take if no time is left for it."""

OnTry = Callable[[str], None]
"""Called with what is rehearsed next."""


class _TimeIsOverError(Exception):
    """There is no time for another rehearsal."""


class _Seen(Struct, frozen=True):
    """A rehearsal, the replays of it, the least memory that PyTorch must have, and its time."""

    found: Rehearsal
    need: Need
    needs_bytes: int
    seconds: float = 0.0


class CureSearch:
    """Rehearses a program with treatments until the cheapest one that fits is known.

    Args:
        program: what to run; its arguments may hold ``{batch}``.
        conditions: how to rehearse it, with the capacity that it should fit.
        batch: the batch size that stands for ``{batch}``.
        seconds: how long to search, the unchanged program included; that one is not cut short
            unless the conditions limit its time, but any other rehearsal is.
        on_try: called before each rehearsal.
    """

    def __init__(
        self,
        program: Program,
        conditions: RehearsalConditions,
        batch: int | None,
        seconds: float,
        on_try: OnTry = lambda _: None,
    ) -> None:
        if conditions.gpu.capacity_bytes is None:
            raise ConfigError(
                "Without a limit everything fits.", hint="Name a GPU: --fits-on 24GiB"
            )
        self._program = program
        self._capacity_bytes = conditions.gpu.capacity_bytes
        # Without a limit a rehearsal shows the need; whether that fits is replayed.
        unlimited = replace(conditions.gpu, capacity_bytes=None)
        self._conditions = replace(conditions, gpu=unlimited)
        self._batch = batch
        self._seconds = seconds
        self._on_try = on_try
        self._tried: list[Tried] = []
        self._can_checkpoint = False
        self._bases: dict[tuple[str, ...], Checkpoints] = {}
        self._learned: set[tuple[str, ...]] = set()
        self._observed: tuple[tuple[str, ...], _Seen | ConfigError] = (), ConfigError("")
        self._held: dict[Location, bool] = {}
        self._expandable: list[Treatment] = []
        self._expanded: list[Tried] = []  # what would fit but for gaps between its blocks
        self._notes: list[str] = []
        self._number: BatchNumber | None = None
        self._is_whole = False  # whether nothing follows the unchanged program's rehearsal
        self._reserve_s = 0.0  # for rehearsing the changed program, once a change fits

    def run(self, keep: Path | None = None) -> Prescription:
        """Return what was found.

        Args:
            keep: where to leave the snapshot of the unchanged program; None = do not keep it.

        Raises:
            ConfigError: the program cannot be rehearsed.
        """
        self._ends_at = time.monotonic() + self._seconds
        with Runs(forks=True) as self._runs, tempfile.TemporaryDirectory() as scratch:
            self._snapshot = Path(scratch) / "snapshot.pickle"
            self._on_try("the unchanged program")
            observed = seen = self._rehearse(replace(self._conditions, observes=True))
            self._compiles = bool(seen.found.traits["compiles"])
            if self._compiles:
                seen = self._rehearse(self._conditions)
            self._as_it_is, found = seen, seen.found
            self._keep_own_limit(observed.found.traits["allowed_bytes"])
            conf = self._conditions.conf or found.conf
            traits = {**observed.found.traits, "batch": self._batch, "conf": conf}
            if traits["place"] and traits["n_optimizers"] == 1:
                traits["place"]["optimizer"] = patch.optimizer_name(traits["place"])
            if keep is not None:
                shutil.copyfile(self._snapshot, keep)
            # A change may take longer: what ended by itself without it is not stopped with it,
            # unless all that it would show is known.
            known_from = traits["known_from"]
            self._is_whole = known_from is None and not (found.stopped or found.is_partial)
            self._conditions = replace(
                self._conditions,
                least_steps=0 if found.stopped else found.steps + 1,
                known_steps=None if known_from is None else known_from + EQUAL - 1,
                fitting_bytes=self._capacity_bytes,
            )
            is_cut_short = False
            if seen.needs_bytes > self._capacity_bytes:
                self._held = held_lines(read_snapshot(self._snapshot))
                self._can_checkpoint = not traits["checkpoints"]
                if self._can_checkpoint:
                    self._bases[()] = self._checkpoints(observed)
                try:
                    self._search(traits)
                except _TimeIsOverError:
                    is_cut_short = True
            if not self._is_cured():
                self._tried += (one for one in self._expanded if one.fits)
            tried = sorted(self._tried, key=self._order)
            cure = tried[0] if tried and tried[0].fits else None
            diff = self._diff(traits, cure) if cure else []
        place = traits["place"]
        return Prescription(
            target=self._program.target,
            gpu=self._conditions.gpu.name,
            capacity_bytes=self._capacity_bytes,
            needs_bytes=seen.needs_bytes,
            is_partial=found.is_partial,
            tried=tried,
            left_out=list(catalogue.left_out({**traits, "number": self._number})),
            is_cut_short=is_cut_short,
            notes=[*found.notes, *self._notes],
            diff=diff,
            optimizer_place=Location(place["filename"], place["line"], "") if place else None,
            trains=bool(traits["trains"]),
        )

    def _keep_own_limit(self, allowed_bytes: int | None) -> None:
        """Let the changed program have no more than the program itself lets PyTorch have."""
        if allowed_bytes is not None and allowed_bytes <= self._capacity_bytes:
            self._capacity_bytes = allowed_bytes
            self._notes.append(
                f"The program's memory fraction lets PyTorch have {format_size(allowed_bytes)}. "
                "Each change was tried under this limit."
            )

    def _diff(self, traits: catalogue.Traits, cure: Tried) -> list[str]:
        """Return a change as a diff of the program, which was rehearsed to need the same with it.

        It is empty if it is not certain where the change goes, or if the need was not the same.
        """
        program, place = self._program, traits["place"]
        path = Path(program.target)
        if program.kind != "script" or not place or place["filename"] != str(path.absolute()):
            return []
        before = path.read_text(encoding="utf-8")
        after = patch.patched(before, traits, cure.treatments)
        if after is None:
            return []
        copy = self._snapshot.with_name(path.name)
        copy.write_text(after, encoding="utf-8")
        self._on_try("the changed program")
        paths = [str(path.resolve().parent), os.environ.get("PYTHONPATH", "")]
        variables = {
            **self._conditions.variables,
            "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        }
        self._program = replace(program, target=str(copy))
        left_s = max(self._ends_at - time.monotonic(), LEAST_S)
        try:
            conditions = self._conditions_of(cure.treatments)
            seen = self._rehearse(
                replace(conditions, treatments=[], variables=variables, time_limit_s=left_s),
                cure.treatments,
            )
        except ConfigError:
            return []
        finally:
            self._program = program
        same = (cure.needs_bytes, cure.peak_allocated_bytes)
        if (seen.needs_bytes, seen.found.peak_allocated_bytes) != same:
            return []
        name = path.name if path.is_absolute() else path.as_posix()
        return patch.diff(name, before, after)

    def _search(self, traits: catalogue.Traits) -> None:
        simple = [*catalogue.simple(traits)]
        self._expandable = [one for one in simple if not one.specs]
        self._correct_shapes()
        if traits["kept_bytes"] > self._capacity_bytes:
            self._keep_less(traits, simple)
        else:
            self._lower_peak(traits, simple)

    def _correct_shapes(self) -> None:
        """Replay N numbers where N x N are asked for first of what does not fit, and N are live."""
        need = self._as_it_is.need
        trace, lives = need.trace, need.trace.lives
        too_much = np.flatnonzero(trace.totals.allocated_bytes > self._capacity_bytes)[:1]
        asked = np.flatnonzero(np.isin(lives.start, too_much - 1))
        if not len(asked):
            return
        n_bytes = int(rounded_to_blocks(lives.requested_bytes[asked])[0])
        pairs = find_pairs(lives, int(too_much[0]) - 1, n_bytes, find_phases(trace).category)
        if pairs is not None:
            frame = int(trace.stacks.lines_of(lives.stack[asked])[0])
            treatment = catalogue.of_fewer_pairs(pairs, trace.snapshot.location(frame))
            requests = need.changed(requests_divided(pairs.n_bytes, pairs.n))
            self._tried.append(self._replayed(need, treatment, requests=requests))

    def _lower_peak(self, traits: catalogue.Traits, simple: Sequence[Treatment]) -> None:
        first = [one for one in simple if _cost(one) == 0 and one.code not in LATE]
        for treatment in first:
            self._try(treatment)
        if not traits["trains"]:
            self._hold()  # smaller batches leave what is gathered as it is
        traits = self._with_batch(traits)
        self._split_batch(catalogue.batch_size(traits), partial(catalogue.accumulated, traits))
        # With a smaller number, a loop of as many rounds would gather less.
        if traits["evaluated"] or not any(self._held.values()):
            evaluated = partial(catalogue.evaluated_in, traits)
            self._split_batch(catalogue.evaluated_size(traits), evaluated)
        self._checkpoint()
        for treatment in (one for one in simple if one not in first):
            tried = self._try(treatment, is_base=treatment.code in {*BESIDE, *ON_TOP})
            fitting = (one for one in self._tried if one.fits and one.n_gpus == 1)
            least = min((sum(map(_cost, one.treatments)) for one in fitting), default=inf)
            helps = self._saved_bytes(tried) > 0
            if treatment.code in BESIDE and helps and _cost(treatment) < least:
                self._checkpoint(treatment)
        if self._is_cured(*self._expanded) or self._hold():
            return
        is_cured = self._combine(traits, simple)
        if not (is_cured or catalogue.why_not_sharded(traits)):
            self._fewest_gpus(traits)

    def _hold(self) -> bool:
        """Try to keep on the host what lines create; return whether that of one is enough."""
        return any(self._try(catalogue.held_on_host(line)).fits for line in self._held)

    def _keep_less(self, traits: catalogue.Traits, simple: Sequence[Treatment]) -> None:
        """Try what helps where parameters, gradients and the optimizer's state do not fit."""
        self._notes.append(
            "Parameters, gradients and the optimizer's state alone take "
            f"{format_size(traits['kept_bytes'])}. Smaller batches and checkpoints by themselves "
            "cannot be enough."
        )
        keeping_less = [one for one in simple if one.code in KEEPING_LESS]
        for treatment in keeping_less:
            self._try(treatment, is_base=True)
        if self._is_cured(*self._expanded):
            return
        traits = self._with_batch(traits)
        if not catalogue.why_not_sharded(traits):
            self._fewest_gpus(traits)
        for treatment in keeping_less:
            if self._checkpoint(treatment):
                return

    def _helping(self) -> list[Treatment]:
        """Return what leaves results alone and may lower the need on top of others, cheapest first.

        It lowers the need by itself, and is the best of its kind; or it lowers that of updates,
        which may be the most once the rest is smaller.
        """
        best: dict[str, Tried] = {}
        for tried in self._tried:
            code = tried.treatments[0].code
            is_one = len(tried.treatments) == 1 and tried.numerics is Numerics.EXACT
            if not is_one or tried.error or not tried.treatments[0].specs or code in ALONE:
                continue
            least = self._saved_bytes(best[code]) if code in best else 0
            if self._saved_bytes(tried) > least or code in LATE:
                best[code] = tried
        return sorted((one.treatments[0] for one in best.values()), key=_cost)

    def _saved_bytes(self, tried: Tried) -> int:
        as_it_is_bytes = self._as_it_is.needs_bytes
        return as_it_is_bytes - (tried.needs_bytes or as_it_is_bytes)

    def _with_batch(self, traits: catalogue.Traits) -> catalogue.Traits:
        """Find the number that sets the batch size, and whether its parts add up to the whole."""
        trains, size = traits["trains"], catalogue.batch_size(traits)
        if size or (not trains and traits["evaluated"]):
            traits = self._with_mixing(traits, size)
        else:
            traits = self._with_number(traits)
        if reason := traits.get("mixing"):
            self._notes.append(
                f"Smaller batches may not add up to the gradients of the whole batch: {reason}."
            )
        return traits

    def _with_number(self, traits: catalogue.Traits) -> catalogue.Traits:
        """Find the number that sets the batch size: at best one whose parts add up to the whole.

        What is along the second dimension is a batch only then; it may also be a sequence.
        """
        best = traits
        # With --allow-writes, settings would be changed where they are.
        files = [] if self._conditions.allows_writes else traits["files"]
        for number in batch_numbers(self._program, traits["rows"], files):
            n = next(_parts(number.value), 0)
            split = catalogue.accumulated if traits["trains"] else catalogue.evaluated_in
            seen = self._observe(split({**traits, "number": number}, n)) if n else None
            found = seen and of_rows(number, n, traits, seen.found.traits)
            if not found:
                continue
            numbered = {**traits, "number": found}
            tried = self._with_mixing(numbered, catalogue.batch_size(numbered))
            is_first = found.axis == 0
            is_sure = tried.get("mixing") == "" if traits["trains"] else is_first
            if is_sure or (best is traits and is_first):
                best = tried
            if is_sure:
                break
        self._number = best.get("number")
        return best

    def _with_mixing(self, traits: catalogue.Traits, size: int) -> catalogue.Traits:
        """Rehearse a part of the batch, to see whether its rows are computed independently."""
        n = next(_parts(size), 0)
        seen = self._observe(catalogue.accumulated(traits, n)) if n else None
        if seen is None:
            return traits
        found, n_rounds = seen.found, self._as_it_is.found.steps
        reason, is_sum = mixing(traits["losses"], found.traits["losses"], n)
        if found.stopped or found.is_partial or found.steps * n > n_rounds:
            n_rounds = 0
        return {**traits, "mixing": reason, "is_sum": is_sum, "n_rounds": n_rounds}

    def _split_batch(self, size: int, make: Callable[[int], Treatment]) -> None:
        self._split(_parts(size), make, self._as_it_is.found.peak_allocated_bytes)

    def _split(
        self, counts: Iterable[int], make: Callable[[int], Treatment], peak_bytes: float = inf
    ) -> int:
        """Split a program into more and more parts until it fits, or until that no longer helps.

        Args:
            counts: how many parts, ascending.
            make: returns the treatment that makes so many.
            peak_bytes: the peak that the first of them has to lower.

        Returns:
            the number of parts that fit, or 0.
        """
        for n in counts:
            treatment = make(n)
            tried = self._try(treatment, is_base=treatment.n_gpus == 1)
            if tried.fits:
                return n
            if not _is_below(tried, peak_bytes):
                break
            peak_bytes = tried.peak_allocated_bytes or 0
        return 0

    def _fewest_gpus(self, traits: catalogue.Traits) -> None:
        """Spread the program over as few GPUs as necessary; a batch is split evenly.

        A search that ends early has found more than that, but the fewest that it knows to fit.
        """
        size = catalogue.batch_size(traits)
        least_bytes = traits["kept_bytes"]  # each GPU has an equal part
        counts = [
            n
            for n in range(2, MAX_GPUS + 1)
            if size % n == 0 and n * self._capacity_bytes >= least_bytes
        ]
        make = partial(catalogue.sharded, traits)
        enough = self._split([*_doubling(counts[:-1]), *counts[-1:]], make)
        fewer = [n for n in counts if n < enough]
        at = bisect_left(fewer, 1, key=lambda n: self._try(make(n)).fits)
        if enough:  # if there is room for it, a third less is sent
            self._try(make([*fewer, enough][at], stays_whole=True))

    def _combine(self, traits: catalogue.Traits, simple: Sequence[Treatment]) -> bool:
        """Try what leaves the results alone together, then add what does not.

        Returns:
            whether a change fits that leaves them alone.
        """
        base: list[Treatment] = []
        for n in _parts(catalogue.batch_size(traits)):
            split = catalogue.accumulated(traits, n)
            tried = self._try(split, is_base=True)
            if not _is_below(tried, self._as_it_is.found.peak_allocated_bytes):
                break  # no more do more parts
            base = [split]
            if self._checkpoint(*base):
                return self._is_cured()
        exact = [one for one in base if one.numerics is Numerics.EXACT]
        if added := self._add_up(exact):
            counts = _parts(catalogue.batch_size(traits) if exact else 0)
            fewer = [n for n in counts if n < exact[0].batch_divisor]
            make = partial(catalogue.accumulated, traits)
            # Called for its tries: the largest batches that surely fit cost the least time.
            bisect_left(fewer, 1, key=lambda n: self._is_safe(self._try(make(n), *added)))
            return True
        more = [one for one in simple if one.code in ON_TOP]
        if self._can_checkpoint and more:
            found = [self._checkpoint(*base, one) for one in more]
            if not any(found):
                self._checkpoint(*base, *more)
        return False

    def _add_up(self, base: Sequence[Treatment]) -> list[Treatment]:
        """Add one treatment after the other that lowers the need; return those that are enough."""
        added: list[Treatment] = []
        peak_bytes = base and self._try(*base).peak_allocated_bytes
        least_bytes = peak_bytes or self._as_it_is.found.peak_allocated_bytes
        for treatment in self._helping():
            tried = self._try(*base, *added, treatment, is_base=True)
            if tried.fits or _is_below(tried, least_bytes):
                added.append(treatment)
                least_bytes = tried.peak_allocated_bytes or 0
            if tried.fits:
                return added
        return added if added and self._checkpoint(*base, *added) else []

    def _checkpoint(self, *others: Treatment) -> bool:
        """Checkpoint the cheapest set of modules that fits, together with other treatments.

        The need of a set is replayed, and then rehearsed: if the two differ, the limit for the
        replay is moved by the difference.

        Returns:
            whether it fits with any set, or with none at all.
        """
        if not self._can_checkpoint:
            return False
        key = _key(others)
        if others and key not in self._bases and self._try(*others, is_base=True).fits:
            return True
        if key not in self._bases and self._compiles and (seen := self._observe(*others)):
            self._bases[key] = self._checkpoints(seen)
        base = self._bases.get(key)
        if base is None or not base.can_save:
            return False
        outermost = (catalogue.checkpointed(base.traits, base.outermost), *others)
        if key not in self._learned:
            self._learned.add(key)
            if observed := self._observe(*outermost):
                base.learn_ends(observed.need.trace, observed.found.traits)
        tried = {} if self._compiles else {base.outermost: self._try(*outermost)}
        limit, fitting = self._cheapest_tried(base, tried, others)
        is_cured = any(one.fits for one in tried.values())
        if is_cured and not (fitting and fitting.is_whole):
            self._try_whole(base, limit, others)
        return is_cured

    def _try_whole(self, base: Checkpoints, limit: int, others: Sequence[Treatment]) -> None:
        """Try a set that is a loop of two lines to write; keeping some results takes twenty."""
        for _ in range(2):  # where the replay is wrong, once more with what the rehearsal said
            plan = base.whole(limit)
            if plan is None:
                return
            tried = self._try(catalogue.checkpointed(base.traits, plan), *others)
            if self._is_safe(tried) or tried.needs_bytes is None:
                return
            limit = base.needs_bytes(plan) + self._safe_bytes - tried.needs_bytes

    def _cheapest_tried(
        self, base: Checkpoints, seen: dict[Plan, Tried], others: Sequence[Treatment]
    ) -> tuple[int, Plan | None]:
        """Rehearse sets until the cheapest is known; return it, and the limit for the replay."""
        limit = self._safe_bytes
        fitting: Plan | None = None
        while len(seen) <= MAX_SETS:
            plan = base.cheapest(limit)
            if plan is None or (plan in seen and not self._is_safe(seen[plan])):
                # A replay that is slightly wrong may find none.
                plan = None if fitting else base.lowest()
            if plan is None or plan in seen or (fitting and plan.cost >= fitting.cost):
                break
            tried = seen[plan] = self._try(catalogue.checkpointed(base.traits, plan), *others)
            if tried.needs_bytes is None or (fitting and not self._is_safe(tried)):
                break
            fitting = plan if self._is_safe(tried) else None
            spare = self._safe_bytes - tried.needs_bytes
            if 0 <= spare <= FINE * self._capacity_bytes:
                break
            limit = base.needs_bytes(plan) + spare
        return limit, fitting

    def _observe(self, *treatments: Treatment) -> _Seen | None:
        """Rehearse the program with treatments and observe it; None if that failed."""
        seen = self._seen(treatments, observes=True)
        return None if isinstance(seen, ConfigError) else seen

    def _seen(self, treatments: Sequence[Treatment], *, observes: bool) -> _Seen | ConfigError:
        """Rehearse the program with treatments, in the time that is left.

        What was observed last is not rehearsed again, unless the program is compiled: then it does
        not tell the need.

        Raises:
            _TimeIsOverError: there is no time for it.
        """
        key, began_at = _key(treatments), time.monotonic()
        if self._observed[0] == key and (observes or not self._compiles):
            return self._observed[1]
        self._check_time()
        self._on_try(_titled(treatments))
        conditions = self._conditions_of(treatments)
        limit_s = min(self._seconds_left(), conditions.time_limit_s or inf)
        conditions = replace(conditions, observes=observes, time_limit_s=limit_s)
        seen: _Seen | ConfigError
        try:
            seen = self._rehearse(conditions, treatments)
            seen = replace(seen, seconds=time.monotonic() - began_at)
        except ConfigError as err:
            self._check_time()
            seen = err
        if observes:
            self._observed = key, seen
        return seen

    def _try(self, *treatments: Treatment, is_base: bool = False) -> Tried:
        """Rehearse the program with treatments, and observe it if others are to be added.

        Raises:
            _TimeIsOverError: there is no time for it.
        """
        known = next((one for one in self._tried if one.treatments == treatments), None)
        if known is not None:
            return known
        if not _key(treatments):
            self._on_try(_titled(treatments))
            self._tried.append(self._replayed(self._as_it_is.need, *treatments))
            return self._tried[-1]
        is_base &= self._can_checkpoint and not self._compiles
        seen = self._seen(treatments, observes=is_base)
        if isinstance(seen, ConfigError):
            tried = Tried(treatments, False, None, None, seen.message)
        else:
            found, needs_bytes = seen.found, seen.needs_bytes
            # A run that ended before the unchanged program did may not have reached its peak, which
            # may be in the second update: the first one creates the optimizer state.
            reason, as_it_is = found.partial_reason, self._as_it_is.found
            if not reason and found.steps < min(as_it_is.steps, catalogue.LONG_ENOUGH):
                reason = "its rounds end before the second update; let it run more of them"
            is_known = bool(as_it_is.stopped) or self._conditions.known_steps is not None
            is_over = found.peak_allocated_bytes > self._capacity_bytes  # whatever would follow
            as_far = bool(found.stopped and is_known) or reason in {"", as_it_is.partial_reason}
            is_lower_bound = bool(found.stopped) and is_over and not as_far
            as_far |= is_lower_bound
            if found.stopped or not as_far:
                self._check_time()  # it may have been stopped for lack of time
            fits = needs_bytes <= self._capacity_bytes and as_far
            error = "" if as_far else f"Not rehearsed as far: {reason}."
            peak_bytes = found.peak_allocated_bytes
            tried = Tried(treatments, fits, needs_bytes, peak_bytes, error, is_lower_bound)
            if is_base and not fits and as_far:
                self._bases[_key(treatments)] = self._checkpoints(seen)
            if self._expandable and not fits and as_far and peak_bytes <= self._capacity_bytes:
                self._expanded += [self._replayed(seen.need, *treatments, *self._expandable)]
            is_written = all(one.place is not Place.OPEN for one in treatments)
            if fits and is_written and not self._reserve_s:
                self._reserve_s = seen.seconds
        self._tried.append(tried)
        return tried

    def _replayed(
        self,
        need: Need,
        *treatments: Treatment,
        requests: Sequence[_ext.NativeOps] | None = None,
    ) -> Tried:
        """Replay other requests, or the same with settings of the allocator, the last treatment."""
        conf = treatments[-1].conf or None
        needs_bytes, peak_bytes = need.bytes(requests, conf), need.peak_bytes(requests, conf)
        return Tried(treatments, needs_bytes <= self._capacity_bytes, needs_bytes, peak_bytes)

    def _is_cured(self, *more: Tried) -> bool:
        """Return whether a change fits that leaves the results alone."""
        return any(one.fits and one.numerics is Numerics.EXACT for one in [*self._tried, *more])

    @property
    def _safe_bytes(self) -> int:
        return int((1 - SPARE) * self._capacity_bytes)

    def _is_safe(self, tried: Tried) -> bool:
        """Return whether a change fits with room for what is not known to the byte."""
        return tried.fits and (tried.needs_bytes or 0) <= self._safe_bytes

    def _order(self, one: Tried) -> tuple[float, ...]:
        """Return a sort key: of changes of equal effect on results, those that surely fit first."""
        return (not one.fits, *one.rank[:3], not self._is_safe(one), *one.rank[3:])

    def _checkpoints(self, seen: _Seen) -> Checkpoints:
        return Checkpoints(seen.need, seen.found.traits, self._check_time)

    def _seconds_left(self) -> float:
        return self._ends_at - self._reserve_s - time.monotonic()

    def _check_time(self) -> None:
        """Raise _TimeIsOverError if there is no time left."""
        if self._seconds_left() < 0:
            raise _TimeIsOverError

    def _conditions_of(self, treatments: Sequence[Treatment]) -> RehearsalConditions:
        """Return the conditions for rehearsing a program with treatments."""
        specs = [spec for one in treatments for spec in one.specs]
        conf = next((one.conf for one in treatments if one.conf), self._conditions.conf)
        conditions = replace(self._conditions, treatments=specs, conf=conf)
        n_gpus = max(one.n_gpus for one in treatments)
        if n_gpus > 1:
            conditions = replace(conditions, rank=0, world_size=n_gpus, n_devices=n_gpus)
        return conditions

    def _rehearse(
        self, conditions: RehearsalConditions, treatments: Sequence[Treatment] = ()
    ) -> _Seen:
        """Rehearse once, with the batch size that treatments leave.

        If the program is compiled, observing its modules splits what is compiled together, which
        changes its requests.
        """
        program = self._program
        if self._batch is not None:
            divisor = max((one.batch_divisor for one in treatments), default=1)
            program = with_batch(program, max(self._batch // divisor, 1))
        found = runner.rehearse(program, conditions, self._snapshot, None, self._runs)
        goes_on = (bool(found.stopped) or found.is_partial) and not self._is_whole
        need = Need(trace_of(read_snapshot(self._snapshot)), goes_on=goes_on)
        return _Seen(found, need, need.bytes() or found.peak_reserved_bytes)


def _is_below(tried: Tried, peak_bytes: float) -> bool:
    """Return whether a change was rehearsed and lowers a peak by as much as is worth a try."""
    return not tried.error and (tried.peak_allocated_bytes or 0) < WORTH * peak_bytes


def _titled(treatments: Sequence[Treatment]) -> str:
    return " + ".join(one.title for one in treatments)


def _cost(one: Treatment) -> float:
    """Return the extra operations of a treatment that leaves the results alone, else infinity."""
    is_known = one.numerics is Numerics.EXACT and one.extra_compute is not None
    return one.extra_compute or 0.0 if is_known else inf


def _key(treatments: Sequence[Treatment]) -> tuple[str, ...]:
    return tuple(spec for one in treatments for spec in one.specs)


def _parts(size: int) -> Iterator[int]:
    """Yield numbers of equal parts that a batch can be split into, each at least twice the last."""
    return _doubling(n for n in range(2, min(size, MAX_PARTS) + 1) if size % n == 0)


def _doubling(counts: Iterable[int]) -> Iterator[int]:
    """Yield those of ascending numbers that are at least twice the last one."""
    least = 0
    for n in counts:
        if n >= least:
            yield n
            least = 2 * n
