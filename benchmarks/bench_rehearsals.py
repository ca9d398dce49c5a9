"""Compare rehearsals with PyTorch's own allocator: how many run, and how close they are.

    python benchmarks/bench_rehearsals.py --python PY [--oracle DIR] [--gpu] [NAME ...]

Each program of ``outlook_programs`` is rehearsed with all the memory that it wants, and its peaks
are compared with those in ``tests/truth``, from runs on the allocator of PyTorch 2.12.1. With
``--oracle``, the same folder as for ``record_outlooks.py``, the peaks are measured anew on that
allocator, with the libraries of the rehearsal, and 5% more and 5% less than the least capacity that
suffices in the rehearsal are tried on it. PY is a Python with that PyTorch and, for some of the
programs, transformers, accelerate, peft, trl, lightning and diffusers. The allocator's simulated
GPU has a cuDNN that needs no workspaces, so rehearsals leave out theirs.

With ``--snapshots DIR``, the snapshot of each rehearsal is written to ``DIR/PROGRAM.pickle``, for
``tools/truth_table.py --rehearsals DIR``.

With ``--gpu``, the peaks are compared with those in ``measured/programs_h200.csv``, from runs of
``gpu_program.py`` on a real H200 with PyTorch 2.11.0.

Held-out programs are only counted in the tables, never named.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outlook_table import HELD_OUT, LOOKED, ProgramTruth, read_truth
from record_outlooks import PROGRAMS, UNLIMITED_MIB, Server, even_mib, read_program

TRUTH = Path(__file__).resolve().parents[1] / "tests" / "truth" / "programs"
MEASURED = Path(__file__).resolve().parent / "measured" / "programs_h200.csv"
EDGE = 0.05
WITHOUT_WORKSPACES = f"""
from pathlib import Path
from fragdoctor.rehearsal import process
process.START = Path({str(Path(__file__).resolve().parent / "start_without_workspaces.py")!r})
from fragdoctor.cli.app import main
main()
"""
"""The command line, whose rehearsals then start without workspaces of convolutions."""


@dataclass
class Row:
    """A program's rehearsed peaks over its true ones, and whether it fits and fails as predicted.

    ``error`` says why there is no rehearsal; ``fits_above`` and ``fails_below`` are None if they
    were not tried.
    """

    name: str
    split: str
    error: str = ""
    allocated: float = 0.0
    reserved: float = 0.0
    is_partial: bool = False
    seconds: float = 0.0
    fits_above: bool | None = None
    fails_below: bool | None = None


def rehearsed(
    program: Path,
    python: str,
    gpu: str,
    *words: str,
    start: Sequence[str] = ("-m", "fragdoctor"),
    snapshot: Path | None = None,
) -> dict[str, Any]:
    """Rehearse a program with these arguments in an empty folder and return the JSON.

    Its snapshot is written to ``snapshot``, if that is given.

    Raises:
        RuntimeError: it cannot be rehearsed; the text says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(sys.executable, *start, "rehearse", str(program.resolve()), "--gpu", gpu),
                *("--python", python, "--format", "json", "--no-config", "--unlimited"),
                *(("--snapshot", str(snapshot)) if snapshot else ()),
                *("--", *words),
            ],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
        )
    if done.returncode == 2 or not done.stdout:
        raise RuntimeError(done.stderr.strip()[-300:] or f"exit code {done.returncode}")
    return dict(json.loads(done.stdout))


def on_gpu(truths: Sequence[ProgramTruth]) -> Iterator[ProgramTruth]:
    """Yield the programs that ran on a real GPU, with the peaks that they had there."""
    with MEASURED.open(encoding="utf-8") as file:
        measured = {row["name"]: row for row in csv.DictReader(file)}
    for truth in truths:
        if row := measured.get(truth.name):
            yield replace(
                truth,
                peak_allocated_bytes=int(row["peak_allocated_bytes"]),
                peak_reserved_bytes=int(row["peak_reserved_bytes"]),
            )


