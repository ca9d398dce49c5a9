"""Recurrent layers, as PyTorch runs them with cuDNN (``aten/src/ATen/native/cudnn/RNN.cpp``).

The weights of a layer are one buffer. A forward pass in training keeps a *reserve* for its backward
pass: the gates of each step and what goes from layer to layer. Each pass takes a workspace. Only
cuDNN's library knows the sizes of both, and it asks the device; here they follow from what it asked
for on an H200 (PyTorch 2.11, cuDNN 9.19; ``benchmarks/measured/operations_h200.tsv``). If cuDNN is
switched off, a layer runs step by step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Final

import torch
from torch.backends.cudnn import rnn as cudnn_modes

from fragdoctor.model.marks import WORKSPACE
from fragdoctor.rehearsal.engine import put, session
from fragdoctor.rehearsal.engine.allocation import give, stack_here, take, take_and_give
from fragdoctor.rehearsal.engine.dispatch import library_for, special
from fragdoctor.units import MIB

ATEN: Final = torch.ops.aten
COMPOSITE: Final = torch._C.DispatchKey.CompositeImplicitAutograd
MODES: Final = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
LSTM, GRU = MODES["lstm"], MODES["gru"]
WITHOUT_BIASES: Final = 2  # weights of each layer
DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GATES: Final = {0: 1, 1: 1, LSTM: 4, GRU: 3}
KEPT: Final = {0: 1, 1: 1, LSTM: 5, GRU: 6}
"""Vectors of the hidden size that the reserve has for each step, by mode."""
BUFFER_BYTES, WIDE_BUFFERS, BATCH = 8 * MIB + 512, 3, 32
PER_STEP, PER_STEP_OTHERS = {LSTM: 5.7, GRU: 5.1}, 4.1
PER_STEP_PACKED, PER_STEP_PACKED_OTHERS = {LSTM: 4.2, GRU: 3.1}, 2.0
"""Vectors that the workspace has, fitted: within 10% of each of 17 workspaces on an H200."""


@dataclass(frozen=True, slots=True)
class _Layers:
    """A stack of layers, and what it reads.

    Attributes:
        mode: cuDNN's number of the kind.
        proj: size of the projected state, 0 = not projected.
        rows: samples of all steps together.
        is_turned: whether the batch comes first in the tensors of the call.
        is_packed: whether the samples are of several lengths.
    """

    mode: int
    input: int
    hidden: int
    proj: int
    n_layers: int
    n_directions: int
    n_steps: int = 0
    rows: int = 0
    batch: int = 0
    item_bytes: int = 0
    is_turned: bool = False
    is_packed: bool = False

    def by_step(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with its steps first, or turned back."""
        return tensor.transpose(0, 1) if self.is_turned else tensor

    @property
    def out(self) -> int:
        """Size of a state that goes to the next step."""
        return self.proj or self.hidden

    @property
    def n_weights(self) -> int:
        """Elements of the buffer, in which there are biases always."""
        found, seen = 0, self.input
        for _ in range(self.n_layers):
            each = GATES[self.mode] * self.hidden * (seen + self.out + 2) + self.proj * self.hidden
            found, seen = found + self.n_directions * each, self.n_directions * self.out
        return found

    @property
    def reserve_bytes(self) -> int:
        kept = KEPT[self.mode] * self.hidden + bool(self.proj) * (self.hidden + self.proj)
        per_row = self.n_layers * kept + (self.n_layers - 1) * self.out
        return self.rows * self.n_directions * per_row * self.item_bytes + 256

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory of a pass: for products, and copies of the weights and of each step."""
        is_wide = self.n_layers * self.n_directions > 1 or self.mode not in PER_STEP_PACKED
        buffers = WIDE_BUFFERS if is_wide and not self.is_packed else 1
        rows, per_step = self.rows, PER_STEP_PACKED.get(self.mode, PER_STEP_PACKED_OTHERS)
        if not self.is_packed:
            rows = self.n_steps * -(-self.batch // BATCH) * BATCH
            per_step = PER_STEP.get(self.mode, PER_STEP_OTHERS)
        kept = per_step * rows * self.n_directions * self.hidden * (self.n_layers + 1) / 2
        return buffers * BUFFER_BYTES + round(kept + self.n_weights) * self.item_bytes


def _layers_of(seen: torch.Tensor, *how: Any) -> _Layers:
    """Return the layers of a call; ``how`` is what cuDNN's functions take from ``mode`` on."""
    mode, hidden, proj, n_layers, batch_first, _, _, bidirectional, batch_sizes, _ = how
    sizes = seen.shape[:2] if batch_first else reversed(seen.shape[:2])
    batch, n_steps = (batch_sizes[0], len(batch_sizes)) if batch_sizes else sizes
    rows = seen.shape[0] if batch_sizes else n_steps * batch
    return _Layers(
        mode, seen.shape[-1], hidden, proj, n_layers, 1 + bidirectional, n_steps, rows, batch,
        seen.element_size(), batch_first and not batch_sizes, bool(batch_sizes),
    )  # fmt: skip


