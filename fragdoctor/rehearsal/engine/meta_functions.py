"""What an operation returns, from sizes, strides and dtypes alone: PyTorch's own meta functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_leaves, tree_map

from fragdoctor.rehearsal.engine import session, values
from fragdoctor.rehearsal.engine.kernels.scratch import n_bytes
from fragdoctor.units import MIB

META: Final = torch.device("meta")
CPU: Final = torch.device("cpu")
MOST_COMPUTED_BYTES: Final = 64 * MIB
"""The largest tensors with which an operation is run on the CPU to find out what it returns."""
Key = Any


class UnknownResultError(NotImplementedError):
    """Nothing says what an operator (``namespace::name``) returns: its library has no fake."""

    def __init__(self, operator: str) -> None:
        super().__init__(
            f"Nothing says what the operator {operator} returns: it has no fake "
            "(torch.library.register_fake)."
        )


def described(value: Any) -> Key:
    """Return a hashable description of whatever in an argument affects an operation's result."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype, value.get_device(), value.is_meta)
    kind = type(value)
    if kind is list or kind is tuple:
        return tuple([described(item) for item in value])
    if kind is int or kind is bool or kind is float or kind is complex:
        return (kind, value)
    if isinstance(value, torch.Generator):
        return None
    return value


def on_meta(value: Any, *, keeps_numbers: bool = True) -> Any:
    """Return an argument in the form of the meta functions: without values and devices.

    CPU tensors that stand for numbers stay on the CPU, because the kind of number affects the
    result's dtype; if the dtype is given, this is not necessary.
    """

    def convert(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if keeps_numbers and item.is_cpu and not item.dim():
                return item
            return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=META)
        if isinstance(item, torch.device):
            return META
        if isinstance(item, torch.Generator):
            return None
        return item

    return tree_map(convert, value)


_OF_ONE_TYPE: Final = {
    "addmm": (1, 2), "index_add": (0, 3), "index_copy": (0, 3), "masked_scatter": (0, 2),
    "mm": (0, 1), "scatter": (0, 3), "scatter_add": (0, 3),
}  # fmt: skip
"""Operation -> two arguments whose types CUDA's kernel requires to be equal, although PyTorch's
meta function does not."""


def check_types(op: Any, args: Sequence[Any]) -> None:
    """Reject arguments that a GPU's kernel rejects.

    Raises:
        RuntimeError: two arguments are of different types.
    """
    name = op.overloadpacket.__name__
    first, second = _OF_ONE_TYPE.get(name.rstrip("_"), (0, 0))
    if second < len(args) and first != second:
        a, b = args[first], args[second]
        if torch.is_tensor(a) and torch.is_tensor(b) and a.dtype != b.dtype:
            raise RuntimeError(
                f"{name}(): expected two tensors of the same dtype, but got {a.dtype} and {b.dtype}"
            )


_CONTIGUOUS: Final = frozenset(
    {
        "_fused_rms_norm_backward", "_log_softmax_backward_data", "mse_loss_backward",
        "native_layer_norm_backward", "poisson", "rrelu_with_noise",
    }
)  # fmt: skip
"""Operations whose CUDA kernel makes a contiguous result, unlike PyTorch's meta function."""
_AS_SUGGESTED: Final = {"native_batch_norm_backward": 1, "native_dropout_backward": 0}
"""Operation -> the argument that suggests whether its result is channels-last or contiguous."""


