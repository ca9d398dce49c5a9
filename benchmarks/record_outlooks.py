"""Record the truth for ``bench_outlook.py``: what programs do under other settings and capacities.

    python benchmarks/record_outlooks.py --oracle DIR --python PY -o RECORDINGS [NAME ...]

DIR holds a ``run.sh`` that runs a command with libraries that stand in for a GPU: the allocator is
PyTorch's own, memory is only accounted for, and nothing is computed. PY is a Python with PyTorch
for CUDA and, for some programs, transformers, peft, accelerate, lightning, timm, diffusers and trl.

Each program of ``outlook_programs`` runs once with all the memory that it wants, and then with
shares of what it reserved. If a run fails, its snapshot is kept, and the program runs again under
the settings and capacities that ``simulate`` is asked about. A program that has not changed since
its table was written is skipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outlook_table import (
    HELD_OUT,
    LOOKED,
    ProgramTruth,
    Recording,
    Try,
    read_truth,
    split_of,
    write_truth,
)

HERE = Path(__file__).parent
PROGRAMS = HERE / "outlook_programs"
MIB = 2**20
UNLIMITED_MIB = 80_000
SHARES = (0.45, 0.6, 0.75, 0.9, 0.97)
"""Capacities to try, as shares of what a program reserves without a limit. The largest share at
which the program fails is searched for as well."""
CLOSE = 0.015
"""Precision of that search; shares that differ by less count as the same."""
CAPACITIES = (1.1, 1.3, 1.6)
"""Larger capacities to try, as multiples of the one at which the program failed."""
CONFS = (
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "garbage_collection_threshold:0.8",
    "roundup_power2_divisions:4",
    "expandable_segments:True,garbage_collection_threshold:0.8",
    "max_split_size_mb:128,garbage_collection_threshold:0.8",
)
HEALTHY = (
    "resnet_sgd",
    "nlp_bucketed_lm",
    "ddpm_unet_ema",
    "kv_cache_cat",
    "hf_trainer_gpt2",
    "vae_eval_between",
)
"""Programs for which a run without a failure is also kept."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, with the facts from its first line and its settings.

    Attributes:
        other_mib: memory that another process uses on the device.
        fraction: share of the device to which the program limits itself.
    """

    path: Path
    kind: str
    leaks: bool
    conf: str
    other_mib: int
    fraction: float

    @property
    def source(self) -> str:
        """A digest of the program's text."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()[:16]


def job_of(program: Program, conf: str, total_mib: int) -> dict[str, Any]:
    """Return the job for ``run_program`` that runs a program on a device of this size."""
    return {
        "program": str(program.path),
        "conf": conf,
        "total_mib": total_mib,
        "other_mib": program.other_mib,
    }


class Server:
    """The server process that runs programs."""

    def __init__(self, oracle: Path, python: str) -> None:
        command = ["sh", str(oracle / "run.sh"), python, str(HERE / "outlook_server.py")]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True,
        )  # fmt: skip

    def run(
        self, program: Program, conf: str, capacity_mib: int, recording: Path | None = None
    ) -> dict[str, Any]:
        """Run a program once."""
        job = job_of(program, conf, capacity_mib + program.other_mib)
        job["recording"] = str(recording.absolute()) if recording else None
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        outcome = json.loads(self._process.stdout.readline())
        if outcome["state"] == "error":
            raise RuntimeError(f"{program.path.stem} under {conf!r}: {outcome['message']}")
        return dict(outcome)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def read_program(path: Path) -> Program:
    """Read a program's settings, and its first line: ``Kind: vision; leaks: no; ...``."""
    text = path.read_text("utf-8")
    head = re.match(
        r'"""Kind: (\w+); leaks: (yes|no)(?:; other process: (\d+) MiB)?\. \S', text
    )  # fmt: skip
    if not head:
        raise SystemExit(f"{path.name} does not say its kind in its first line")
    conf = re.search(r'^os\.environ\["PYTORCH_CUDA_ALLOC_CONF"\] = "([^"]*)"', text, re.MULTILINE)
    limit = re.search(
        r"^torch\.cuda\.set_per_process_memory_fraction\(([\d.]+)\)", text, re.MULTILINE
    )
    return Program(
        path=path,
        kind=head[1],
        leaks=head[2] == "yes",
        conf=conf[1] if conf else "",
        other_mib=int(head[3] or 0),
        fraction=float(limit[1]) if limit else 1.0,
    )


def even_mib(n_bytes: float) -> int:
    """Return a capacity in MiB, rounded to the device's 2 MiB pages."""
    return max(2, round(n_bytes / MIB / 2) * 2)


def as_try(program: Program, conf: str, capacity_mib: int, outcome: dict[str, Any]) -> Try:
    """Return the table's row for one run."""
    return Try(
        conf=conf,
        capacity_bytes=int(capacity_mib * MIB * program.fraction),
        total_bytes=(capacity_mib + program.other_mib) * MIB,
        passes=outcome["state"] == "passed",
        n_steps=outcome["n_steps"],
        peak_reserved_bytes=outcome["peak_reserved_bytes"],
    )


