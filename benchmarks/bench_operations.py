"""Compare rehearsed operations, and their backward passes, with PyTorch's own allocator.

    python benchmarks/bench_operations.py --python PY --oracle DIR [--save]

Each line of ``operations.txt`` is rehearsed, and run on the real allocator by ``DIR/run.sh`` with
the Python PY, which has a CUDA build of PyTorch; DIR is the same folder as for
``record_outlooks.py``. The comparison covers the bytes at the peak, the bytes of all requests, and
the strides of results and gradients. With ``--save`` what the real allocator did is kept in
``measured/operations.tsv``, which the tests compare rehearsals with.

Left out of the list is what the allocator without a GPU cannot say: results whose size depends on
values (its memory reads as zeros), and complex and special functions, which are compiled at run
time.
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
    parser.add_argument("--oracle", required=True, type=Path)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
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
