"""Operators of other libraries: the fakes that they register say what the operators return.

An operator without a kernel for the GPU is served by its fake (``torch.library.register_fake``), as
in builds without CUDA. If there is a kernel, it is code for a GPU: a C++ kernel is replaced as soon
as there is a fake; a Python kernel is tried, since it may consist of PyTorch's own operators, and
the fake is used if it fails.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import library as torch_library
from torch._library.custom_ops import OPDEFS, CustomOpDef

from fragdoctor.rehearsal.engine import dispatch, put, session

_NOT_REPLACED = ("aten", "prims", "prim", "_c10d_functional", "c10d")


def install(undo: ExitStack) -> None:
    """Serve operators with their fakes until ``undo`` is closed."""
    served: set[str] = set()

    def serve(name: str) -> None:
        namespace, _, rest = name.partition("::")
        if name in served or namespace in _NOT_REPLACED or name in OPDEFS:
            return
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            served.add(name)
            library = dispatch.library_for(namespace, undo)
            library.m.impl(rest, "CUDA", dispatch.named_kernel(name))

    register: Any = torch_library.register_fake

    def register_fake(op: Any, func: Any = None, /, **options: Any) -> Any:
        options["_stacklevel"] = options.get("_stacklevel", 1) + 1
        if func is None:
            return lambda function: register_fake(op, function, **options)
        result = register(op, func, **options)
        name = op if isinstance(op, str) else getattr(op, "_name", "")
        if isinstance(name, str) and "::" in name:
            serve(name.partition(".")[0])
        return result

    put(undo, torch_library, "register_fake", register_fake)
    load: Any = torch.ops.load_library

    def load_library(path: Any) -> None:
        before = set(torch._C._dispatch_get_all_op_names())
        load(path)
        for name in set(torch._C._dispatch_get_all_op_names()) - before:
            serve(name)

    put(undo, torch.ops, "load_library", load_library)
    put(undo, CustomOpDef, "register_kernel", _tried(CustomOpDef.register_kernel))


def _tried(original: Any) -> Any:
    def register_kernel(self: Any, device_types: Any, fn: Any = None, /) -> Any:
        """Register a Python kernel that falls back to the fake if it needs a GPU."""
        if fn is None:
            return lambda function: register_kernel(self, device_types, function)
        return original(self, device_types, _with_fake(self, fn))

    return register_kernel


def _with_fake(op: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            if op._abstract_fn is None:
                raise
        session.note(
            f"The kernel of {op._qualname} needs a GPU: its fake tells what it returns, but not "
            "what memory it uses while it runs."
        )
        return op._abstract_fn(*args, **kwargs)

    return call