def infer(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the results of an operation on meta tensors.

    Raises:
        UnknownResultError: there is no meta function for it.
        RuntimeError: the arguments do not fit together.
    """
    found = _inferred(op, args, kwargs)
    first, *rest = found if isinstance(found, (tuple, list)) else (found,)
    if not isinstance(first, torch.Tensor):
        return found
    name = op.overloadpacket.__name__
    if name in _CONTIGUOUS:
        first = first.new_empty(first.shape)
    elif name in _AS_SUGGESTED:
        layout = suggest_memory_format(args[_AS_SUGGESTED[name]])
        first = torch.empty_like(first, memory_format=layout)
    elif is_pointwise(op.overloadpacket):
        operands = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        is_last = name == "threshold_backward"  # the gradient (Activation.cpp)
        first = _iterated(first, operands[::-1] if is_last else operands)
    return (first, *rest) if isinstance(found, (tuple, list)) else first


_ITERATED: Final = (None, torch.neg, torch.add, torch.addcmul)


def _iterated(result: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a result laid out by TensorIterator, which not all meta functions ask.

    If all operands are contiguous it does not look at their strides, except on meta tensors.
    """
    if all(t.shape == result.shape and t.is_contiguous() for t in operands):
        return result.new_empty(result.shape)
    iterated = _ITERATED[len(operands)] if len(operands) < len(_ITERATED) else None
    if iterated is None:
        return result
    made = iterated(*(torch.empty_strided(t.shape, t.stride(), device=META) for t in operands))
    is_one_each = made.shape == result.shape  # not so for ``max``, which has another overload
    return result.new_empty_strided(made.shape, made.stride()) if is_one_each else result


_UNTAGGED: Final = frozenset(
    {
        "complex", "polar", "floor_divide", "elu_backward", "hardshrink_backward",
        "hardsigmoid_backward", "hardswish_backward", "hardtanh_backward", "leaky_relu_backward",
        "mish_backward", "softplus_backward", "softshrink_backward",
    }
)  # fmt: skip


@cache
def is_pointwise(packet: Any) -> bool:
    """Return whether an operation works element by element, as some of its overloads may say."""
    overloads = (getattr(packet, name) for name in packet.overloads())
    return packet.__name__ in _UNTAGGED or any(torch.Tag.pointwise in o.tags for o in overloads)


def _inferred(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        known = KNOWN.get(op.overloadpacket.__name__)
        if known is not None:
            return known(*args, **kwargs)
        if op._overloadname in {"dtype", "dtype_out"}:
            return _product_in(op, args, kwargs)
        function = op
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "Meta"):
            from torch._decomp import decomposition_table

            function = decomposition_table.get(op, op)
        try:
            return function(*args, **kwargs)
        except NotImplementedError as err:
            found = _by_cpu(op, args, kwargs)
            if found is None:
                raise UnknownResultError(op.name()) from err
            return found[0]
        except RuntimeError as err:
            # A number for a tensor: PyTorch wraps it for some names only; others have an overload.
            if "Expected a value of type 'Tensor'" not in str(err):
                raise
            return op.overloadpacket(*args, **kwargs)


def _product_in(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a matrix product with an ``out_dtype``, which the meta functions do not take."""
    n_factors = [a.name for a in op._schema.arguments].index("out_dtype")
    dtype = kwargs.get("out_dtype", args[n_factors] if len(args) > n_factors else None)
    given = {k: v for k, v in kwargs.items() if k in {"alpha", "beta"}}
    made = op.overloadpacket.default(*args[:n_factors], **given).to(dtype)
    return kwargs["out"].resize_(made.shape) if "out" in kwargs else made


def _by_cpu(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
    """Return what the CPU's kernel makes of made-up values, as meta tensors; None if it has none.

    Given results (``out=``) get the size that the kernel gave them. Large tensors are cut to two
    and to three along their first dimension: the full result is extrapolated from these two.
    """
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    largest = max(leaves, key=n_bytes, default=None)
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "CPU"):
        return None
    if largest is None or sum(map(n_bytes, leaves)) <= MOST_COMPUTED_BYTES:
        return _ran_on_cpu(op, args, kwargs)
    length = largest.shape[0]
    if n_bytes(largest) * _LONGER > MOST_COMPUTED_BYTES * length or "out" in kwargs:
        return None

    def cut(item: Any, n: int) -> Any:
        if isinstance(item, torch.Tensor) and item.dim() and item.shape[0] == length:
            return item.new_empty((n, *item.shape[1:]))
        return item

    small, larger = (
        _ran_on_cpu(op, *tree_map(partial(cut, n=n), (args, kwargs))) for n in (_SHORT, _LONGER)
    )

    def extended(one: Any, other: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        sizes = zip(one.shape, other.shape, strict=True)
        return one.new_empty([n + (more - n) * (length - _SHORT) for n, more in sizes])

    return None if small is None or larger is None else tree_map(extended, small, larger)


_SHORT, _LONGER = 2, 3


def _ran_on_cpu(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, draws: bool = False
) -> tuple[Any] | None:
    """Run the CPU's kernel with ones: valid lengths and probabilities.

    If it refuses them, because 1 is past the last class or a matrix of ones lacks full rank, it
    gets random numbers up to 1 and the integer 0.
    """
    given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def convert(item: Any) -> Any:
        if isinstance(item, torch.Tensor) and item.is_meta:
            made = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=CPU)
            given.append((item, made))
            if draws and (made.is_floating_point() or made.is_complex()):
                return made.copy_(torch.rand_like(made))
            return made.fill_(not draws)
        return CPU if item == META else item

    with torch.random.fork_rng(devices=[]):
        try:
            result = op(*tree_map(convert, args), **tree_map(convert, kwargs))
        except (RuntimeError, IndexError):
            if draws:
                raise
            return _ran_on_cpu(op, args, kwargs, draws=True)
    for meta, made in given:
        if meta.shape != made.shape:
            meta.set_(on_meta(made, keeps_numbers=False))
    made_here = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if any(leaf.is_nested or leaf.layout is not torch.strided for leaf in made_here):
        return None
    return (on_meta(result, keeps_numbers=False),)


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, *args: Any, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    length, batch = log_probs.shape[:2]
    longest = targets.shape[1] if targets.dim() > 1 else max(1, targets.numel() // max(1, batch))
    if len(args) > 1 and not isinstance(args[1], torch.Tensor):
        longest = max(args[1], default=longest)
    return log_probs.new_empty((batch,)), log_probs.new_empty((batch, length, 2 * longest + 1))


def _cell(
    gates: torch.Tensor, _: torch.Tensor, state: torch.Tensor, *__: Any, **___: Any
) -> tuple[torch.Tensor, ...]:
    """A GRU's new state and workspace, or an LSTM's two states and its gates."""
    n, width = state.shape
    if gates.shape[1] == 3 * width:
        return torch.empty_like(state), state.new_empty((n, 5 * width))
    return state.new_empty((n, width)), state.new_empty((n, width)), gates.new_empty(gates.shape)


def _gru_cell_backward(
    gradient: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    n, width = workspace.shape[0], 3 * gradient.shape[1]
    bias = [workspace.new_empty((width,)) if has_bias else None for _ in range(2)]
    gates = [workspace.new_empty((n, width)) for _ in range(2)]
    return (*gates, torch.empty_like(gradient), *bias)


def _grouped_mm(first: torch.Tensor, second: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's meta function takes bf16 only; CUDA multiplies group by group in other dtypes.

    Rows are padded to 16 bytes (aten/src/ATen/native/GroupedMMUtils.h).
    """
    if first.dtype is torch.bfloat16 or first.dtype is not second.dtype:
        return torch.ops.aten._grouped_mm.default(first, second, *args, **kwargs)
    offsets = args[0] if args else kwargs.get("offs")
    groups = offsets.shape[0] if offsets is not None else first.shape[0]
    rows, columns = first.shape[-2], second.shape[-1]
    per_row = 16 // first.itemsize
    padded = -(-columns // per_row) * per_row
    if first.dim() != second.dim():  # one is grouped along a dimension of the result
        return first.new_empty_strided((rows, columns), (padded, 1))
    return first.new_empty_strided((groups, rows, columns), (rows * padded, padded, 1))


def _slow_convolution(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    _kernel: Any,
    bias: Any = None,
    stride: Any = (1,),
    padding: Any = (0,),
    dilation: Any = (1,),
) -> torch.Tensor:
    geometry = stride, padding, dilation, False, (0,), 1
    made: torch.Tensor = torch.ops.aten.convolution.default(tensor, weight, bias, *geometry)
    return made.contiguous()


def _sampled(tensor: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((*tensor.shape[:2], *grid.shape[1:3]))


def _nms(boxes: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return the boxes that torchvision keeps: the share that is assumed for other selections."""
    shares = session.current().assumptions.shares
    n = round(shares.get("nonzero", 1.0) * boxes.shape[0])
    values.assume("nms", "all boxes are kept" if n == boxes.shape[0] else f"{n} boxes are kept")
    return boxes.new_empty((n,), dtype=torch.int64)


def _to_jagged(padded: torch.Tensor, _offsets: Any, total: int | None = None) -> torch.Tensor:
    """``_padded_dense_to_jagged_forward``: the rows of sequences without their padding."""
    if total is None:
        values.assume("jagged", "all sequences are as long as the longest")
        total = padded.shape[0] * padded.shape[1]
    return padded.new_empty((total, *padded.shape[2:]))


KNOWN: Final[dict[str, Callable[..., Any]]] = {
    "_grouped_mm": _grouped_mm,
    "_thnn_fused_gru_cell": _cell,
    "_thnn_fused_lstm_cell": _cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "_ctc_loss": _ctc_loss,
    "_padded_dense_to_jagged_forward": _to_jagged,
    "_slow_conv2d_forward": _slow_convolution,
    "slow_conv3d_forward": _slow_convolution,
    "slow_conv_dilated2d": _slow_convolution,
    "slow_conv_dilated3d": _slow_convolution,
    "cudnn_grid_sampler": _sampled,
    "cudnn_grid_sampler_backward": lambda tensor, grid, _: (
        tensor.new_empty(tensor.shape),
        grid.new_empty(grid.shape),
    ),
    "nms": _nms,
    "_ctc_loss_backward": lambda _, log_probs, *__, **___: log_probs.new_empty(log_probs.shape),
}
"""Results of operations whose meta function in PyTorch is missing or accepts too little."""
