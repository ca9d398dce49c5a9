"""Run each operation in ``operations.txt`` and print the memory it asks for, one line each.

A line has the bytes at the operation's peak and of all its requests, the same for its backward
pass, and the strides of its result and gradients, for an incoming gradient with the reversed order
of dimensions in memory. Each operation runs once beforehand, so that one-time allocations exist.
"""

import gc
import sys
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: F401, N812 - the lines use it
from torch import nn

D = {"device": "cuda"}
REQUESTED = "requested_bytes.all."


def t(*shape, g=False, dt=torch.float32):  # noqa: ANN001, ANN002, ANN201, D103
    return torch.randn(*shape, device="cuda", dtype=dt, requires_grad=g)


def I(high, *shape):  # noqa: ANN001, ANN002, ANN201, D103, E743, N802
    return torch.randint(0, high, shape, device="cuda")


def reversed_like(y):  # noqa: ANN001, ANN201, D103
    order = list(range(y.dim()))[::-1]
    shape = [y.shape[i] for i in order]
    return torch.zeros(shape, device="cuda", dtype=y.dtype).permute(order)


BF16 = torch.bfloat16
LEAVES = {
    "x2": t(512, 768, g=True), "x3": t(16, 256, 512, g=True), "im": t(8, 64, 56, 56, g=True),
    "h": t(512, 768, dt=BF16, g=True), "him": t(8, 64, 56, 56, dt=torch.half, g=True),
    "sq": t(8, 64, 64, g=True), "v": t(100000, g=True), "m": t(1000, 1000, g=True),
    "h3": t(8, 256, 512, dt=BF16, g=True), "h2": t(512, 768, dt=BF16, g=True),
    "x4": t(4, 32, 28, 28, g=True), "x5": t(2, 16, 8, 14, 14, g=True),
}  # fmt: skip
globals().update(LEAVES)
q, few = t(8, 64, 64, 12), torch.zeros(8, 64, 1, 1, dtype=torch.bool, **D)
vol, vol_c = t(4, 8, 64, 64, 32), t(4, 8, 64, 64, 32, dt=torch.cfloat)
MHA = nn.MultiheadAttention(512, 8, batch_first=True).cuda()
ENC = nn.TransformerEncoderLayer(512, 8, 1024, batch_first=True).cuda()
DEC = nn.TransformerDecoderLayer(512, 8, 1024, batch_first=True).cuda()
MB = nn.MultiheadAttention(512, 8, batch_first=True).cuda().bfloat16()
TR = nn.Transformer(256, 4, 1, 1, 512, batch_first=True).cuda()


def asked(work):  # noqa: ANN001, ANN201
    """Return the result, the peak in bytes above what was there before, and all bytes requested."""
    gc.collect()  # what an earlier line left in cycles would be freed while this one is measured
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    result = work()
    after = torch.cuda.memory_stats()
    peak = after[f"{REQUESTED}peak"] - before[f"{REQUESTED}current"]
    return result, peak, after[f"{REQUESTED}allocated"] - before[f"{REQUESTED}allocated"]


def measure(line):  # noqa: ANN001, ANN201
    """Return the measurements for one line."""
    y, *found = asked(lambda: eval(line))
    if not isinstance(y, torch.Tensor):
        return found
    found.append(y.stride())
    if y.requires_grad and y.is_floating_point():
        leaves, gradient = list(LEAVES.values()), reversed_like(y)
        back = lambda: torch.autograd.grad(y, leaves, gradient, allow_unused=True)  # noqa: E731
        gradients, *more = asked(back)
        found += [*more, *(g.stride() for g in gradients if g is not None)]
    return found


gc.freeze()  # what exists by now need not be looked through again and again
for text in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
    try:
        measure(text)
        print("=", text, *measure(text), sep="\t", flush=True)
    except Exception as e:  # noqa: BLE001 - a row says so
        print("=", text, type(e).__name__, sep="\t", flush=True)
