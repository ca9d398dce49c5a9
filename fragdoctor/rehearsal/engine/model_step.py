"""The parts of a step of one model, for the script that :mod:`..step_script` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from fragdoctor.errors import ConfigError
from fragdoctor.rehearsal.engine import session
from fragdoctor.rehearsal.engine.own_model import OwnModel
from fragdoctor.units import format_count

DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LOSSES: Final = ("", "ce", "mean")
TOKENS_DIMENSIONS: Final = 3


class ModelStep:
    """A model on the GPU with its inputs, its loss and its optimizer.

    Args:
        own: what was built, on the CPU or on the GPU.
        batch: first dimension of the inputs; None = as they are.
        loss: ``ce``, ``mean`` or "" (what the outputs suggest).
        optimizer: a class of ``torch.optim``, used if the factory built no optimizer.
        optimizer_options: its arguments.
        dtype: what the model and its inputs are converted to, or "" (as built).
        autocast: ``bf16``, ``fp16`` or "".
        grad_accumulation: passes per step.
        inference: whether nothing is trained.
        given: names of the options that the user set, which are rejected if the factory decides.

    Attributes:
        model: the model on the GPU.
        optimizer: the optimizer of its parameters; None if nothing is or can be trained.
        scaler: scales the gradients if fp16 needs it, and otherwise changes nothing.
        train_step: the user's own step, or None.

    Raises:
        ConfigError: options that the factory decides, or names that do not exist.
    """

    def __init__(
        self,
        own: OwnModel,
        *,
        batch: int | None,
        optimizer: str,
        optimizer_options: Mapping[str, float],
        dtype: str,
        autocast: str,
        loss: str = "",
        grad_accumulation: int = 1,
        inference: bool = False,
        given: Sequence[str] = (),
    ) -> None:
        self._own, self._loss, self._autocast = own, loss, DTYPES.get(autocast)
        _refuse_ignored(own, given, inference=inference, autocast=autocast)
        self.model = own.model.to(device="cuda", dtype=DTYPES.get(dtype))
        for name, part in self.model.named_modules():  # PEFT keeps adapters of 16-bit bases in fp32
            if name.rpartition(".")[2].startswith("lora_") and hasattr(self.model, "peft_config"):
                part.float()
        self.train_step = own.train_step
        self.passes = range(grad_accumulation)
        if own.inputs is None and own.train_step is None:
            raise ConfigError(
                "The factory returns no inputs for the model.",
                hint="Return (model, inputs), such as torch.zeros(8, 1024, dtype=torch.int64).",
            )
        _place_inputs(own, batch)
        if dtype:
            own.inputs = tree_map_only(
                torch.Tensor, lambda t: t.to(DTYPES[dtype]) if t.is_floating_point() else t,
                own.inputs,
            )  # fmt: skip
        self.inputs = own.inputs
        self.model.train(not inference)
        self.optimizer = None if inference else _optimizer_of(own, optimizer, optimizer_options)
        self.scaler = torch.amp.GradScaler("cuda", enabled=autocast == "fp16" and not inference)
        self._note_parameters()

    def forward(self) -> Any:
        """Call the model once and return its outputs."""
        args, kwargs, _ = self._own.arguments()
        with self._precision():
            return self.model(*args, **kwargs)

    def loss(self) -> torch.Tensor:
        """Call the model once and return the loss, scaled if gradients are.

        Raises:
            ConfigError: there is no loss that is a single number.
        """
        args, kwargs, targets = self._own.arguments()
        with self._precision():
            outputs = self.model(*args, **kwargs)
            loss = self._loss_of(outputs, targets, args)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = f"of type {type(loss).__name__}"
            if isinstance(loss, torch.Tensor):
                found = f"a tensor of shape {tuple(loss.shape)}"
            raise ConfigError(
                f"The loss is {found}, not one number.",
                hint="Give loss_fn in the factory, or --loss ce or --loss mean.",
            )
        return self.scaler.scale(loss)

    def update(self) -> None:
        """Let the optimizer step, and free the gradients."""
        if self.optimizer is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", self._autocast) if self._autocast else nullcontext()

    def _loss_of(self, outputs: Any, targets: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        if self._own.loss_fn is not None:
            return self._own.loss_fn(outputs, *targets)
        own = _output(outputs, "loss")
        if own is not None and not self._loss:
            return own
        first = _first_tensor(outputs)
        if first.numel() == 1 and not self._loss:
            return first
        if self._loss not in LOSSES:
            raise ConfigError(
                f"There is no loss {self._loss!r}.",
                hint="Use --loss ce or --loss mean, or give loss_fn in the factory.",
            )
        kind = self._loss or _suggested_loss(first, args)
        if not self._loss:
            session.note(f"No loss was given; took {kind} of the first output (--loss).")
        if kind == "mean":
            return first.float().mean()
        if not targets:
            targets = (torch.zeros(first.shape[:-1], dtype=torch.int64, device="cuda"),)
        logits, labels = first.reshape(-1, first.shape[-1]), targets[0].reshape(-1)
        return torch.nn.functional.cross_entropy(logits, labels)

    def _note_parameters(self) -> None:
        parameters = list(self.model.parameters())
        n = sum(p.numel() for p in parameters)
        n_trained = sum(p.numel() for p in parameters if p.requires_grad)
        said = f"{type(self.model).__name__} has {format_count(n)} parameters"
        if self.optimizer is not None and n_trained < n:
            said += f", {format_count(n_trained)} of them trained"
        session.note(f"{said}.")


def _place_inputs(own: OwnModel, batch: int | None) -> None:
    """Move inputs and targets to the GPU, replacing the first dimension if a batch is given."""
    given = [t for t in tree_leaves((own.inputs,)) if isinstance(t, torch.Tensor)]
    before = given[0].shape[0] if given and given[0].dim() else None

    def place(value: torch.Tensor) -> torch.Tensor:
        if batch is not None and value.dim() and value.shape[0] == before:
            return value.new_zeros((batch, *value.shape[1:]), device="cuda")
        return value.to("cuda")

    own.inputs, own.targets = tree_map_only(torch.Tensor, place, (own.inputs, own.targets))
    for tensor in tree_leaves((own.inputs, own.targets)):  # placeholder data has no known values
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            session.current().known.forget(tensor)


def _optimizer_of(
    own: OwnModel, name: str, options: Mapping[str, float]
) -> torch.optim.Optimizer | None:
    given = own.optimizer
    trained = [p for p in own.model.parameters() if p.requires_grad]
    if isinstance(given, torch.optim.Optimizer):
        return given
    if callable(given):
        own_optimizer: torch.optim.Optimizer = given(trained)
        return own_optimizer
    if not trained:
        return None
    made: torch.optim.Optimizer = getattr(torch.optim, name)(trained, lr=1e-3, **options)
    return made


def _refuse_ignored(own: OwnModel, given: Sequence[str], *, inference: bool, autocast: str) -> None:
    """Reject options from the command line that the factory's own parts would override."""
    has_step = own.train_step is not None and not inference
    decided = {
        "optimizer": ("optimizer", own.optimizer is not None and not inference),
        "loss": ("loss", own.loss_fn is not None or has_step),
        "grad_accumulation": ("train_step", has_step),
        "dtype": ("train_step, where autocast belongs", has_step and bool(autocast)),
    }
    for name, (what, is_decided) in decided.items():
        if is_decided and name in given:
            raise ConfigError(
                f"--{name.replace('_', '-')} cannot be used if the factory returns its own {what}.",
                hint="Leave out the option, or that part of the factory.",
            )


def _output(outputs: object, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, dict) else getattr(outputs, name, None)


def _first_tensor(outputs: object) -> torch.Tensor:
    logits = _output(outputs, "logits")
    for leaf in tree_leaves(outputs if logits is None else logits):
        if isinstance(leaf, torch.Tensor):
            return leaf
    raise ConfigError(
        "The model returns no tensor to compute a loss from.",
        hint="Give loss_fn or train_step in the factory.",
    )


def _suggested_loss(output: torch.Tensor, args: tuple[Any, ...]) -> str:
    """Return "ce" for token ids in and one vector per token out (a language model), else "mean"."""
    tokens = bool(args) and isinstance(args[0], torch.Tensor) and not args[0].is_floating_point()
    return "ce" if tokens and output.dim() == TOKENS_DIMENSIONS else "mean"
