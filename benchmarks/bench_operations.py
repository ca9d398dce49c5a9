"""Compare rehearsed operations, and their backward passes, with PyTorch's own allocator.

    python benchmarks/bench_operations.py --python PY (--oracle DIR [--save] | --h200)

Each line of ``operations.txt`` is rehearsed, and run on the real allocator by ``DIR/run.sh`` with
the Python PY, which has a CUDA build of PyTorch; DIR is the same folder as for
``record_outlooks.py``. The comparison covers the bytes at the peak, the bytes of all requests, and
the strides of results and gradients. With ``--save`` what the real allocator did is kept in
``measured/operations.tsv``, which the tests compare rehearsals with.

With ``--h200`` it is the 1,248 operations of ``measured/operations_h200.tsv``, beside what an H200
with PyTorch 2.11 was asked for: family, setup, expression, and for each pass the bytes at the peak
and of all requests. ``gpu_operations.py`` prints the same on a GPU.

Left out of the first list is what the allocator without a GPU cannot say: results whose size
depends on values (its memory reads as zeros), and complex and special functions, which are compiled
at run time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAM, OPERATIONS = HERE / "operation_program.py", HERE / "operations.txt"
MEASURED = HERE / "measured" / "operations.tsv"


H200 = HERE / "measured" / "operations_h200.tsv"
NEAR_SHARE, NEAR_BYTES = 0.01, 65536


def compare_with_h200(python: str) -> None:
    """Print the operations whose peaks differ by more than 1% and 64 KiB, and how many do not."""
    command = [
        sys.executable,
        "-m",
        "fragdoctor",
        "rehearse",
        "--no-config",
        "--unlimited",
        "--full",
    ]
    done = subprocess.run(
        [*command, "--gpu", "h200", "--python", python, HERE / "gpu_operations.py", "--", H200],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    rows = (line.split("\t") for line in done.stdout.splitlines() if line.startswith("=\t"))
    ours = {tuple(row[1:4]): row[4::2] for row in rows}
    real = [line.split("\t") for line in H200.read_text(encoding="utf-8").splitlines()]
    far = 0
    for row in real:
        said, peaks = ours.get(tuple(row[:3]), []), row[3::2]
        if len(said) != len(peaks) or any(
            not a.isdigit() or abs(int(a) - int(b)) > max(NEAR_SHARE * int(b), NEAR_BYTES)
            for a, b in zip(said, peaks, strict=True)
        ):
            far += 1
            print(f"{' | '.join(row[:3])}\n    real      {peaks}\n    rehearsed {said}")
    print(f"{len(real) - far} of {len(real)} operations peak within 1% or 64 KiB of the H200's")


def rows_of(command: Sequence[str]) -> dict[str, list[str]]:
    """Return what a run prints for each operation."""
    done = subprocess.run(
        [*command, str(PROGRAM), *(["--"] if "rehearse" in command else []), str(OPERATIONS)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    rows = (line.split("\t") for line in done.stdout.splitlines() if line.startswith("=\t"))
    found = {text: values for _, text, *values in rows}
    if not found:
        sys.exit(f"{' '.join(command)} printed nothing:\n{done.stdout[-2000:]}")
    return found


def main() -> None:
    """Print the operations that differ, and how many are equal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True)
    parser.add_argument("--oracle", type=Path)
    parser.add_argument("--h200", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.h200:
        compare_with_h200(options.python)
        return
    if options.oracle is None:
        parser.error("--oracle or --h200 is missing")
    real = rows_of([str(options.oracle / "run.sh"), options.python])
    if options.save:
        rows = ("\t".join((text, *values)) for text, values in real.items())
        MEASURED.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    rehearse = ["-m", "fragdoctor", "rehearse", "--no-config", "--unlimited", "--full"]
    ours = rows_of([sys.executable, *rehearse, "--gpu", "h100", "--python", options.python])
    equal = [text for text in real if real[text] == ours.get(text)]
    for text in real.keys() - set(equal):
        print(f"{text}\n    real      {real[text]}\n    rehearsed {ours.get(text)}")
    print(f"{len(equal)} of {len(real)} operations ask for the same and lay it out alike")


if __name__ == "__main__":
    main()
