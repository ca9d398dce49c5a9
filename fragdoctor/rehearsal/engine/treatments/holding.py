"""What one line of the program creates, kept on the host and moved to the GPU for use.

What the line's own operations create is on the host at once. If the line calls a model, what the
program keeps of a call without a graph is there from the next call on: results that it gathers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import inf
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from fragdoctor.rehearsal.engine.calls import around_models
from fragdoctor.rehearsal.engine.memory_history import users_line

_FILLS: Final = frozenset({"zeros", "ones", "full", "empty"})
"""Functions that create the same values on the host as on the GPU."""
_LEAVES: Final = frozenset({"cpu", "numpy", "tolist", "item"})


class HeldTensor(torch.Tensor):
    """A tensor on the host that passes for one on the GPU.

    If an operation reads only such tensors and indices, or writes into one, it is carried out on
    the host; its result goes to the GPU unless it is a view, or all of several tensors in one. Any
    other operation gets a copy on the GPU.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Carry out an operation that was given such a tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return _carried_out(func, args, kwargs or {})


def _carried_out(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    of = getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "__get__" and of in {"device", "is_cuda"}:
        return True if of == "is_cuda" else torch.device("cuda", torch.cuda.current_device())
    given: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, given.append, (args, kwargs))
    held = [one for one in given if isinstance(one, HeldTensor)]
    writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    is_into_held = writes and args and isinstance(args[0], HeldTensor)
    others = [one for one in given if not isinstance(one, HeldTensor)]
    writes_elsewhere = (writes and not is_into_held) or "out" in kwargs
    is_read_alone = not writes_elsewhere and not any(one.is_floating_point() for one in others)
    on_host = is_into_held or is_read_alone or name == "__get__"
    device = "cpu" if on_host else "cuda"
    kinds = torch.Tensor if on_host else HeldTensor

    def moved(one: torch.Tensor) -> torch.Tensor:
        return one.as_subclass(torch.Tensor).to(device)

    args, kwargs = tree_map_only(kinds, moved, (tuple(args), dict(kwargs)))
    result = func(*args, **kwargs)
    if is_into_held or name in _LEAVES or not on_host:
        return given[0] if is_into_held and name != "__setitem__" else result
    storages = {one.untyped_storage().data_ptr() for one in held}
    all_bytes = sum(one.nbytes for one in held) if len(held) > 1 else inf

    def placed(one: torch.Tensor) -> torch.Tensor:
        if one.is_cuda:
            return one
        if one.untyped_storage().data_ptr() in storages or one.nbytes >= all_bytes:
            return one.as_subclass(HeldTensor)
        return one.cuda()

    return tree_map_only(torch.Tensor, placed, result)


class _HoldingMode(TorchFunctionMode):
    """Keeps on the host what a line of the program creates on the GPU."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self._line = line
        self._is_in_model = False
        self._made: list[weakref.ref[torch.Tensor]] = []
        around_models(self._around)

    def _around(self, *_: Any) -> AbstractContextManager[Any] | None:
        """Move what is left of the last call, and note what the next one makes."""
        if users_line() != self._line:
            return None
        with torch._C.DisableTorchFunction():
            for one in (made() for made in self._made):
                if type(one) is torch.Tensor and one.is_cuda and not one.requires_grad:
                    one.data = one.detach().cpu()
                    one.__class__ = HeldTensor
        return self._in_model()

    @contextmanager
    def _in_model(self) -> Iterator[None]:
        self._made, self._is_in_model = [], True
        try:
            yield
        finally:
            self._is_in_model = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        more = dict(kwargs or {})
        if self._is_in_model:  # also of what it was given from the host, such as a cache
            result = func(*args, **more)
            tree_map_only(torch.Tensor, lambda one: self._made.append(weakref.ref(one)), result)
            return result
        if any(issubclass(kind, HeldTensor) for kind in types) or users_line() != self._line:
            return func(*args, **more)
        is_filled = getattr(func, "__name__", "") in _FILLS and more.get("device") is not None
        result = func(*args, **{**more, **({"device": "cpu"} if is_filled else {})})
        is_new = type(result) is torch.Tensor and not result.requires_grad
        if is_new and not is_filled:
            is_new = result.is_cuda and not result._is_view()
            is_new = is_new and all(result is not one for one in args)
        return result.detach().cpu().as_subclass(HeldTensor) if is_new else result


def on_host(argument: str) -> None:
    """Keep what a line creates on the host; the file is named as in its code: ``train.py:23``."""
    mode: Any = _HoldingMode(argument)
    mode.__enter__()
