"""Compare the convolution workspaces that cuDNN reports without a GPU with those on an H200.

    PY benchmarks/bench_workspaces.py

PY is a Python with a CUDA build of PyTorch (its cuDNN is queried; no GPU is used); fragdoctor's
sources are next to this folder. ``measured/convolutions_h200.csv`` holds 1,500 convolutions of
random shapes, run on an H200 with PyTorch 2.11.0 and cuDNN 9.19.0, with the bytes of scratch memory
requested from the allocator in the forward pass and in both parts of the backward pass.
"""

from __future__ import annotations

import csv
import math
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

import torch  # noqa: E402

from fragdoctor.model.gpus import gpu_of  # noqa: E402
from fragdoctor.rehearsal.engine import cudnn  # noqa: E402

MIB = 2**20
H200 = gpu_of("h200")
TOTAL_BYTES = 139 * 2**30
TRANSPOSED = {
    "forward": "backward_data",
    "backward_data": "forward",
    "backward_filter": "backward_filter",
}


def numbers(text: str) -> list[int]:
    """Return the numbers in a text such as ``2x64x7x7``."""
    return [int(n) for n in text.split("x")]


def calls(row: dict[str, str]) -> dict[str, cudnn.Convolution]:
    """Return the convolutions that PyTorch requests from cuDNN for a row, by pass."""
    is_transposed = row["transposed"] == "1"
    shapes = [numbers(row[name]) for name in ("input", "weight", "result")]
    padding, stride, dilation = (numbers(row[n]) for n in ("padding", "stride", "dilation"))
    if len(stride) == 1:  # a 1D convolution is computed as a 2D one
        shapes = [[*s[:2], 1, s[2]] for s in shapes]
        padding, stride, dilation = [0, *padding], [1, *stride], [1, *dilation]
    if is_transposed:
        shapes = [shapes[2], shapes[1], shapes[0]]
    x, w, y = map(tuple, shapes)
    dtype = getattr(torch, row["dtype"])
    is_last = row["channels_last"] == "1"
    geometry = (is_last, tuple(padding), tuple(stride), tuple(dilation))
    return {
        name: cudnn.Convolution(other if is_transposed else name, dtype, x, w, y, *geometry)
        for name, other in TRANSPOSED.items()
    }


def main() -> None:
    """Print for each pass how many workspaces are equal, and how close the others are."""
    off: dict[str, list[float]] = defaultdict(list)
    with (HERE / "measured" / "convolutions_h200.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for name, call in calls(row).items():
                tensors = (call.input, call.weight, call.result)
                size = call.dtype.itemsize * sum(math.prod(shape) for shape in tensors)
                if size < MIB:
                    continue
                said = next(iter(cudnn.plans_of(call, H200, TOTAL_BYTES)), None)
                if said is None:
                    raise SystemExit("There is no cuDNN here, or it has no plan.")
                off[name].append((said - int(row[name])) / size)
    for name, shares in off.items():
        counts = [sum(abs(s) <= most for s in shares) for most in (0, 0.01, 0.05, 0.25)]
        print(
            f"{name:<16} {len(shares)} convolutions of 1 MiB or more; equal {counts[0]}, within "
            f"1% of their tensors {counts[1]}, 5% {counts[2]}, 25% {counts[3]}"
        )


if __name__ == "__main__":
    main()
