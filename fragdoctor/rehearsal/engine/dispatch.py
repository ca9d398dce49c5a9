"""Kernels for the key ``CUDA``: they request memory as PyTorch's own do, and compute nothing.

They stand below autograd, autocast, modes and subclasses, where CUDA's kernels stand, and are
called with plain tensors. Operations that PyTorch composes from others (``CompositeImplicit`` and
``CompositeExplicit``) stay as they are and arrive here as their parts, in PyTorch's own order. In
builds without CUDA one fallback serves every operation that has no kernel; operations that have a
CUDA kernel besides a composite form are named in :data:`FUSED`. In builds with CUDA every kernel is
replaced.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import torch
from torch import library as torch_library
from torch.utils._pytree import tree_flatten, tree_leaves

from fragdoctor.model.conf_keys import parse_version
from fragdoctor.rehearsal.engine import allocation, meta_functions, nothing, session
from fragdoctor.rehearsal.engine.allocation import BlockLayout
from fragdoctor.rehearsal.engine.kernels.scratch import (
    FREE,
    MAKE,
    RULES,
    TAKE,
    Call,
    Step,
    registered,
    steps_of,
)
from fragdoctor.rehearsal.engine.vtables import fields

Handler = Callable[..., Any]
# Kernels that CUDA shares with every device: they create a view and touch no memory.
VIEWS: Final = frozenset(
    {
        "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold",
        "aten::view_as_real", "aten::view_as_complex", "aten::_conj", "aten::_neg_view",
    }
)  # fmt: skip
# Operations with a CUDA kernel besides the composite form that other devices run, in addition to
# all ``_foreach_*`` (PyTorch's native_functions.yaml: ``dispatch`` has CUDA and a ``Composite``).
FUSED: Final = frozenset(
    {
        "_chunk_cat", "_chunk_cat.out", "_fused_rms_norm", "_fused_rms_norm_backward",
        "_grouped_mm", "addr", "addr.out", "all.dims", "all.dims_out", "any.dims", "any.dims_out",
        "convolution_backward", "linalg__powsum", "mish_backward", "native_group_norm",
        "native_layer_norm", "silu_backward", "split_with_sizes_copy.out",
    }
)  # fmt: skip
_FROM_SHAPES: Final = ("empty", "new_empty")
"""How the names of operations begin that ask a tensor only for its shape."""
MAX_PLANS: Final = 100_000
_META_KEYS: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
SPECIAL: Final[dict[str, Handler]] = {}
"""Special kernels by operation, called as ``kernel(op, *args, **kwargs)``."""


def special(*names: str) -> Callable[[Handler], Handler]:
    """Register a special kernel for operations (``aten::copy_``)."""
    return registered(SPECIAL, names)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one operation does with arguments of one description.

    Attributes:
        device: the GPU.
        steps: the memory that it requests, in order.
        layouts: the layouts of the tensors that it creates.
        results: builds the return value from the created tensors and the arguments.
        resized: new shape and strides of each output tensor; None = unchanged.
    """

    device: int
    steps: Sequence[Step]
    layouts: Sequence[BlockLayout]
    results: Callable[[list[torch.Tensor], tuple[Any, ...]], Any]
    resized: Sequence[tuple[torch.Size, tuple[int, ...]] | None] = ()

    def run(self, args: tuple[Any, ...]) -> Any:
        """Request the memory in order and return the results."""
        stack = allocation.stack_here()
        made: list[Any] = [None] * len(self.layouts)
        temps: dict[int, int] = {}
        try:
            for action, number, n_bytes in self.steps:
                if action == MAKE:
                    made[number] = self.layouts[number].make(self.device, stack)
                elif action == TAKE:
                    temps[number] = allocation.take(self.device, n_bytes, stack)
                elif action == FREE:
                    allocation.give(temps.pop(number))
                else:
                    use_blas(self.device, is_lt=bool(number))
        finally:
            for address in reversed(temps.values()):
                allocation.give(address)
        return self.results(made, args)


REFUSED: Final[dict[int, str]] = {}
"""Storages whose memory is somebody else's by now, and the error of operations on them."""
_plans: dict[Any, Plan] = {}
_handlers: dict[str, Handler] = {}
_blas_handles: dict[tuple[int, int, bool, str], int] = {}
LT_BYTES: Final = 2**20
"""The size unless ``CUBLASLT_WORKSPACE_SIZE`` gives another number of KiB."""
_LT_IS_APART: Final = parse_version(torch.__version__) < (2, 12, 0)


