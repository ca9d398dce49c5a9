"""Check what ``rehearse --cure`` says against PyTorch's own allocator.

    python benchmarks/bench_cure.py --oracle DIR --python PY [--set looked|held-out|all]

Each program of ``outlook_programs`` that needs neither settings nor another process has to fit in
three quarters of what it reserves. Every change that was rehearsed for it is then made on the
allocator itself (``treated_program.py``), at that capacity: a change that is said to fit has to
pass. The allocator's simulated GPU has a cuDNN that needs no workspaces, so rehearsals leave out
theirs. DIR and PY are those of ``record_outlooks.py``. No held-out program is named.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from outlook_table import HELD_OUT, LOOKED, ProgramTruth, read_truth
from record_outlooks import MIB, PROGRAMS, read_program

from fragdoctor.errors import FragdoctorError
from fragdoctor.model.prescription import Prescription, Tried
from fragdoctor.rehearsal import process
from fragdoctor.rehearsal.prescription.search import CureSearch
from fragdoctor.rehearsal.process import RehearsalConditions, rehearsed_gpu
from fragdoctor.rehearsal.programs import Program

HERE = Path(__file__).resolve().parent
TRUTH = HERE.parent / "tests" / "truth" / "programs"
SHARE = 0.75
NEAR = 0.01
SEARCH_S = 120.0


def prescribed(truth: ProgramTruth, python: str, capacity_mib: int) -> Prescription:
    """Return what ``CureSearch`` finds to make a program fit."""
    program = Program(str(PROGRAMS / f"{truth.name}.py"), False, [], [python])
    gpu = rehearsed_gpu(None, capacity_mib * MIB, is_unlimited=False)
    return CureSearch(program, RehearsalConditions(gpu=gpu), None, SEARCH_S).run()


def ended(
    tried: Tried, truth: ProgramTruth, capacity_mib: int, oracle: Path, python: str
) -> tuple[str, int]:
    """Return how the treated program ends on the allocator, and the peak of its tensors.

    It ends as ``passed``, ``oom`` or ``error``.
    """
    specs = "+".join(spec for one in tried.treatments for spec in one.specs)
    conf = next((one.conf for one in tried.treatments if one.conf), "")
    done = subprocess.run(
        [
            *("sh", str(oracle / "run.sh"), python, str(HERE / "treated_program.py")),
            *(str(HERE.parent), specs, str(PROGRAMS / f"{truth.name}.py")),
        ],
        env={
            **os.environ,
            "FAKECUDA_TOTAL_MB": str(capacity_mib),
            "PYTORCH_CUDA_ALLOC_CONF": conf,
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    end, _, peak = done.stdout.strip().rpartition("\n")[2].partition(" ")
    return (end, int(peak)) if end in {"passed", "oom"} else ("error", 0)


def main(argv: Sequence[str]) -> None:
    """Print a line per contradiction in the programs that are looked at, and each half's table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--oracle", type=Path, required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument("--set", choices=(LOOKED, HELD_OUT, "all"), default="all")
    options = parser.parse_args(argv)
    process.START = HERE / "start_without_workspaces.py"  # type: ignore[misc]
    counts: dict[str, Counter[str]] = {LOOKED: Counter(), HELD_OUT: Counter()}
    for path in sorted(TRUTH.glob("*.json")):
        truth = read_truth(path)
        program = read_program(PROGRAMS / f"{truth.name}.py")
        is_plain = program.fraction == 1 and not (program.other_mib or program.conf or truth.leaks)
        if not is_plain or options.set not in {"all", truth.split}:
            continue
        n, capacity_mib = counts[truth.split], int(truth.peak_reserved_bytes * SHARE / MIB) // 2 * 2
        start = time.perf_counter()
        try:
            found = prescribed(truth, options.python, capacity_mib)
        except FragdoctorError as e:
            n["not rehearsed"] += 1
            print(truth.name if truth.split == LOOKED else "a program held out", e.message)
            continue
        n["seconds"] += round(time.perf_counter() - start)
        n["programs"] += 1
        n["cured"] += found.cure is not None
        n["fit as they are"] += found.fits
        for tried in found.tried:
            how = "failed" if tried.error else "fits" if tried.fits else "does not fit"
            real, peak = ended(tried, truth, capacity_mib, options.oracle, options.python)
            n[f"said: {how}; {real}"] += 1
            if tried.fits and real == "passed":
                said = tried.peak_allocated_bytes or 0
                n["fits; peak within 1%"] += abs(said - peak) <= NEAR * peak
            if truth.split == LOOKED and (how, real) in {
                ("fits", "oom"),
                ("does not fit", "passed"),
            }:
                print(f"{truth.name}: {tried.title}: {how}, and {real}", flush=True)
    for half, n in counts.items():
        if n:
            print(
                f"{half}:",
                *(f"  {name:<28} {count}" for name, count in sorted(n.items())),
                sep="\n",
            )


if __name__ == "__main__":
    main(sys.argv[1:])
