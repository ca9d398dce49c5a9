"""What a program does at a high level: model calls, backward passes, new optimizers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch._guards import TracingContext
from torch.utils._pytree import tree_leaves

from fragdoctor.recording.module_names import ByIdentity
from fragdoctor.rehearsal.engine import put, seen_through, wrap
from fragdoctor.rehearsal.engine.marks import in_backward

Around = Callable[[Any, Any], AbstractContextManager[Any] | None]


def is_traced() -> bool:
    """Return whether a compiler is tracing the current call, so that nothing in it really runs.

    Before PyTorch 2.13 ``torch.compiler.is_compiling`` does not report this for AOTAutograd.
    """
    return TracingContext.try_get() is not None


def around_models(around: Around, after: Callable[[Any, Any], None] | None = None) -> None:
    """Enter a context around each outermost call of a module with parameters.

    ``around`` is called before each call with the module (the original of a compiled one) and its
    arguments; None leaves the call as it is. ``after`` is called with the module and what it
    returned.
    """

    def called(call: Any, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        is_wrapper = "_orig_mod" in module._modules  # what torch.compile returns
        model = module._orig_mod if is_wrapper else module
        with around(model, (args, kwargs)) or nullcontext():
            result = call(module, *args, **kwargs)
        if after is not None:
            after(model, result)
        return result

    put_model_call(called)


def put_model_call(called: Callable[..., Any]) -> None:
    """Wrap outermost calls of modules with parameters, like ``put_call``.

    Losses and transforms have none and are not models.
    """
    calling = threading.local()  # whether a model is being called in this thread

    def outermost(call: Any, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Modules called during a backward pass recompute an earlier call.
        is_inside = getattr(calling, "model", False) or in_backward()
        if is_inside or next(module.parameters(), None) is None:
            return call(module, *args, **kwargs)
        calling.model = True
        try:
            return called(call, module, *args, **kwargs)
        finally:
            calling.model = False

    put_call(outermost)


def put_call(called: Callable[..., Any]) -> None:
    """Wrap calls of modules in a function that receives the original call and its arguments.

    It is left out while a compiler traces, so that what is compiled together stays together.
    """
    call: Any = torch.nn.Module.__call__

    @seen_through
    @wraps(call)
    def follow(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(module, *args, **kwargs)
        return called(call, module, *args, **kwargs)

    put(torch.nn.Module, "__call__", follow)


def parameters_of(optimizer: Any) -> set[int]:
    """Return the IDs of what an optimizer updates."""
    return {id(one) for group in optimizer.param_groups for one in group["params"]}


class Training:
    """Tells which calls of models are a part of training.

    In training mode all are that record a graph. Others are those of a model that an optimizer
    updates but that has never been called in that mode, as Transformers loads models in the other
    one; and those that are given what needs gradients, such as an image that is optimized.

    Attributes:
        updated: IDs of what the program's optimizers update.
    """

    def __init__(self) -> None:
        self.updated: set[int] = set()
        self._was_in_mode = ByIdentity()
        after_making(lambda one: self.updated.update(parameters_of(one)))

    def includes(self, model: Any, given: Any) -> bool:
        """Return whether a call that begins now, of a model with its arguments, is a part of it."""
        if model.training:
            self._was_in_mode[model] = True
        if not torch.is_grad_enabled() or model.training:
            return torch.is_grad_enabled()
        is_in_its_mode = self.updates(model) and not self._was_in_mode.get(model)
        return is_in_its_mode or any(
            torch.is_tensor(one) and one.requires_grad for one in tree_leaves(given)
        )

    def updates(self, model: Any) -> bool:
        """Return whether an optimizer updates any parameter of a model."""
        return not self.updated.isdisjoint(map(id, model.parameters()))


def at_first_call(act: Callable[[Any], None], *, trains: bool = False) -> None:
    """Call ``act`` with each model before its first call, with ``trains`` its first in training."""
    seen, training = ByIdentity(), Training() if trains else None

    def around(model: Any, given: Any) -> None:
        if not seen.get(model) and (training is None or training.includes(model, given)):
            seen[model] = True
            act(model)

    around_models(around)


class _Engine:
    """The autograd engine with a different ``run_backward``."""

    def __init__(self, engine: Any, run_backward: Callable[..., Any]) -> None:
        self._engine = engine
        self.run_backward = run_backward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def around_backward(call: Callable[..., Any]) -> None:
    """Put ``call`` around the engine's ``run_backward``, which it is given first."""
    engine = torch.autograd.Variable._execution_engine
    made = _Engine(engine, partial(call, engine.run_backward))
    put(torch.autograd.Variable, "_execution_engine", made)


def is_of_loss(
    _roots: Any,
    _gradients: Any,
    _keeps: Any,
    creates: bool,
    *_: Any,
    accumulate_grad: bool = True,
    **__: Any,
) -> bool:
    """Return whether a pass with these arguments of the engine's is a part of computing a loss.

    ``autograd.grad`` returns gradients to the program. With ``create_graph`` a loss is made of
    them: a gradient penalty, or what is left of a differential equation.
    """
    return creates and not accumulate_grad


def before_backward(act: Callable[..., None]) -> None:
    """Call ``act`` before each backward pass with the engine's arguments, the losses first.

    Passes that are a part of computing a loss are none.
    """

    def acting(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not (is_traced() or is_of_loss(*args, **kwargs)):
            act(*args, **kwargs)
        return run(*args, **kwargs)

    around_backward(acting)


def after_making(act: Callable[[Any], None]) -> None:
    """Call ``act`` with each optimizer that the program creates, but none created by ``act``."""
    is_acting = False

    def made(make: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal is_acting
        make(self, *args, **kwargs)
        if is_acting:
            return
        is_acting = True
        try:
            act(self)
        finally:
            is_acting = False

    wrap(torch.optim.Optimizer, "__init__", made)