def judge(
    truth: ProgramTruth, python: str, server: Server | None, folder: Path | None, *, on_gpu: bool
) -> Row:
    """Rehearse one program and compare; its snapshot goes into the folder, if there is one."""
    row = Row(truth.name, truth.split)
    start = time.perf_counter()
    try:
        path = PROGRAMS / f"{truth.name}.py"
        how = ("-m", "fragdoctor") if on_gpu else ("-c", WITHOUT_WORKSPACES)
        keep = (folder / f"{truth.name}.pickle").resolve() if folder else None
        found = rehearsed(path, python, "h100", start=how, snapshot=keep)
    except RuntimeError as e:
        row.error = str(e)
        return row
    finally:
        row.seconds = time.perf_counter() - start
    program = read_program(path)
    if server is not None:  # the libraries are those of the rehearsal
        now = server.run(program, program.conf, UNLIMITED_MIB)
        truth = replace(
            truth,
            peak_allocated_bytes=now["peak_allocated_bytes"],
            peak_reserved_bytes=now["peak_reserved_bytes"],
        )
    run = found["rehearsal"]
    row.is_partial = bool(run["is_partial"])
    row.allocated = run["peak_allocated_bytes"] / truth.peak_allocated_bytes
    row.reserved = run["peak_reserved_bytes"] / truth.peak_reserved_bytes
    least = found.get("needs_bytes")
    if server is not None and least:
        capacity = least / program.fraction
        passes = [
            server.run(program, program.conf, even_mib(f * capacity))["state"] == "passed"
            for f in (1 + EDGE, 1 - EDGE)
        ]
        row.fits_above, row.fails_below = passes[0], not passes[1]
    return row


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table of one half."""
    ran = [row for row in rows if not row.error]

    def close(name: str, share: float) -> str:
        n = sum(abs(getattr(row, name) - 1) <= share for row in ran)
        exact = sum(getattr(row, name) == 1 for row in ran)
        return f"{n} of {len(ran)}; to the byte {exact}"

    yield f"  run unchanged              {len(ran)} of {len(rows)}"
    yield f"  seen to the end            {sum(not row.is_partial for row in ran)} of {len(ran)}"
    yield f"  allocated within 1%        {close('allocated', 0.01)}"
    yield f"  reserved within 3%         {close('reserved', 0.03)}"
    tried = [row for row in ran if row.fits_above is not None]
    if tried:
        above, below = (
            sum(bool(getattr(row, edge)) for row in tried) for edge in ("fits_above", "fails_below")
        )
        yield f"  fits with 5% more          {above} of {len(tried)}"
        yield f"  fails with 5% less         {below} of {len(tried)}"
    yield f"  seconds, all together      {sum(row.seconds for row in rows):.0f}"


def main(argv: Sequence[str]) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--python", required=True)
    parser.add_argument("--oracle", type=Path)
    parser.add_argument("--snapshots", type=Path, metavar="DIR")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--set", choices=(LOOKED, HELD_OUT, "all"), default="all")
    options = parser.parse_args(argv)
    truths = [read_truth(path) for path in sorted(TRUTH.glob("*.json"))]
    if options.gpu:
        truths = list(on_gpu(truths))
    chosen = [
        t for t in truths if (t.name in options.names or not options.names)
        and options.set in {"all", t.split}
    ]  # fmt: skip
    server = Server(options.oracle, options.python) if options.oracle else None
    rows = []
    for truth in chosen:
        row = judge(truth, options.python, server, options.snapshots, on_gpu=options.gpu)
        rows.append(row)
        if row.split == LOOKED:
            said = row.error.replace("\n", " ") or (
                f"allocated {row.allocated:.4f}, reserved {row.reserved:.4f}"
                + (", not to the end" if row.is_partial else "")
                + ("" if row.fits_above is not False else ", fails with 5% more")
                + ("" if row.fails_below is not False else ", fits with 5% less")
            )
            print(f"{row.name:<24} {said}", flush=True)
    for split in (LOOKED, HELD_OUT):
        half = [row for row in rows if row.split == split]
        if half:
            print(f"{split}: {len(half)} programs", *lines(half), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