@special("aten::_cudnn_rnn_flatten_weight")
def _flatten_weight(
    _op: Any, weights: Sequence[torch.Tensor], _n: int, input_size: int, mode: int, hidden: int,
    proj: int, n_layers: int, _first: bool, bidirectional: bool,
) -> torch.Tensor:  # fmt: skip
    """Put the weights of a layer one after another into one buffer."""
    layers = _Layers(mode, input_size, hidden, proj, n_layers, 1 + bidirectional)
    buffer = weights[0].new_empty(layers.n_weights)
    for weight, part in _parts(weights, buffer):
        weight.set_(part)  # type: ignore[call-overload]
    return buffer


def _parts(
    weights: Sequence[torch.Tensor], buffer: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield weights with their places in a buffer, which are no views for autograd."""
    begin = 0
    for weight in weights:
        part = buffer.new_empty(0)
        yield weight, part.set_(buffer.untyped_storage(), begin, weight.shape, weight.stride())
        begin += weight.numel()


@special("aten::_cudnn_rnn")
def _forward(
    _op: Any, seen: torch.Tensor, _weights: Any, _n: int, buffer: torch.Tensor | None,
    state: torch.Tensor, cell: torch.Tensor | None, *how: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    layers, is_training = _layers_of(seen, *how), how[6]
    dense = layers.by_step(seen).contiguous()
    out = dense.new_empty((*dense.shape[:-1], layers.n_directions * layers.out))
    last = state.new_empty(state.shape)
    last_cell = state.new_empty((0,) if cell is None else cell.shape)
    if buffer is None:
        buffer = dense.new_empty(layers.n_weights)
    workspace = take(seen.get_device(), layers.workspace_bytes, stack_here(WORKSPACE))
    reserve = dense.new_empty(layers.reserve_bytes * is_training, dtype=torch.uint8)
    give(workspace)
    return layers.by_step(out), last, last_cell, reserve, buffer


@special("aten::_cudnn_rnn_backward")
def _backward(
    _op: Any, seen: torch.Tensor, weights: Sequence[torch.Tensor], n_per_layer: int,
    buffer: torch.Tensor, state: torch.Tensor, cell: torch.Tensor | None, out: torch.Tensor,
    gradient: torch.Tensor | None, of_state: torch.Tensor | None, of_cell: torch.Tensor | None,
    *how_and_mask: Any,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """The gradients of the input and the states, and then those of the weights."""
    *how, _, mask = how_and_mask
    layers, device = _layers_of(seen, *how), seen.get_device()
    given = ((out, gradient), (state, of_state), (cell, of_cell))
    zeros = [x.new_empty(x.shape) for x, found in given if x is not None and found is None]
    dense = layers.by_step(seen).contiguous()
    whole = None if gradient is None else layers.by_step(gradient).contiguous()
    first = dense.new_empty(dense.shape)
    states = [None if x is None else x.new_empty(x.shape) for x in (state, cell)]
    take_and_give(device, layers.workspace_bytes, WORKSPACE)
    del dense, whole
    made: Any = []
    if mask[3]:
        seen = layers.by_step(seen).contiguous()
        flat = buffer.new_empty(buffer.shape)
        workspace = take(device, layers.workspace_bytes, stack_here(WORKSPACE))
        if n_per_layer > WITHOUT_BIASES:
            made = [part for _, part in _parts(weights, flat)]
        else:  # the buffer has biases
            made = [weight.new_empty(weight.shape) for weight in weights]
        give(workspace)
    del zeros
    return layers.by_step(first), *states, made


def _with_cudnn(op: Any, name: str, seen: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """Run a layer; arguments as for PyTorch's functions (``_cudnn_impl``)."""
    flags = torch.backends.cudnn
    if not (flags.enabled and seen.dtype in DTYPES and seen.numel()):
        with flags.flags(enabled=False):
            # The decomposition in Python, which ``decompose`` prefers, is not what a GPU runs.
            return op._op_dk(COMPOSITE, seen, *args)  # type: ignore[no-any-return]
    is_packed = op._overloadname == "data"
    batch_sizes = args[0].tolist() if is_packed else []
    hidden, weights, has_biases, n_layers, dropout, train, bidirectional = args[is_packed:][:7]
    batch_first = False if is_packed else args[-1]
    state, cell = hidden if name == "lstm" else (hidden, None)
    width, proj = state.shape[2], 0
    if cell is not None and cell.shape[2] != width:
        width, proj = cell.shape[2], width
    mode, buffer = MODES[name], _buffer_of(weights)
    session.current().libraries["cuDNN"] = 1
    if torch.is_autocast_enabled("cuda") and seen.dtype is not torch.float64:
        # ``_cudnn_rnn_cast_reflatten``: copies of the weights in one buffer.
        dtype = torch.get_autocast_dtype("cuda")
        layers = _Layers(mode, seen.shape[-1], width, proj, n_layers, 1 + bidirectional)
        buffer = seen.new_empty(layers.n_weights, dtype=dtype)
        weights = [part.copy_(weight) for weight, part in _parts(weights, buffer)]
        state, seen = state.to(dtype), seen.to(dtype)
        cell = None if cell is None else cell.to(dtype)
    with torch.autocast("cuda", enabled=False):
        found = ATEN._cudnn_rnn(
            seen, weights, 4 if has_biases else WITHOUT_BIASES, buffer, state, cell, mode, width,
            proj, n_layers, batch_first, dropout, train, bidirectional, batch_sizes, None,
        )  # fmt: skip
    return tuple(found[: 3 if name == "lstm" else 2])


def _buffer_of(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the buffer in which all weights are; None if they are apart, or bfloat16.

    ``flatten_parameters`` leaves bfloat16 out, so those weights are copied in each forward pass.
    """
    first = weights[0].detach()
    storage = first.untyped_storage()
    n = storage.nbytes() // first.element_size()
    is_one = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    if not is_one or n < sum(weight.numel() for weight in weights):
        return None
    return first.new_empty(0).set_(storage, 0, (n,), (1,))


def install() -> None:
    """Install these in place of the CUDA kernels."""
    library = library_for("aten")
    for layer, overload in product(MODES, ("input", "data")):
        op = getattr(getattr(ATEN, layer), overload)
        for key in ("AutogradCUDA", "CUDA"):
            library.impl(f"{layer}.{overload}", partial(_with_cudnn, op, layer), key)
    # A build without CUDA has no cuDNN to ask.
    put(torch.backends.cudnn, "is_acceptable", _is_flattened)
    put(cudnn_modes, "get_cudnn_mode", lambda name: MODES[name.lower()])


def _is_flattened(tensor: torch.Tensor) -> bool:
    """``torch.backends.cudnn.is_acceptable``, which does not know bfloat16."""
    is_known = tensor.dtype in {torch.float16, torch.float32, torch.float64}
    return torch.backends.cudnn.enabled and tensor.is_cuda and is_known
