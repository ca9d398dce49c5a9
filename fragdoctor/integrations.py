"""GPU memory in the logs of Hugging Face's Trainer, Lightning and accelerate.

    trainer.add_callback(trainer_callback(trainer, bundle="bundles/run"))
    Trainer(callbacks=[lightning_callback()])
    memory = AccelerateLog(accelerator)

What they log goes through the framework's own loggers (TensorBoard, Weights & Biases, ...), as
bytes and counts: ``gpu_memory/allocated_bytes``, ``peak_bytes`` (since what was logged before),
``reserved_bytes``, ``stranded_bytes``, ``headroom_bytes`` (what PyTorch could still allocate at the
peak) and ``retries`` (flushes of the cache so far). With a ``bundle`` the training is recorded too,
as ``fragdoctor.record`` does. Without a GPU nothing is logged, and training goes on.

A framework is imported when its function is called; this module needs none of them.
"""

from __future__ import annotations

import importlib
import os
from contextlib import ExitStack
from typing import Any, Final, Self

from fragdoctor.capture.record import record
from fragdoctor.capture.watch import read_figures
from fragdoctor.errors import ConfigError

PREFIX: Final = "gpu_memory/"
StrPath = str | os.PathLike[str]


class MemoryMeter:
    """Reads the figures of a step, and records around steps where a bundle is asked for.

    Args:
        bundle: where to record, as ``fragdoctor.record`` takes it; None records nothing.
        device: number of the GPU; None is the current one.
    """

    def __init__(self, bundle: StrPath | None = None, device: int | None = None) -> None:
        self._bundle = bundle
        self._device = device
        self._open = ExitStack()
        self._is_running = False
        self._torch: Any = None

    def start(self) -> None:
        """Begin: record if that is asked for, and count the peak from here."""
        self._torch = importlib.import_module("torch")
        if self._is_running or not self._torch.cuda.is_available():
            return
        self._is_running = True
        if self._bundle is not None:
            self._open.enter_context(record(self._bundle))
        self._torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> dict[str, float]:
        """Return the figures since they were read last; {} without a GPU."""
        if not self._is_running:
            return {}
        found = read_figures(self._torch, self._device)
        self._torch.cuda.reset_peak_memory_stats(self._device)
        figures = {
            "allocated_bytes": found.allocated,
            "peak_bytes": found.peak,
            "reserved_bytes": found.reserved,
            "stranded_bytes": found.stranded,
            "headroom_bytes": found.headroom,
            "retries": found.retries,
        }
        # Floats: the frameworks average what they are given.
        return {f"{PREFIX}{k}": float(v) for k, v in figures.items() if v is not None}

    def stop(self, error: BaseException | None = None) -> None:
        """End; a recording writes its bundle, that of a failure if there was one."""
        self._is_running = False
        kind = None if error is None else type(error)
        self._open.__exit__(kind, error, None if error is None else error.__traceback__)


def trainer_callback(trainer: Any, bundle: StrPath | None = None) -> Any:
    """Return a callback for the ``Trainer`` of transformers (and of TRL).

        trainer.add_callback(trainer_callback(trainer))

    Figures are logged in the steps in which the trainer logs.

    Args:
        trainer: the trainer that it is added to; its ``log`` is used.
        bundle: where to record; None records nothing.

    Raises:
        ConfigError: transformers is not installed.
    """
    base = _base("transformers", "TrainerCallback")
    meter = MemoryMeter(bundle)

    class MemoryCallback(base):  # type: ignore[misc, valid-type]
        """Logs GPU memory where the trainer logs."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            meter.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del args, state
            if control.should_log and (figures := meter.read()):
                trainer.log(figures)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            meter.stop()

    return MemoryCallback()


def lightning_callback(bundle: StrPath | None = None) -> Any:
    """Return a callback for the ``Trainer`` of Lightning.

        Trainer(callbacks=[lightning_callback()])

    Args:
        bundle: where to record; None records nothing.

    Raises:
        ConfigError: neither lightning nor pytorch_lightning is installed.
    """
    base = _base("lightning.pytorch", "Callback", "pytorch_lightning")
    meter = MemoryMeter(bundle)

    class MemoryCallback(base):  # type: ignore[misc, valid-type]
        """Logs GPU memory at the end of each batch, as often as the trainer logs."""

        def on_train_start(self, *_: Any, **__: Any) -> None:
            meter.start()

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            every = max(1, getattr(trainer, "log_every_n_steps", 1) or 1)
            if trainer.global_step % every == 0 and (figures := meter.read()):
                # Not by log_dict of the module: it makes tensors on the GPU that is measured.
                for logger in trainer.loggers:
                    logger.log_metrics(figures, step=trainer.global_step)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            meter.stop()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            del trainer, pl_module
            meter.stop(exception)

    return MemoryCallback()


class AccelerateLog:
    """Logs GPU memory through the trackers of an ``Accelerator``.

        with AccelerateLog(accelerator, every=10) as memory:
            for batch in loader:
                train_step(batch)
                memory.step()

    Args:
        accelerator: its ``log`` is used; give it trackers with ``log_with`` and ``init_trackers``.
        every: log every n-th step.
        bundle: where to record; None records nothing.

    Raises:
        ConfigError: ``every`` is no number of steps.
    """

    def __init__(self, accelerator: Any, *, every: int = 1, bundle: StrPath | None = None) -> None:
        if every < 1:
            raise ConfigError(f"every is {every!r}.", hint="Give a number of steps.")
        self._accelerator = accelerator
        self._every = every
        self._meter = MemoryMeter(bundle)
        self._n_steps = 0

    def __enter__(self) -> Self:
        self._meter.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._meter.stop(error)

    def step(self) -> None:
        """End a step."""
        self._n_steps += 1
        if self._n_steps % self._every == 0 and (figures := self._meter.read()):
            self._accelerator.log(figures, step=self._n_steps)


def _base(module: str, name: str, *others: str) -> Any:
    """Return a class of a framework, from the first of its modules that is installed.

    Raises:
        ConfigError: none is.
    """
    for candidate in (module, *others):
        try:
            return getattr(importlib.import_module(candidate), name)
        except ImportError:
            continue
    package = module.partition(".")[0]
    raise ConfigError(f"{package} is not installed.", hint=f"pip install {package}")