def use_blas(device: int, *, is_lt: bool = False) -> None:
    """Take cuBLAS's workspace: one for each thread's handle and stream, kept from then on.

    Before PyTorch 2.12 cuBLASLt has a workspace of its own (``aten/src/ATen/cuda/CUDABlas.cpp``).
    """
    now = session.current()
    handle = (device, now.gpus.stream(device), allocation.in_engine_thread())
    sizes = {"cuBLAS workspace": now.blas_workspace_bytes}
    if is_lt and _LT_IS_APART:
        sizes["cuBLASLt workspace"] = LT_BYTES
    for name, n_bytes in sizes.items():
        if (*handle, name) not in _blas_handles:
            now.libraries["cuBLAS"] = len({key[:3] for key in _blas_handles} | {handle})
            stack = allocation.stack_here("")
            _blas_handles[*handle, name] = allocation.take(device, n_bytes, stack)


def clear_blas_workspaces() -> None:
    """Give the workspaces back, as ``torch._C._cuda_clearCublasWorkspaces`` does."""
    for address in _blas_handles.values():
        allocation.give(address)
    _blas_handles.clear()


def functional(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that returns new tensors."""
    return _planned(_plan, op, args, kwargs).run(args)


def _planned(
    make: Callable[..., Plan], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Plan:
    """Return the plan of an operation, which is made once for all arguments of one description."""
    key = (
        op,
        meta_functions.described(args),
        tuple([(k, meta_functions.described(v)) for k, v in kwargs.items()]),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = make(op, args, kwargs)
        if len(_plans) > MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


def _plan(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    meta_functions.check_types(op, args)
    device = device_of(args, kwargs)
    meta_args, meta_kwargs = meta_functions.on_meta(args), meta_functions.on_meta(kwargs)
    found = meta_functions.infer(op, meta_args, meta_kwargs)
    leaves, structure = tree_flatten(found)
    inputs = {
        t.untyped_storage()._cdata: i
        for i, t in enumerate(meta_args)
        if isinstance(t, torch.Tensor)
    }
    layouts: list[BlockLayout] = []
    makers: list[Callable[..., Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            makers.append(lambda _made, _args, leaf=leaf: leaf)
        elif leaf.untyped_storage()._cdata in inputs:
            view = inputs[leaf.untyped_storage()._cdata], leaf.shape, leaf.stride()
            makers.append(lambda _made, args, view=view: args[view[0]].as_strided(*view[1:]))
        else:
            number = len(layouts)
            makers.append(lambda made, _args, number=number: made[number])
            layouts.append(BlockLayout(leaf.shape, leaf.stride(), leaf.dtype))
    steps = steps_of(Call(op, args, kwargs, tuple(layouts)))

    def results(made: list[torch.Tensor], args: tuple[Any, ...]) -> Any:
        return structure.unflatten([maker(made, args) for maker in makers])

    return Plan(device, steps, layouts, results)


def in_place(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that changes its arguments; only its scratch memory is requested."""
    meta_functions.check_types(op, args)
    if op.overloadpacket.__name__ in RULES:

        def plan(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
            return Plan(device_of(args, kwargs), steps_of(Call(op, args, kwargs, ())), (), nothing)

        _planned(plan, op, args, kwargs).run(args)
    declared = zip(args, op._schema.arguments, strict=False)
    written = (arg for arg, declaration in declared if declaration.alias_info is not None)
    return next(written) if op._schema.returns else None


def out_variant(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that writes into tensors given to it, resizing them if necessary."""
    outs = [kwargs[a.name] for a in op._schema.arguments if a.is_out]
    plan = _planned(_plan_into, op, args, kwargs)
    for out, changed in zip(outs, plan.resized, strict=True):
        if changed is not None:
            out.resize_(changed[0])
            out.as_strided_(*changed)
    plan.run(args)
    if not op._schema.returns:
        return None
    return outs[0] if len(outs) == 1 else tuple(outs)


def _plan_into(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    meta_functions.check_types(op, args)
    outs = {a.name: kwargs[a.name] for a in op._schema.arguments if a.is_out}
    inputs = {k: v for k, v in kwargs.items() if k not in outs}
    metas = {name: meta_functions.on_meta(out) for name, out in outs.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about resizing; the real warning comes later
        found = meta_functions.infer(
            op,
            meta_functions.on_meta(args, keeps_numbers=False),
            {**meta_functions.on_meta(inputs, keeps_numbers=False), **metas},
        )
    made = tuple(
        BlockLayout(m.shape, m.stride(), m.dtype)
        for m in metas.values()
        if isinstance(m, torch.Tensor)
    )
    steps = [step for step in steps_of(Call(op, args, inputs, made)) if step[0] != MAKE]
    first = found[0] if isinstance(found, (tuple, list)) else found
    is_like_first = meta_functions.is_pointwise(op.overloadpacket)
    resized = [
        (meta.shape, first.stride() if is_like_first else allocation.dense_strides(meta.shape))
        if isinstance(meta, torch.Tensor) and outs[name].shape != meta.shape
        else None
        for name, meta in metas.items()
    ]
    return Plan(device_of(args, kwargs), steps, (), nothing, resized)


def view(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that returns a view, using the meta kernel, which needs no memory."""
    return op.redispatch(_META_KEYS, *args, **kwargs)


def of_cpu(key: str, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the parts of the CPU's kernel if PyTorch uses the same code for both devices."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return op.redispatch(keys, *args, **kwargs)


def composed(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run PyTorch's code around a kernel: the results are made, and then the out variant runs.

    It calls other operations; kernels that it calls itself are in :data:`vtables.SILENT`.
    """
    makes = "CompositeExplicitAutogradNonFunctional"
    return of_cpu("CPU" if op._schema.is_mutable else makes, op, *args, **kwargs)


# The code of these is one for CPU and GPU, also where it is "structured" and makes its results.
special(
    "aten::_linalg_det", "aten::_linalg_slogdet", "aten::_linalg_solve_ex", "aten::index.Tensor",
    "aten::linalg_inv_ex", "aten::renorm", "aten::renorm_", "aten::scatter_reduce",
    "aten::scatter_reduce_",
)(composed)  # fmt: skip
# And of these: they call other operations.
special(
    "aten::_cdist_forward", "aten::_embedding_bag_backward",
    "aten::_fake_quantize_learnable_per_channel_affine",
    "aten::_fake_quantize_learnable_per_channel_affine_backward",
    "aten::_fake_quantize_learnable_per_tensor_affine",
    "aten::_fake_quantize_learnable_per_tensor_affine_backward",
    "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "aten::fake_quantize_per_channel_affine_cachemask",
    "aten::fake_quantize_per_tensor_affine_cachemask", "aten::huber_loss",
    "aten::_to_sparse", "aten::_to_sparse_bsc", "aten::_to_sparse_bsr", "aten::_to_sparse_csc",
    "aten::_to_sparse_csr", "aten::_transformer_encoder_layer_fwd", "aten::set_.source_Storage",
    "aten::set_.source_Tensor",
)(partial(of_cpu, "CPU"))  # fmt: skip


def device_of(args: Any, kwargs: dict[str, Any]) -> int:
    """Return the GPU on which an operation runs: that of its tensors, or of its arguments."""
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, torch.Tensor):
            if value.is_cuda:
                return value.get_device()
        elif isinstance(value, torch.device) and value.type == "cuda" and value.index is not None:
            return value.index
    return int(session.current().gpus.device())


def handler_of(op: Any) -> Handler:
    """Return the handler of an operation."""
    name = op.name()
    packet = f"{op.namespace}::{op.overloadpacket.__name__}"
    found = SPECIAL.get(name) or SPECIAL.get(packet)
    if found is not None:
        return found
    if packet in VIEWS:
        return view
    schema = op._schema
    if any(a.is_out for a in schema.arguments):
        return out_variant
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    returns_alias = [r for r in schema.returns if r.alias_info is not None]
    if written and len(returns_alias) == len(schema.returns):
        return in_place
    if returns_alias:
        return view
    return functional


def serve(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve an operation, and track the values that are known."""
    handler = _handlers.get(op)
    if handler is None:
        handler = _handlers[op] = handler_of(op)
    if REFUSED and handler is not view and not op.overloadpacket.__name__.startswith(_FROM_SHAPES):
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and (why := REFUSED.get(fields().of(value))):
                raise RuntimeError(why)
    return session.current().known.serve(op, handler, args, kwargs)


def _kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Serve an operation; an out-of-memory error must not keep its arguments alive."""
    try:
        return serve(op, args, kwargs)
    except torch.OutOfMemoryError as err:
        error = err.with_traceback(None)
    args, kwargs = (), {}
    raise error


def named_kernel(name: str) -> Callable[..., Any]:
    """Return the kernel that serves an operation (``aten::copy_``)."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _kernel(_operator(name), *args, **kwargs)

    return kernel


@cache
def _operator(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


_libraries: list[Any] = []
"""Kept, since kernels are registered for as long as their library lives."""


def library_for(namespace: str) -> Any:
    """Return a library to register kernels with."""
    _libraries.append(torch_library.Library(namespace, "IMPL"))
    return _libraries[-1]


def install() -> None:
    """Register the kernels."""
    library, everything = library_for("aten"), library_for("_")
    known = set(torch._C._dispatch_get_all_op_names())
    built = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    in_aten = {name for name in built if name.startswith("aten::")}
    without_memory = VIEWS | {"aten::_efficientzerotensor"}  # makes zeros without memory
    shared = {name for name in in_aten if name.partition(".")[0] in without_memory}
    foreach = {n for n in known if n.startswith("aten::_foreach_") and not n.endswith("out")}
    replaced = (in_aten - shared) | {f"aten::{name}" for name in FUSED} | foreach | set(SPECIAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kernels are replaced on purpose
        everything.m.fallback("CUDA", _kernel, False)
        for name in sorted(replaced & known):
            library.m.impl(name.removeprefix("aten::"), "CUDA", named_kernel(name))
