"""Run operations that have a setup, and print what each asks for: SCRIPT LIST [FROM [STEP]]

Lines of LIST begin with a family, a setup, which is not measured, and an expression, separated by
tabs (``measured/operations_h200.tsv``). Each expression is called twice, with its backward pass for
contiguous gradients, and the second call counts. Printed is a line for each: =, family, setup and
expression, the bytes at the peak and of all requests of the forward pass, and, where there is one,
of the backward pass; a failure is a single word instead.
"""

import gc
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as ckpt

try:
    import torch.nn.attention.varlen
except Exception:
    pass
warnings.filterwarnings("ignore")
D = {"device": "cuda"}
REQUESTED = "requested_bytes.all."
C64, HALF, BF16, F64 = torch.cfloat, torch.half, torch.bfloat16, torch.double
FP8, FP85 = torch.float8_e4m3fn, torch.float8_e5m2
CL, CL3 = torch.channels_last, torch.channels_last_3d
WEIGHTS = []
LA, SP = torch.linalg, torch.special


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


def P(module):
    """Return a module on the GPU, with its parameters among the leaves."""
    WEIGHTS.extend(module.cuda().parameters())
    return module


def sym(*shape, dt=torch.float32):
    """Return a positive definite matrix or several, with a gradient."""
    a = t(*shape, dt=dt)
    w = (a @ a.mH / shape[-1] + torch.eye(shape[-1], device="cuda", dtype=dt)).detach()
    WEIGHTS.append(w.requires_grad_())
    return w


def off(work):
    with torch.backends.cudnn.flags(enabled=False):
        return work()


def BENCH():
    torch.backends.cudnn.benchmark = True


def DETERM():
    torch.backends.cudnn.deterministic = True


def STRICT():
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)


def LIB(name):
    torch.backends.cuda.preferred_linalg_library(name)


def BLAS(name):
    torch.backends.cuda.preferred_blas_library(name)


def reset():
    """Set what a setup may have changed back."""
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = True, False
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    LIB("default")
    BLAS("default")


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
    shapes = [(300, 200), (40, 50)] if kind == "Muon" else [(300, 200), (300,), (8, 4, 3, 3)]
    parameters = [graded(*shape, dt=dt) for shape in shapes]
    if kind == "SparseAdam":
        for parameter in parameters:
            parameter.grad = parameter.grad.to_sparse()
    made = getattr(torch.optim, kind)(parameters, **options)
    made.step(lambda: sum(p.sum() for p in parameters)) if kind == "LBFGS" else made.step()
    made.step(lambda: sum(p.sum() for p in parameters)) if kind == "LBFGS" else made.step()
    return made


def optimizer(kind, *shapes, dt=torch.float32, **options):
    """Return an optimizer that has not stepped yet, of parameters with gradients."""
    return getattr(torch.optim, kind)([graded(*s, dt=dt) for s in shapes], **options)


def clipped(**options):
    return torch.nn.utils.clip_grad_norm_([graded(300, 200), graded(300)], 1.0, **options)


def scaled(dt, **options):
    layer, scaler = nn.Linear(300, 200).cuda(), torch.amp.GradScaler()
    made = torch.optim.AdamW(layer.parameters(), **options)
    with torch.autocast("cuda", torch.half):
        loss = layer(t(64, 300, dt=dt)).float().pow(2).mean()
    scaler.scale(loss).backward()
    scaler.unscale_(made)
    scaler.step(made)
    scaler.update()
    return scaler


def csr(n, m, share=0.05, dt=torch.float32):
    """Return a CSR matrix; its pattern is the same wherever it is computed."""
    row = max(1, int(m * share))
    columns = (torch.arange(row).repeat(n, 1) * (m // row)).reshape(-1)
    offsets = torch.arange(0, n * row + 1, row)
    return torch.sparse_csr_tensor(
        offsets.cuda(), columns.cuda(), torch.ones(n * row, dtype=dt, device="cuda"), (n, m)
    )


def coo(n, m, share=0.05, dt=torch.float32):
    row = max(1, int(m * share))
    columns = (torch.arange(row).repeat(n, 1) * (m // row)).reshape(-1)
    rows = torch.arange(n).repeat_interleave(row)
    values = torch.ones(n * row, dtype=dt, device="cuda")
    return torch.sparse_coo_tensor(
        torch.stack([rows, columns]).cuda(), values, (n, m), is_coalesced=True
    )


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


def forget():
    try:
        torch._C._cuda_clearCublasWorkspaces()
    except Exception:
        pass
    try:
        torch.backends.cuda.cufft_plan_cache.clear()
    except Exception:
        pass


def asked(work):
    """Return the result, and [peak, bytes of all requests]."""
    gc.collect()
    torch.autograd.grad(NOTHING * 1, NOTHING, NOTHING.detach())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    result = work()
    after = torch.cuda.memory_stats()
    torch.cuda.synchronize()
    peak = after[f"{REQUESTED}peak"] - before[f"{REQUESTED}current"]
    taken = after[f"{REQUESTED}allocated"] - before[f"{REQUESTED}allocated"]
    return result, [peak, taken]


def tensors(y):
    if isinstance(y, torch.Tensor):
        return [y]
    if isinstance(y, (tuple, list)):
        return [x for z in y for x in tensors(z)]
    return [y.data] if isinstance(y, nn.utils.rnn.PackedSequence) else []


def backward_of(results):
    leaves = [*LEAVES.values(), *WEIGHTS]
    gradients = [torch.ones_like(y) for y in results]
    return lambda: torch.autograd.grad(results, leaves, gradients, allow_unused=True)


def measure(line):
    """Return the bytes of a call and of its backward pass."""
    torch.manual_seed(0)
    y, found = asked(lambda: eval(line, globals()))
    results = [r for r in tensors(y) if r.requires_grad and r.layout == torch.strided]
    if results:
        work = backward_of(results)
        del y
        found += asked(work)[1]
    return found


def main():
    path, first, step = sys.argv[1], *map(int, (*sys.argv[2:], *(0, 1)[len(sys.argv) - 2 :]))
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    gc.collect()
    gc.freeze()
    for text in lines[first::step]:
        named = text.split("\t")[:3]
        names = dict(globals())
        try:
            WEIGHTS.clear()
            torch.manual_seed(0)
            exec(named[1], globals())
            forget()
            measure(named[2])
            found = measure(named[2])
        except Exception as e:
            found = [type(e).__name__]
        print("=", *named, *found, sep="\t", flush=True)
        WEIGHTS.clear()
        for name in set(globals()) - set(names):
            del globals()[name]
        globals().update(names)
        if any(word in named[1] for word in ("BENCH", "DETERM", "STRICT", "LIB", "BLAS", "tf32")):
            reset()


main()
