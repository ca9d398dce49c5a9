"""What the lines of ``operations.txt`` and of ``measured/operations_h200.tsv`` are made of.

Sizes are those of the committed figures: inputs with gradients, modules, optimizers, and
:func:`asked`, which measures. A line finds these names among its globals.
"""

import gc

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as ckpt

D = {"device": "cuda"}
REQUESTED = "requested_bytes.all."
BF16, WEIGHTS = torch.bfloat16, []


def t(*shape, g=False, dt=torch.float32):
    return torch.randn(*shape, device="cuda", dtype=dt, requires_grad=g)


def I(high, *shape):
    return torch.randint(0, high, shape, device="cuda")


def W(*shape, dt=torch.float32, mf=None):
    w = t(*shape, dt=dt)
    if mf is not None:
        w = w.to(memory_format=mf)
    WEIGHTS.append(w.requires_grad_())
    return w


def off(work):
    with torch.backends.cudnn.flags(enabled=False):
        return work()


def amp(work):
    with torch.autocast("cuda", torch.bfloat16):
        return work()


def sdpa(kernel, *inputs, **options):
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        return F.scaled_dot_product_attention(*inputs, **options)


def graded(*shape, dt=torch.float32):
    parameter = nn.Parameter(t(*shape or (40, 50), dt=dt))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def trained(kind, dt=torch.float32, **options):
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


def clipped(**options):
    return torch.nn.utils.clip_grad_norm_([graded(300, 200), graded(300)], 1.0, **options)


def scaled(dt, **options):
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


def asked(work):
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
