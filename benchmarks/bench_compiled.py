"""Compare rehearsals of compiled programs with a real GPU.

    python benchmarks/bench_compiled.py --python PY [NAME ...]

The programs of ``compiled_programs`` ran on an H200 with PyTorch 2.11.0 (``gpu_program.py``); their
peaks are in ``measured/compiled_h200.csv``. PY is a Python with that PyTorch and Triton, and
transformers for one of the programs; it needs no GPU.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path

from bench_rehearsals import rehearsed

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Print a line per program, and how many of them are close."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--python", required=True)
    options = parser.parse_args()
    with (HERE / "measured" / "compiled_h200.csv").open(encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if not options.names or r["name"] in options.names]
    ratios = []
    for row in rows:
        begun = time.perf_counter()
        program = HERE / "compiled_programs" / f"{row['name']}.py"
        try:
            found = rehearsed(program, options.python, "h200")["rehearsal"]
        except RuntimeError as e:
            print(f"{row['name']:<20} {e}", flush=True)
            continue
        names = ("peak_allocated_bytes", "peak_reserved_bytes")
        ratios.append([found[name] / int(row[name]) for name in names])
        print(
            f"{row['name']:<20} allocated {ratios[-1][0]:.4f}, reserved {ratios[-1][1]:.4f}, "
            f"{time.perf_counter() - begun:.0f} s",
            *found["notes"],
            sep="\n    ",
            flush=True,
        )
    for i, name in enumerate(("allocated", "reserved")):
        close = [sum(abs(r[i] - 1) <= most for r in ratios) for most in (0.0005, 0.01, 0.02, 0.05)]
        print(
            f"{name}: of {len(rows)} programs {close[0]} equal within 0.05%, {close[1]} within "
            f"1%, {close[2]} within 2%, {close[3]} within 5%"
        )


if __name__ == "__main__":
    main()
