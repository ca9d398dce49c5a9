"""Other optimizers, or other ways to run the same one: fused, in 8 bits, or freeing gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from fragdoctor.model.frameworks import HAVE_FUSED
from fragdoctor.rehearsal.engine import put, wrap
from fragdoctor.rehearsal.engine.calls import Training, at_first_call

_SMALL: Final = 4096
"""Elements below which bitsandbytes keeps a tensor's state in 32 bits (``min_8bit_size``)."""
_QUANTILE_BLOCK: Final = 256
"""Number of elements that share a scale (``Optimizer2State`` of bitsandbytes 0.45)."""
_MAP: Final = 256
"""Number of values that 8 bits can stand for, kept as a 32-bit table for each kind of state."""


def fused(_: str) -> None:
    """Run each optimizer that supports it as one kernel, without temporaries."""
    for name in HAVE_FUSED:
        wrap(getattr(torch.optim, name), "__init__", _make_fused)


def _make_fused(make: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    make(self, *args, **{**kwargs, "fused": True, "foreach": False})


def adafactor(_: str) -> None:
    """Replace Adam and AdamW with Adafactor (factored second moments)."""
    _put_for_adam(torch.optim.Adafactor)


def in_8_bits(_: str) -> None:
    """Keep the state of Adam and AdamW in 8 bits, as bitsandbytes does."""
    _put_for_adam(EightBitAdam)


def _put_for_adam(make: Callable[..., torch.optim.Optimizer]) -> None:
    class Meta(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, torch.optim.Optimizer)

        def __call__(
            cls, params: Any, lr: Any = 1e-3, *_: Any, weight_decay: float = 0.0, **__: Any
        ) -> Any:
            return make(params, lr=lr, weight_decay=weight_decay)

    for kind in (torch.optim.Adam, torch.optim.AdamW):
        put(torch.optim, kind.__name__, Meta(kind.__name__, (kind,), {}))


class EightBitAdam(torch.optim.Optimizer):
    """What bitsandbytes' ``AdamW8bit`` allocates; its kernels update in place.

    Two bytes of state per element, a 32-bit scale for each block and state, and two tables.
    """

    def __init__(self, params: Any, lr: Any = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.999)})
        self._tables: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Create the state of parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not self.state[p]:
                    self._make_state(p)
        return loss

    def _make_state(self, p: torch.Tensor) -> None:
        state = self.state[p]
        state["step"] = 0
        for name in ("state1", "state2"):
            if p.numel() < _SMALL:
                state[name] = torch.zeros_like(p, dtype=torch.float32)
                continue
            state[name] = torch.zeros_like(p, dtype=torch.uint8)
            n_blocks = -(-p.numel() // _QUANTILE_BLOCK)
            state[f"absmax_{name}"] = torch.zeros(n_blocks, dtype=torch.float32, device=p.device)
        if p.numel() >= _SMALL and not self._tables:
            self._tables = [torch.zeros(_MAP, device=p.device) for _ in range(2)]


def frozen(_: str) -> None:
    """Let models of which no optimizer updates anything compute no gradients for themselves."""
    training = Training()

    def freeze(model: Any) -> None:
        if training.updated and not training.updates(model):
            model.requires_grad_(False)

    at_first_call(freeze)


def set_to_none(_: str) -> None:
    """Make ``zero_grad`` free gradients, whatever its arguments."""
    kinds: tuple[Any, ...] = (torch.optim.Optimizer, torch.nn.Module)
    for kind in kinds:
        zero = partial(kind.zero_grad, set_to_none=True)
        put(kind, "zero_grad", lambda owner, *_, zero=zero, **__: zero(owner))
