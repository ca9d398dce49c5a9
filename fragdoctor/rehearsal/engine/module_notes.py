"""Which module of the model each request is for, and whether it holds a parameter or similar.

A called module is credited with all requests until it returns. Autograd numbers its nodes in the
order in which they are created, so what a backward node requests belongs to the module that was
running when the node got its number. Parameters, gradients and optimizer state are identified by
their addresses, which are read from the modules and optimizers whenever they may have changed.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from weakref import WeakSet, ref

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fragdoctor.model.marks import GRADIENTS, OPTIMIZER, PARAMETERS, module_note
from fragdoctor.recording.module_names import ByIdentity, ModuleNames, common_path, path_below
from fragdoctor.rehearsal.engine import seen_through
from fragdoctor.rehearsal.engine.gpu import ACTIONS, Event
from fragdoctor.rehearsal.engine.marks import in_backward
from fragdoctor.rehearsal.engine.vtables import fields

_ALLOC: Final = ACTIONS.index("alloc")
_FREE: Final = ACTIONS.index("free_requested")
_MOST_CHANGES: Final = 2_000_000
"""Changes of the running module that are kept; beyond that the older half is dropped."""


class Claim(NamedTuple):
    """What is at some addresses of a GPU after ``n_events`` of its events: what ``paths`` hold."""

    n_events: int
    held: str
    paths: Sequence[str]
    addresses: Sequence[int]


class _Thread(threading.local):
    """What runs in a thread, and which module was running when autograd reached a number.

    Attributes:
        path: path of the running module, "" outside any module.
        was_called: whether it was called within the current backward pass.
        numbers, paths: which module was running from each number on.
    """

    def __init__(self) -> None:
        self.path = ""
        self.was_called = False
        self.numbers: list[int] = []
        self.paths: list[str] = []


class ModuleNotes:
    """Knows the modules of a rehearsal, and what was where in memory.

    Attributes:
        claims: by GPU, in the order of its events.
    """

    def __init__(self) -> None:
        self.claims: dict[int, list[Claim]] = {}
        self._thread = _Thread()
        self._paths = ByIdentity()
        self._names = ModuleNames()
        self._models = ByIdentity()
        self._model_of = ByIdentity()
        self._owners = ByIdentity()
        self._optimizers: WeakSet[Any] = WeakSet()
        self._known = ByIdentity()
        self._gpus: Any = None

    def install(self, gpus: Any) -> None:
        """Watch how modules are assembled, and the steps of optimizers."""
        self._gpus = gpus

        @seen_through  # a slice of a ModuleList is put together in traced code
        def put_together(above: Any, _name: str, module: Any) -> None:
            if module is not None and not torch.compiler.is_compiling():
                self._names.put_together(above, module)

        register_module_module_registration_hook(put_together)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    # ---- which module runs ----------------------------------------------------------------------

    def enter(self, module: Any) -> tuple[str, bool]:
        """Note that a module is called; return what :meth:`leave` needs when it returns."""
        thread = self._thread
        before = thread.path, thread.was_called
        path: str | None = self._paths.get(module)
        if path is None:
            path = self._named(module, thread.path)
        self._run(path, was_called=in_backward())
        return before

    def leave(self, before: tuple[str, bool]) -> None:
        """Note that a module has returned, or failed."""
        self._run(before[0], was_called=before[1])

    def _run(self, path: str, *, was_called: bool) -> None:
        thread = self._thread
        thread.path, thread.was_called = path, was_called
        number = torch._C._autograd._get_sequence_nr()
        if thread.numbers and thread.numbers[-1] == number:  # no node was made since
            thread.paths[-1] = path
            return
        thread.numbers.append(number)
        thread.paths.append(path)
        if len(thread.paths) > _MOST_CHANGES:
            del thread.numbers[: _MOST_CHANGES // 2], thread.paths[: _MOST_CHANGES // 2]

    def here(self) -> str:
        """Return the path of the module that is requesting memory now, "" outside any module."""
        thread = self._thread
        if thread.was_called or not in_backward():
            return thread.path
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        if hasattr(node, "variable"):  # it accumulates a gradient, and has no number of its own
            return str(self._owners.get(node.variable, ""))
        at = bisect.bisect_right(thread.numbers, node._sequence_nr()) - 1
        return thread.paths[at] if at >= 0 else ""

    # ---- names ----------------------------------------------------------------------------------

    def _named(self, module: Any, running: str) -> str:
        """Name every module of the model that a module belongs to; return the module's own path."""
        model = self._names.outermost(module)
        if model is module and running:
            # A module made while another model runs is a part of that model.
            self._paths[module] = running
            return running
        for name, inner in model.named_modules():
            self._name(model, name, inner)
        return str(self._paths.get(module))

    def _name(self, model: Any, name: str, inner: Any) -> str:
        path: str | None = self._paths.get(inner)
        if path is None:
            path = self._paths[inner] = path_below(self._names.name_of(model), name.split("."))
            self._models[model] = True
            self._model_of[inner] = ref(model)
        return path

    # ---- parameters, gradients, optimizer state -------------------------------------------------

    def begin_call(self, module: Any) -> None:
        """Note what a called model holds, unless its first parameter is where it was."""
        found = self._model_of.get(module)
        model = None if found is None else found()
        if model is None:
            return
        first = next(model.parameters(), None)
        with torch._C.DisableTorchFunctionSubclass():
            begins = [address for _, address in places(first)]
        known = self._known.get(model, {}).get(PARAMETERS)
        if known is None or known[: len(begins)] != begins:
            self._read_model(model)

    def end_backward(self) -> None:
        """Note what the models hold after a backward pass."""
        for model in self._models:
            self._read_model(model)

    def read_all(self) -> None:
        """Note what everything that is alive holds."""
        self.end_backward()
        for optimizer in list(self._optimizers):
            self._after_step(optimizer)

    def _read_model(self, model: Any) -> None:
        parameters: dict[int, tuple[str, Any]] = {}  # a shared one belongs to its first module
        buffers: list[tuple[str, Any]] = []
        for name, inner in model.named_modules():
            path = self._name(model, name, inner)
            buffers += [(path, one) for one in inner._buffers.values() if one is not None]
            for one in inner._parameters.values():
                if one is not None and id(one) not in parameters:
                    parameters[id(one)] = path, one
                    if not self._owners.get(one):
                        self._owners[one] = path
        self._claim(PARAMETERS, [*parameters.values(), *buffers], of=model)
        self._claim(GRADIENTS, ((path, _gradient(one)) for path, one in parameters.values()))

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._optimizers.add(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._claim(GRADIENTS, ((self._owners.get(p, ""), _gradient(p)) for p in parameters))

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        state = (
            (self._owners.get(p, ""), t) for p, s in optimizer.state.items() for t in _tensors(s)
        )
        self._claim(OPTIMIZER, state, of=optimizer)

    def _claim(self, held: str, tensors: Iterable[tuple[str, Any]], of: Any = None) -> None:
        """Note what is where; for a module or an optimizer only if anything has moved."""
        claimed: dict[int, tuple[list[str], list[int]]] = {}
        every: list[int] = []
        with torch._C.DisableTorchFunctionSubclass():
            for path, tensor in tensors:
                for device, address in places(tensor):
                    paths, addresses = claimed.setdefault(device, ([], []))
                    paths.append(path)
                    addresses.append(address)
                    every.append(address)
        if of is not None:
            known = self._known.get(of, {})
            if known.get(held) == every:
                return
            self._known[of] = known | {held: every}
        for device, (paths, addresses) in claimed.items():
            n_events = self._gpus.figures(device)["events"]
            self.claims.setdefault(device, []).append(Claim(n_events, held, paths, addresses))

    def of_blocks(self, device: int, events: Sequence[Event]) -> dict[int, str]:
        """Return the notes of blocks that hold claimed tensors, by the number of their event."""
        alive: dict[int, int] = {}
        found: dict[int, tuple[str, str]] = {}
        at = 0
        for claim in self.claims.get(device, ()):
            for number in range(at, min(claim.n_events, len(events))):
                event = events[number]
                if event.action == _ALLOC:
                    alive[event.address] = number
                elif event.action == _FREE:
                    alive.pop(event.address, None)
            at = max(at, claim.n_events)
            for path, address in zip(claim.paths, claim.addresses, strict=True):
                block = alive.get(address, -1)
                if block >= 0:
                    held, before = found.get(block, (claim.held, path))
                    found[block] = held, common_path(before, path)
        return {number: module_note(path, held) for number, (held, path) in found.items()}


def _gradient(parameter: Any) -> Any:
    return parameter.grad if isinstance(parameter, torch.Tensor) and parameter.is_leaf else None


def _tensors(state: Any) -> Iterator[Any]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping | list | tuple):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _tensors(value)


_C: Any = torch._C


def places(tensor: Any) -> Iterator[tuple[int, int]]:
    """Yield the GPU and address of the storages of a tensor, or of the tensors it consists of."""
    if not isinstance(tensor, torch.Tensor):
        return
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from places(getattr(tensor, name))
        return
    try:
        # Asking a lazily copied tensor for its address would copy it; a sparse one has none.
        if not tensor.is_cuda or tensor.layout is not torch.strided or _C._is_cow_tensor(tensor):
            return
        storage = fields().of(tensor)
        address = fields().read(storage)[0] if storage else 0
    except (RuntimeError, ValueError):
        return  # not made yet, or wrapped by a transform of torch.func
    if address:
        yield tensor.get_device(), address
