"""Training steps of the user's model on fake tensors, phase by phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

from fragdoctor.errors import ConfigError
from fragdoctor.rehearsal.engine import allocation, session
from fragdoctor.rehearsal.tracing.factory import Program, arguments_of
from fragdoctor.rehearsal.tracing.step_recorder import Recorder
from fragdoctor.rehearsal.tracing.training_setup import TrainingSetup

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
OPTIMIZER_STEP: Final = "optimizer_step"
INFERENCE: Final = "inference"
BUILD: Final = "build"
OPTIMIZERS: Final = {
    "adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "sgd-momentum": "SGD", "rmsprop": "RMSprop",
    "adagrad": "Adagrad", "adamax": "Adamax", "nadam": "NAdam", "radam": "RAdam",
    "adadelta": "Adadelta", "adafactor": "Adafactor",
}  # fmt: skip
DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LOSSES: Final = ("", "ce", "mean")
TOKENS_DIMENSIONS: Final = 3


@dataclass(slots=True)
class Trainer:
    """Runs a program and tells the recorder what is what.

    Attributes:
        notes: what was assumed, one sentence each.
        batch: first dimension of the first input; 0 = it has none.
    """

    program: Program
    setup: TrainingSetup
    recorder: Recorder
    notes: list[str] = field(default_factory=list)
    batch: int = 0
    _optimizer: torch.optim.Optimizer | None = None
    _scaler: Any = None

    @property
    def optimizer_name(self) -> str:
        """The class of the optimizer, in lower case; "" = none."""
        return "" if self._optimizer is None else type(self._optimizer).__name__.lower()

    def run(self) -> None:
        """Move everything to the fake GPU and run the steps."""
        _refuse_ignored(self.program, self.setup)
        self._prepare_model()
        self._prepare_inputs()
        if self.setup.inference:
            self._infer()
            return
        self.program.model.train()
        self._prepare_optimizer()
        for _ in range(self.setup.steps):
            if self.program.train_step is not None:
                self._own_step()
            else:
                self._step()

    def _prepare_model(self) -> None:
        model = self.program.model
        dtype = DTYPES.get(self.setup.dtype)
        model.to(device="cuda", dtype=dtype)
        self._label(model.parameters(), "parameters")
        self._label(model.buffers(), "buffers")

    def _prepare_inputs(self) -> None:
        if self.program.inputs is None and self.setup.input_shape:
            dtype = getattr(torch, self.setup.input_dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise ConfigError(
                    f"There is no dtype {self.setup.input_dtype!r} in torch.",
                    hint="Use float32, bfloat16, float16, int64, ...",
                )
            self.program.inputs = torch.zeros(self.setup.input_shape, dtype=dtype, device="cuda")
        if self.program.inputs is None and self.program.train_step is None:
            raise ConfigError(
                "The factory gives no inputs for the model.",
                hint="Return (model, inputs), or say --input-shape 8,1024 --input-dtype int64.",
            )
        given = [t for t in tree_leaves((self.program.inputs,)) if isinstance(t, torch.Tensor)]
        before = given[0].shape[0] if given and given[0].dim() else None
        target = self.setup.batch
        self.batch = target if target is not None and before else before or 0

        def place(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            if target is not None and value.dim() and value.shape[0] == before:
                return value.new_zeros((target, *value.shape[1:]), device="cuda")
            return value.to("cuda")

        self.program.inputs = tree_map(place, self.program.inputs)
        self.program.targets = tree_map(place, self.program.targets)
        placed = tree_leaves((self.program.inputs, self.program.targets))
        self._label(placed, "inputs")
        for tensor in placed:  # zeros or whatever stands for data: no value of theirs counts
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                session.current().known.forget(tensor)

    def _prepare_optimizer(self) -> None:
        given = self.program.optimizer
        trained = [p for p in self.program.model.parameters() if p.requires_grad]
        if isinstance(given, torch.optim.Optimizer):
            self._optimizer = given
        elif callable(given):
            self._optimizer = given(trained)
        elif trained:
            self._optimizer = _optimizer(self.setup.optimizer, trained)
        if self.setup.autocast == "fp16":
            self._scaler = torch.amp.GradScaler("cuda")

    def _infer(self) -> None:
        self.program.model.eval()
        self.recorder.mark(INFERENCE)
        args, kwargs, _ = arguments_of(self.program)
        with torch.no_grad(), self._autocast():
            self.program.model(*args, **kwargs)

    def _own_step(self) -> None:
        """The user's own step: backward and optimizer are told apart by the calls they make."""
        self.recorder.mark(FORWARD)
        with self._watch_calls():
            step = self.program.train_step
            if step is not None:
                step(self.program.model, self._optimizer, self.program.inputs)

    def _step(self) -> None:
        for _ in range(self.setup.grad_accumulation):
            self.recorder.mark(FORWARD)
            loss = self._loss()
            if self._scaler is not None:
                loss = self._scaler.scale(loss)
            with self._backward():
                loss.backward()
            del loss
        self.recorder.mark(OPTIMIZER_STEP)
        if self._optimizer is not None:
            if self._scaler is not None:
                self._scaler.step(self._optimizer)
                self._scaler.update()
            else:
                self._optimizer.step()
            self._label_states()
            self._optimizer.zero_grad(set_to_none=True)

    def _loss(self) -> torch.Tensor:
        args, kwargs, targets = arguments_of(self.program)
        with self._autocast():
            outputs = self.program.model(*args, **kwargs)
            loss = self._loss_of(outputs, targets, args)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError(
                f"The loss is {_described(loss)}, not one number.",
                hint="Give loss_fn in the factory, or --loss ce or --loss mean.",
            )
        return loss

    def _loss_of(self, outputs: Any, targets: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        if self.program.loss_fn is not None:
            return self.program.loss_fn(outputs, *targets)
        own = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
        if own is not None and not self.setup.loss:
            return own
        first = _first_tensor(outputs)
        if first.numel() == 1 and not self.setup.loss:
            return first
        if self.setup.loss not in LOSSES:
            raise ConfigError(
                f"There is no loss {self.setup.loss!r}.",
                hint="Use --loss ce or --loss mean, or give loss_fn in the factory.",
            )
        kind = self.setup.loss or _suggested_loss(first, args)
        if not self.setup.loss:
            self._assume(f"No loss was given; took {kind} of the first output (--loss).")
        if kind == "mean":
            return first.float().mean()
        labels = (
            targets[0]
            if targets
            else torch.zeros(first.shape[:-1], dtype=torch.int64, device="cuda")
        )
        return torch.nn.functional.cross_entropy(
            first.reshape(-1, first.shape[-1]), labels.reshape(-1)
        )

    def _assume(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = DTYPES.get(self.setup.autocast)
        return nullcontext() if dtype is None else torch.autocast("cuda", dtype=dtype)

    @contextmanager
    def _backward(self) -> Iterator[None]:
        self.recorder.mark(BACKWARD)
        try:
            yield
        finally:
            gradients = (p.grad for p in self.program.model.parameters())
            self._label((g for g in gradients if g is not None), "gradients")

    @contextmanager
    def _watch_calls(self) -> Iterator[None]:
        from unittest import mock

        run_backward, trainer = torch.autograd.backward, self

        def backward(*args: Any, **kwargs: Any) -> None:
            if allocation.in_backward():
                return run_backward(*args, **kwargs)
            with trainer._backward():
                run_backward(*args, **kwargs)
            trainer.recorder.mark(FORWARD)
            return None

        def before(*_: object) -> None:
            trainer.recorder.mark(OPTIMIZER_STEP)

        def after(*_: object) -> None:
            trainer._label_states()

        hooks = []
        if self._optimizer is not None:
            hooks = [
                self._optimizer.register_step_pre_hook(before),
                self._optimizer.register_step_post_hook(after),
            ]
        try:
            with mock.patch.object(torch.autograd, "backward", backward):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _label_states(self) -> None:
        if self._optimizer is not None:
            self._label(tree_leaves(list(self._optimizer.state.values())), "optimizer_state")

    def _label(self, tensors: Iterable[Any], label: str) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self.recorder.label(tensor, label)


def _refuse_ignored(program: Program, setup: TrainingSetup) -> None:
    """Refuse options on the command line that the factory's own parts would override."""
    has_step = program.train_step is not None and not setup.inference
    decided = {
        "input_shape": ("inputs", program.inputs is not None),
        "optimizer": ("optimizer", program.optimizer is not None and not setup.inference),
        "loss": ("loss", program.loss_fn is not None or has_step),
        "grad_accumulation": ("train_step", has_step),
        "dtype": ("train_step, where autocast belongs", has_step and bool(setup.autocast)),
    }
    for name, (what, is_decided) in decided.items():
        if is_decided and name in setup.given:
            raise ConfigError(
                f"--{name.replace('_', '-')} does not go with a factory that gives its own {what}.",
                hint="Leave the option out, or that part of the factory.",
            )


def _optimizer(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, OPTIMIZERS.get(name, ""), None)
    if kind is None:
        raise ConfigError(
            f"Optimizer {name!r} cannot be traced: it is not one of torch.optim.",
            hint=f"Use one of {', '.join(OPTIMIZERS)}, or let the factory return its own.",
        )
    options = {"momentum": 0.9} if name == "sgd-momentum" else {}
    made: torch.optim.Optimizer = kind(parameters, lr=1e-3, **options)
    return made


def _first_tensor(outputs: object) -> torch.Tensor:
    logits = (
        outputs.get("logits") if isinstance(outputs, dict) else getattr(outputs, "logits", None)
    )
    for leaf in tree_leaves(outputs if logits is None else logits):
        if isinstance(leaf, torch.Tensor):
            return leaf
    raise ConfigError(
        "The model returns no tensor to make a loss of.",
        hint="Give loss_fn or train_step in the factory.",
    )


def _suggested_loss(output: torch.Tensor, args: tuple[Any, ...]) -> str:
    """Token ids in and a vector for each out: a language model."""
    tokens = bool(args) and isinstance(args[0], torch.Tensor) and not args[0].is_floating_point()
    return "ce" if tokens and output.dim() == TOKENS_DIMENSIONS else "mean"


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"of type {type(value).__name__}"
