"""Several rehearsals of one program: on other GPUs, with other settings, at other batch sizes."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from fragdoctor.errors import ConfigError
from fragdoctor.model.rehearsal import FailedRehearsal, LargestBatch, Rehearsal, RehearsalSweep
from fragdoctor.rehearsal import runner
from fragdoctor.rehearsal.process import OnStep, RehearsalConditions, RehearsedGpu, Runs
from fragdoctor.rehearsal.programs import Program
from fragdoctor.rehearsal.runner import ProgramFailed

PLACEHOLDER: Final = "{batch}"
MAX_CASES: Final = 200
_RANGE: Final = re.compile(r"(\d{1,9})\.\.(\d{1,9})")


class Batches(Struct, frozen=True):
    """Batch sizes to rehearse.

    Attributes:
        sizes: all of them, ascending; for a search, its two ends.
        is_search: whether to look for the largest that fits between the ends.
    """

    sizes: Sequence[int]
    is_search: bool = False


def parse_batches(text: str) -> Batches:
    """Return what ``--batch`` says: ``8,16,32`` or ``1..512``.

    Raises:
        ConfigError: the text has another form.
    """
    ends = _RANGE.fullmatch(text.strip())
    if ends is not None and 0 < int(ends[1]) < int(ends[2]):
        return Batches((int(ends[1]), int(ends[2])), is_search=True)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < len(part) < 10 for part in parts):
        raise ConfigError(
            f"{text!r} is not a list of batch sizes.",
            hint="Write 8,16,32, or 1..512 to search for the largest that fits.",
        )
    sizes = sorted({int(part) for part in parts})
    if not sizes[0]:
        raise ConfigError("A batch of 0 needs no memory.", hint="Begin with 1.")
    return Batches(sizes)


def with_batch(program: Program, batch: int) -> Program:
    """Return a program with a batch size in its arguments.

    Raises:
        ConfigError: its arguments have no place for it.
    """
    if not any(PLACEHOLDER in word for word in program.args):
        raise ConfigError(
            f"Nothing says where the batch size goes: the arguments have no {PLACEHOLDER}.",
            hint=f"Write for example: --batch 8,16,32 -- --batch-size {PLACEHOLDER}",
        )
    args = [word.replace(PLACEHOLDER, str(batch)) for word in program.args]
    return replace(program, args=args)


OnCase = Callable[[str], OnStep]
"""Called with the name of each rehearsal before it begins; returns a callback for its steps."""


class Sweep(Struct, frozen=True):
    """Rehearses one program under several conditions.

    Attributes:
        program: what to run.
        base: the conditions that all have in common.
        gpus: GPUs to try.
        confs: settings to try; None means that of the environment.
        batches: batch sizes to try; None leaves the arguments as they are.
        keep: folder for the snapshots; None keeps none.
        on_case: called before each rehearsal.
        forks: whether they are forks of one process, if that is safe.
    """

    program: Program
    base: RehearsalConditions
    gpus: Sequence[RehearsedGpu]
    confs: Sequence[str | None]
    batches: Batches | None = None
    keep: Path | None = None
    on_case: OnCase = field(default=lambda _: lambda _number, _bytes: None)
    forks: bool = True

    @property
    def is_one(self) -> bool:
        """Whether it is a single rehearsal, which is diagnosed as a whole."""
        sizes = self.batches
        is_one_batch = sizes is None or (len(sizes.sizes) == 1 and not sizes.is_search)
        return len(self.gpus) == 1 and len(self.confs) == 1 and is_one_batch

    def run(self) -> RehearsalSweep:
        """Run all rehearsals.

        Raises:
            ConfigError: the program cannot be rehearsed at all, or options contradict each other.
        """
        self._check()
        found: list[Rehearsal] = []
        failed: list[FailedRehearsal] = []
        largest: list[LargestBatch] = []
        with Runs(forks=self.forks) as runs:
            for gpu in self.gpus:
                for conf in self.confs:
                    conditions = replace(self.base, gpu=gpu, conf=conf)
                    done, broken = self._batches(conditions, runs)
                    found += done
                    failed += broken
                    if self.batches is not None:
                        largest.append(_largest(conditions, done))
        is_search = self.batches is not None and self.batches.is_search
        why = runs.blocker
        notes = [f"Each rehearsal imports its libraries again: {why}."] if why else []
        name = self.program.title or self.program.target
        return RehearsalSweep(name, found, failed, largest, is_search, notes)

    def _check(self) -> None:
        if self.batches is None:
            sizes = 1
        else:
            with_batch(self.program, 1)
            sizes = len(self.batches.sizes)
            if self.batches.is_search and any(gpu.capacity_bytes is None for gpu in self.gpus):
                raise ConfigError(
                    "Without a limit every batch fits.", hint="Name a GPU: --gpu 24GiB"
                )
        n_cases = len(self.gpus) * len(self.confs) * sizes
        if n_cases > MAX_CASES:
            raise ConfigError(
                f"These are {n_cases} rehearsals, more than {MAX_CASES}.", hint="Ask for fewer."
            )

    def _batches(
        self, conditions: RehearsalConditions, runs: Runs
    ) -> tuple[list[Rehearsal], list[FailedRehearsal]]:
        """Return the rehearsals on one GPU under one setting, and those that failed."""
        found: list[Rehearsal] = []
        failed: list[FailedRehearsal] = []
        for size in self._sizes(found):
            try:
                found.append(self._rehearse(conditions, size, runs))
            except ProgramFailed as err:
                name = conditions.gpu.called
                failed.append(FailedRehearsal(name, conditions.conf or "", size, err.message))
                if self.batches is not None and self.batches.is_search:
                    break  # the search cannot tell which way to go
        return sorted(found, key=lambda r: r.batch or 0), failed

    def _sizes(self, found: Sequence[Rehearsal]) -> Iterator[int | None]:
        """Yield the batch sizes to try; those of a search follow from what was found."""
        if self.batches is None:
            yield None
        elif self.batches.is_search:
            low, high = self.batches.sizes
            yield from searched(low, high, found)
        else:
            yield from self.batches.sizes

    def _rehearse(
        self, conditions: RehearsalConditions, batch: int | None, runs: Runs
    ) -> Rehearsal:
        program = self.program if batch is None else with_batch(self.program, batch)
        name = case_name(conditions, batch)
        stem = re.sub(r"[^\w.+-]+", "-", name, flags=re.ASCII).strip("-") or "rehearsal"
        with tempfile.TemporaryDirectory(prefix="fragdoctor-") as scratch:
            place = (self.keep or Path(scratch)) / f"{stem}.pickle"
            found = runner.rehearse(program, conditions, place, self.on_case(name), runs)
        return replace(found, batch=batch, snapshot=found.snapshot if self.keep else "")


def case_name(conditions: RehearsalConditions, batch: int | None) -> str:
    """Return what distinguishes a rehearsal from the others: ``h100, batch 16``."""
    parts = [conditions.gpu.name, conditions.conf or "", "" if batch is None else f"batch {batch}"]
    return ", ".join(part for part in parts if part)


def searched(low: int, high: int, found: Sequence[Rehearsal]) -> Iterator[int]:
    """Yield batch sizes until the largest that fits is known to within one thirty-second.

    ``found`` grows in between. Two that fit make a line, which shows where memory would be full;
    since memory may not be linear, every second guess is the middle of the open range.
    """
    fits, fails, size = low - 1, high + 1, low
    while fails - fits > max(1, fits // 32):
        yield size
        fits, fails = (size, fails) if found[-1].fits else (fits, size)
        guess = _guess(found, fits, fails, has_failed=fails <= high)
        size = min(max(guess, fits + 1), fails - 1)


def _guess(found: Sequence[Rehearsal], fits: int, fails: int, *, has_failed: bool) -> int:
    middle = (fits + fails) // 2 if has_failed else 4 * fits
    fitting = sorted((r.batch or 0, r.peak_reserved_bytes) for r in found if r.fits)
    if len(fitting) < 2 or (has_failed and len(found) % 2 == 0):
        return middle
    (batch, peak_bytes), (larger, larger_bytes) = fitting[-2:]
    if larger_bytes <= peak_bytes:
        return middle
    spare_bytes = (found[-1].capacity_bytes or 0) - larger_bytes
    more = spare_bytes * (larger - batch) // (larger_bytes - peak_bytes)
    return min(larger + more, 8 * fits)


def _largest(conditions: RehearsalConditions, done: Sequence[Rehearsal]) -> LargestBatch:
    sizes = [(r.batch or 0, r.fits) for r in done]
    fails_at = min((size for size, fits in sizes if not fits), default=None)
    fitting = [s for s, fits in sizes if fits and (fails_at is None or s < fails_at)]
    name = conditions.gpu.called
    conf = done[0].conf if done else conditions.conf or ""
    return LargestBatch(name, conf, max(fitting, default=None), fails_at)
