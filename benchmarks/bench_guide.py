"""Rehearse the program of a guide, and compare its memory with what the guide states.

    python benchmarks/bench_guide.py --python PY

The guide prints what NVML counts after each run, and 1,343 MiB of it before the model is made: the
context, and the first kernel (``guide_program.py`` has the address). PY is a Python with PyTorch,
transformers, accelerate and datasets.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench_rehearsals import rehearsed

CONTEXT_MIB = 1_343
STATED_MIB = {
    "4 1 0 0 adamw": 14_949,
    "1 4 0 0 adamw": 8_681,
    "1 4 1 0 adamw": 6_775,
    "4 1 0 1 adamw": 13_939,
    "1 4 1 1 adamw": 7_275,
    "4 1 0 0 adafactor": 12_295,
    "1 4 1 1 adafactor": 4_847,
}
"""Arguments of the program: what the guide states."""
PROGRAM = Path(__file__).with_name("guide_program.py")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True)
    options = parser.parse_args()
    print(f"{'batch accumulated checkpoints fp16 optimizer':<46} stated  rehearsed")
    for words, nvml_mib in STATED_MIB.items():
        run = rehearsed(PROGRAM, options.python, "v100", *words.split())["rehearsal"]
        stated, found = nvml_mib - CONTEXT_MIB, int(run["peak_reserved_bytes"]) >> 20
        print(f"{words:<46} {stated:6,}  {found:9,}  {found / stated - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main()