def questions(program: Program, capacity_mib: int) -> Iterator[tuple[str, int]]:
    """Yield the settings and capacities under which a failed program is tried again."""
    for conf in CONFS:
        if conf != program.conf:
            yield conf, capacity_mib
    for factor in CAPACITIES:
        yield program.conf, even_mib(factor * capacity_mib * MIB)


def shares(server: Server, program: Program, wanted_bytes: float) -> list[float]:
    """Return the shares at which a program fails: those of ``SHARES``, and the largest found."""

    def fails(share: float) -> bool:
        outcome = server.run(program, program.conf, even_mib(share * wanted_bytes))
        return bool(outcome["state"] != "passed")

    failing = [share for share in SHARES if fails(share)]
    low = failing[-1] if failing else 0.0
    high = min([share for share in SHARES if share > low], default=1.0)
    while high - low > CLOSE:
        middle = (low + high) / 2
        low, high = (middle, high) if fails(middle) else (low, middle)
    if low and (not failing or low - failing[-1] >= CLOSE):
        failing.append(low)
    if low and len(failing) < 3:  # the program reserves mostly cache, so few shares failed
        failing = sorted({*failing, 0.6 * low, 0.8 * low})
    return failing


def record(server: Server, program: Program, folder: Path) -> ProgramTruth:
    """Run a program under all settings and capacities."""
    name = program.path.stem
    for old in folder.glob(f"{name}@*.pickle"):
        old.unlink()
    recordings = []
    unlimited_file = folder / f"{name}@unlimited.pickle" if name in HEALTHY else None
    unlimited = server.run(program, program.conf, UNLIMITED_MIB, unlimited_file)
    if unlimited["state"] != "passed" or not unlimited["n_steps"]:
        raise RuntimeError(f"{name} does not run: {unlimited['state']} {unlimited['message']}")
    if unlimited_file:
        run = as_try(program, program.conf, UNLIMITED_MIB, unlimited)
        recordings.append(Recording(unlimited_file.name, 0.0, run))
    wanted_bytes = unlimited["peak_reserved_bytes"] / program.fraction
    for share in shares(server, program, wanted_bytes):
        capacity_mib = even_mib(share * wanted_bytes)
        file = folder / f"{name}@{100 * share:.0f}.pickle"
        outcome = server.run(program, program.conf, capacity_mib, file)
        run = as_try(program, program.conf, capacity_mib, outcome)
        if run.passes:
            raise RuntimeError(f"{name} fails at {capacity_mib} MiB only if nothing is recorded")
        tries = [
            as_try(program, conf, mib, server.run(program, conf, mib))
            for conf, mib in questions(program, capacity_mib)
        ]
        recordings.append(Recording(file.name, share, run, tries))
    return ProgramTruth(
        name=name,
        kind=program.kind,
        leaks=program.leaks,
        split=split_of(name),
        source=program.source,
        conf=program.conf,
        n_steps=unlimited["n_steps"],
        peak_reserved_bytes=unlimited["peak_reserved_bytes"],
        peak_allocated_bytes=unlimited["peak_allocated_bytes"],
        reserved_bytes=unlimited["reserved_bytes"],
        recordings=recordings,
    )


def is_recorded(program: Program, table: Path) -> bool:
    """Return whether a table exists for the program's current text."""
    return table.exists() and read_truth(table).source == program.source


def main(argv: Sequence[str]) -> int:
    """Record the missing tables; return 1 if a program did not run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="programs; else all")
    parser.add_argument("--oracle", type=Path, required=True, help="folder with run.sh")
    parser.add_argument("--python", required=True, help="a Python with PyTorch for CUDA")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the recordings")
    parser.add_argument("--set", choices=(LOOKED, HELD_OUT, "all"), default="all")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)

    n_failed = 0
    with Server(options.oracle, options.python) as server:
        for path in sorted(PROGRAMS.glob("*.py")):
            name, table = path.stem, options.output / f"{path.stem}.json"
            if options.names and name not in options.names:
                continue
            program = read_program(path)
            if options.set not in {"all", split_of(name)} or is_recorded(program, table):
                continue
            start = time.perf_counter()
            try:
                truth = record(server, program, options.output)
            except RuntimeError as e:
                print(f"{name}: {e}", file=sys.stderr)
                n_failed += 1
                continue
            write_truth(table, truth)
            tries = [one for recording in truth.recordings for one in recording.tries]
            n_passed = sum(one.passes for one in tries)
            print(
                f"{name}: {truth.n_steps} steps, {truth.peak_reserved_bytes // MIB} MiB reserved, "
                f"{len(truth.recordings)} recordings, {n_passed} of {len(tries)} tries pass, "
                f"{time.perf_counter() - start:.0f} s",
                flush=True,
            )
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
