"""Run each operation in ``operations.txt`` and print the memory it asks for, one line each.

A line has the bytes at the operation's peak and of all its requests, the same for its backward
pass, and the strides of its result and gradients, for an incoming gradient with the reversed order
of dimensions in memory. Each operation runs once beforehand, so that one-time allocations exist.
The allocator without a GPU has a cuDNN that needs no workspaces, so a rehearsal leaves out its own.
"""

import gc
import sys
from pathlib import Path

import operation_inputs
import torch
from operation_inputs import LEAVES, WEIGHTS, asked

globals().update(vars(operation_inputs) | {"__name__": __name__})  # for the lines
if cudnn := sys.modules.get("fragdoctor.rehearsal.engine.cudnn"):
    cudnn.take = lambda *_: None


def reversed_like(y):  # noqa: ANN001, ANN201, D103
    order = list(range(y.dim()))[::-1]
    shape = [y.shape[i] for i in order]
    return torch.zeros(shape, device="cuda", dtype=y.dtype).permute(order)


def measure(line):  # noqa: ANN001, ANN201
    """Return the measurements for one line."""
    WEIGHTS.clear()
    torch.manual_seed(0)
    y, *found = asked(lambda: eval(line))
    if not isinstance(y, torch.Tensor):
        return found
    found.append(y.stride())
    if y.requires_grad and y.is_floating_point():
        leaves, gradient = [*LEAVES.values(), *WEIGHTS], reversed_like(y)
        back = lambda: torch.autograd.grad(y, leaves, gradient, allow_unused=True)  # noqa: E731
        gradients, *more = asked(back)
        found += [*more, *(g.stride() for g in gradients if g is not None)]
    return found


for text in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
    gc.collect()
    gc.freeze()  # what exists by now, also what PyTorch loaded last, need not be looked through
    try:
        measure(text)
        print("=", text, *measure(text), sep="\t", flush=True)
    except Exception as e:  # noqa: BLE001 - a row says so
        print("=", text, f"{type(e).__name__}: {e}".split("\n")[0][:200], sep="\t", flush=True)
