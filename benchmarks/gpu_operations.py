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
from operation_inputs import *

try:
    import torch.nn.attention.varlen
except Exception:
    pass
warnings.filterwarnings("ignore")
C64, HALF, F64 = torch.cfloat, torch.half, torch.double
FP8, FP85 = torch.float8_e4m3fn, torch.float8_e5m2
CL, CL3 = torch.channels_last, torch.channels_last_3d
LA, SP = torch.linalg, torch.special


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


def optimizer(kind, *shapes, dt=torch.float32, **options):
    """Return an optimizer that has not stepped yet, of parameters with gradients."""
    return getattr(torch.optim, kind)([graded(*s, dt=dt) for s in shapes], **options)


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


def forget():
    try:
        torch._C._cuda_clearCublasWorkspaces()
    except Exception:
        pass
    try:
        torch.backends.cuda.cufft_plan_cache.clear()
    except Exception:
        pass


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
    y, *found = asked(lambda: eval(line, globals()))
    results = [r for r in tensors(y) if r.requires_grad and r.layout == torch.strided]
    if results:
        work = backward_of(results)
        del y
        found += asked(work)[1:]
    torch.cuda.synchronize()  # a kernel that fails is this line's
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
