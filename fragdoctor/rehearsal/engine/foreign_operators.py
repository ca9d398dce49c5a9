"""Operators of other libraries: the fakes that they register say what the operators return.

An operator without a kernel for the GPU is served by its fake (``torch.library.register_fake``), as
in builds without CUDA. If there is a kernel, it is code for a GPU: a C++ kernel is replaced as soon
as there is a fake; a Python kernel is tried, since it may consist of PyTorch's own operators, and
the fake is used if it fails.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import library as torch_library
from torch._library.custom_ops import OPDEFS, CustomOpDef

from fragdoctor.rehearsal.engine import dispatch, session, wrap
from fragdoctor.rehearsal.engine.kernels.composites import flash_work

_NOT_REPLACED = ("aten", "prims", "prim", "_c10d_functional", "c10d")


def install() -> None:
    """Serve operators with their fakes."""
    served: set[str] = set()

    def serve(name: str) -> None:
        namespace, _, rest = name.partition("::")
        if name in served or namespace in _NOT_REPLACED or name in OPDEFS:
            return
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            served.add(name)
            library = dispatch.library_for(namespace)
            library.m.impl(rest, "CUDA", dispatch.named_kernel(name))

    def register_fake(register: Any, op: Any, func: Any = None, /, **options: Any) -> Any:
        options["_stacklevel"] = options.get("_stacklevel", 1) + 2
        if func is None:
            return lambda function: register_fake(register, op, function, **options)
        result = register(op, func, **options)
        name = op if isinstance(op, str) else getattr(op, "_name", "")
        if isinstance(name, str) and "::" in name:
            serve(name.partition(".")[0])
        return result

    def load_library(load: Any, path: Any) -> None:
        before = set(torch._C._dispatch_get_all_op_names())
        load(path)
        for name in set(torch._C._dispatch_get_all_op_names()) - before:
            serve(name)

    wrap(torch_library, "register_fake", register_fake)
    wrap(torch.ops, "load_library", load_library)
    wrap(CustomOpDef, "register_kernel", _register_kernel)


def _register_kernel(register: Any, op: Any, device_types: Any, kernel: Any = None, /) -> Any:
    """Register a Python kernel that falls back to the fake if it needs a GPU."""
    if kernel is None:
        return lambda function: _register_kernel(register, op, device_types, function)
    return register(op, device_types, partial(_try, op, kernel))


def _try(op: Any, kernel: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    try:
        return kernel(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        if op._abstract_fn is None:
            raise
    namespace, _, name = op._qualname.partition("::")
    if namespace == "flash_attn" and name.endswith("backward"):
        query, key = args[1:3]
        _sums, *sizes = flash_work(query, key, args[9] if query.dim() == 3 else None)
        _work = [torch.empty(size, dtype=torch.uint8, device=query.device) for size in sizes]
    else:
        session.note(
            f"The kernel of {op._qualname} needs a GPU: its fake tells what it returns, but not "
            "what memory it uses while it runs."
        )
    return op._abstract_fn(*args, **kwargs)
