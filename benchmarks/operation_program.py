"""Run each operation in ``operations.txt`` and print the memory it asks for, one line each.

A line has the bytes at the operation's peak and of all its requests, the same for its backward
pass, and the strides of its result and gradients, for an incoming gradient with the reversed order
of dimensions in memory. Each operation runs once beforehand, so that one-time allocations exist.
The allocator without a GPU has a cuDNN that needs no workspaces, so a rehearsal leaves out its own.
"""

import gc
import sys
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as ckpt  # noqa: F401 - the lines use it

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


def W(*shape, dt=torch.float32):  # noqa: ANN001, ANN002, ANN201, D103, N802
    WEIGHTS.append(t(*shape, g=True, dt=dt))
    return WEIGHTS[-1]


def off(work):  # noqa: ANN001, ANN201, D103
    with torch.backends.cudnn.flags(enabled=False):
        return work()


def amp(work):  # noqa: ANN001, ANN201, D103
    with torch.autocast("cuda", torch.bfloat16):
        return work()


def sdpa(kernel, *inputs, **options):  # noqa: ANN001, ANN002, ANN003, ANN201, D103
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        return F.scaled_dot_product_attention(*inputs, **options)


def graded(*shape, dt=torch.float32):  # noqa: ANN001, ANN002, ANN201, D103
    parameter = nn.Parameter(t(*shape or (40, 50), dt=dt))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def trained(kind, dt=torch.float32, **options):  # noqa: ANN001, ANN003, ANN201
    """Return the step of an optimizer, so that the state that it keeps is measured too."""
    shapes = [(300, 200), (40, 50)] if kind == "Muon" else [(300, 200), (300,), (8, 4, 3, 3)]
    parameters = [graded(*shape, dt=dt) for shape in shapes]
    if kind == "SparseAdam":
        for parameter in parameters:
            parameter.grad = parameter.grad.to_sparse()
    made = getattr(torch.optim, kind)(parameters, **options)
    made.step(lambda: sum(p.sum() for p in parameters)) if kind == "LBFGS" else made.step()
    made.step(lambda: sum(p.sum() for p in parameters)) if kind == "LBFGS" else made.step()
    return made


def clipped(**options):  # noqa: ANN003, ANN201, D103
    return torch.nn.utils.clip_grad_norm_([graded(300, 200), graded(300)], 1.0, **options)


def scaled(dt, **options):  # noqa: ANN001, ANN003, ANN201
    """Return a scaler after one step under autocast."""
    layer, scaler = nn.Linear(300, 200).cuda(), torch.amp.GradScaler()
    made = torch.optim.AdamW(layer.parameters(), **options)
    with torch.autocast("cuda", torch.half):
        loss = layer(t(64, 300, dt=dt)).float().pow(2).mean()
    scaler.scale(loss).backward()
    scaler.unscale_(made)
    scaler.step(made)
    scaler.update()
    return scaler


BF16, WEIGHTS = torch.bfloat16, []
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
NOTHING = t(0, g=True)
if cudnn := sys.modules.get("fragdoctor.rehearsal.engine.cudnn"):
    cudnn.take = lambda *_: None


def asked(work):  # noqa: ANN001, ANN201
    """Return the result, the peak in bytes above what was there before, and all bytes requested."""
    gc.collect()  # what an earlier line left in cycles would be freed while this one is measured
    # Autograd's thread lets go of a pass's last gradients when it comes to the next pass.
    torch.autograd.grad(NOTHING * 1, NOTHING, NOTHING.detach())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    result = work()
    after = torch.cuda.memory_stats()
    peak = after[f"{REQUESTED}peak"] - before[f"{REQUESTED}current"]
    return result, peak, after[f"{REQUESTED}allocated"] - before[f"{REQUESTED}allocated"]


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


gc.freeze()  # what exists by now need not be looked through again and again
for text in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
    try:
        measure(text)
        print("=", text, *measure(text), sep="\t", flush=True)
    except Exception as e:  # noqa: BLE001 - a row says so
        print("=", text, f"{type(e).__name__}: {e}".split("\n")[0][:200], sep="\t", flush=True)
