"""The parts of a step of one model, for the script that :mod:`..step_script` writes.

The model is that of the user's ``pkg.module:factory``, or one of :mod:`.library_model`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from fragdoctor.errors import ConfigError
from fragdoctor.rehearsal.engine import session
from fragdoctor.units import format_count

DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOKENS_DIMENSIONS: Final = 3
_REHEARSE: Final = "Return the loss from the model, or rehearse the program: fragdoctor rehearse."
CONTRACT: Final = (
    "Return (module, inputs): a tensor such as torch.zeros(8, 1024, dtype=torch.int64), a tuple of "
    "arguments or a dict of them."
)


def own_model(spec: str) -> tuple[torch.nn.Module, Any]:
    """Import what ``pkg.module:factory`` names, call it, and return its model and inputs.

    Raises:
        ConfigError: the name cannot be found, or does not satisfy :data:`CONTRACT`.
    """
    module, _, name = spec.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as err:
        if err.name is None or not f"{module}.".startswith(f"{err.name}."):
            raise
        raise ConfigError(
            f"There is no module {module!r} here ({Path.cwd()}) or among the installed ones.",
            hint="Run from the directory from which your program runs.",
        ) from err
    factory = reduce(lambda owner, part: getattr(owner, part, None), name.split("."), found)
    if not callable(factory):
        raise ConfigError(f"Module {module!r} has no function {name!r}.", hint=CONTRACT)
    built = factory()
    model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"The factory returned {type(built).__name__}, which contains no model.", hint=CONTRACT
        )
    if inputs is None:
        raise ConfigError("The factory returns no inputs for the model.", hint=CONTRACT)
    return model, inputs


class ModelStep:
    """A model on the GPU with its inputs, its loss and its optimizer.

    Args:
        model: what was built, on the CPU or on the GPU.
        inputs: a tensor, a tuple of arguments, or a dict of keyword arguments.
        batch: first dimension of the inputs; None = as they are.
        optimizer: a class of ``torch.optim``.
        optimizer_options: its arguments.
        dtype: what the model and its inputs are converted to, or "" (as built).
        autocast: ``bf16``, ``fp16`` or "".
        grad_accumulation: passes per step.
        inference: whether nothing is trained.

    Attributes:
        model: the model on the GPU.
        passes: the passes of a step.
        optimizer: the optimizer of its parameters; None if nothing is or can be trained.
        scaler: scales the gradients if fp16 needs it, and otherwise changes nothing.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inputs: Any,
        *,
        batch: int | None,
        optimizer: str,
        optimizer_options: Mapping[str, float],
        dtype: str,
        autocast: str,
        grad_accumulation: int = 1,
        inference: bool = False,
    ) -> None:
        self._autocast = DTYPES.get(autocast)
        self.model = model.to(device="cuda", dtype=DTYPES.get(dtype))
        for name, part in self.model.named_modules():  # PEFT keeps adapters of 16-bit bases in fp32
            if name.rpartition(".")[2].startswith("lora_") and hasattr(self.model, "peft_config"):
                part.float()
        self.passes = range(grad_accumulation)
        inputs = _on_gpu(inputs, batch)
        if dtype:
            inputs = tree_map_only(
                torch.Tensor, lambda t: t.to(DTYPES[dtype]) if t.is_floating_point() else t, inputs
            )
        is_named = isinstance(inputs, Mapping)
        self._kwargs: Mapping[str, Any] = inputs if is_named else {}
        self._args = () if is_named else inputs if isinstance(inputs, tuple | list) else (inputs,)
        self.model.train(not inference)
        trained = [] if inference else [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer: torch.optim.Optimizer | None = None
        if trained:
            kind = getattr(torch.optim, optimizer)
            self.optimizer = kind(trained, lr=1e-3, **optimizer_options)
        self.scaler = torch.amp.GradScaler("cuda", enabled=autocast == "fp16" and not inference)
        parameters = list(self.model.parameters())
        n = sum(p.numel() for p in parameters)
        n_trained = sum(p.numel() for p in parameters if p.requires_grad)
        said = f"{type(self.model).__name__} has {format_count(n)} parameters"
        if self.optimizer is not None and n_trained < n:
            said += f", {format_count(n_trained)} of them trained"
        session.note(f"{said}.")

    def forward(self) -> Any:
        """Call the model once and return its outputs."""
        with self._precision():
            return self.model(*self._args, **self._kwargs)

    def loss(self) -> torch.Tensor:
        """Call the model once and return the loss, scaled if gradients are.

        Raises:
            ConfigError: there is no loss that is a single number.
        """
        with self._precision():
            loss = self._loss_of(self.model(*self._args, **self._kwargs))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = f"of type {type(loss).__name__}"
            if isinstance(loss, torch.Tensor):
                found = f"a tensor of shape {tuple(loss.shape)}"
            raise ConfigError(f"The loss is {found}, not one number.", hint=_REHEARSE)
        return self.scaler.scale(loss)

    def update(self) -> None:
        """Let the optimizer step, and free the gradients."""
        if self.optimizer is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", self._autocast) if self._autocast else nullcontext()

    def _loss_of(self, outputs: Any) -> Any:
        """Return the model's own loss, or the one that its outputs suggest."""
        own = _output(outputs, "loss")
        if own is not None:
            return own
        first = _first_tensor(outputs)
        if first.numel() == 1:
            return first
        x = self._args[0] if self._args else None
        of_tokens = isinstance(x, torch.Tensor) and not x.is_floating_point()
        if of_tokens and first.dim() == TOKENS_DIMENSIONS:  # token IDs in, a vector for each out
            session.note("No loss was given; took cross-entropy of the first output.")
            targets = torch.zeros(first.shape[:-1], dtype=torch.int64, device="cuda")
            logits = first.reshape(-1, first.shape[-1])
            return torch.nn.functional.cross_entropy(logits, targets.reshape(-1))
        session.note("No loss was given; took the mean of the first output.")
        return first.float().mean()


def _on_gpu(inputs: Any, batch: int | None) -> Any:
    """Return inputs on the GPU, with another first dimension if a batch is given."""
    given = [t for t in tree_leaves((inputs,)) if isinstance(t, torch.Tensor)]
    before = given[0].shape[0] if given and given[0].dim() else None

    def place(value: torch.Tensor) -> torch.Tensor:
        if batch is not None and value.dim() and value.shape[0] == before:
            return value.new_zeros((batch, *value.shape[1:]), device="cuda")
        return value.to("cuda")

    placed = tree_map_only(torch.Tensor, place, inputs)
    for tensor in tree_leaves((placed,)):  # placeholder data has no known values
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            session.current().known.forget(tensor)
    return placed


def _output(outputs: object, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, dict) else getattr(outputs, name, None)


def _first_tensor(outputs: object) -> torch.Tensor:
    logits = _output(outputs, "logits")
    for leaf in tree_leaves(outputs if logits is None else logits):
        if isinstance(leaf, torch.Tensor):
            return leaf
    raise ConfigError(
        "The model returns no tensor to compute a loss from.",
        hint=_REHEARSE,
    )
