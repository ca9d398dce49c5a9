"""GPU memory in the logs of Hugging Face's Trainer, Lightning and accelerate.

    trainer.add_callback(trainer_callback(trainer, bundle="bundles/run"))
    Trainer(callbacks=[lightning_callback()])
    memory = AccelerateLog(accelerator)

They log bytes and counts through the framework's own loggers (TensorBoard, Weights & Biases, ...):
``gpu_memory/allocated_bytes``, ``peak_bytes`` (since the last log), ``reserved_bytes``,
``stranded_bytes``, ``headroom_bytes`` (what PyTorch could still allocate at the peak) and
``retries`` (flushes of the cache so far). With a ``bundle``, the training is also recorded as by
``fragdoctor.record``; after an out-of-memory error, the report is written next to the bundle and
handed to the trackers in use (see ``fragdoctor.tracking``). Without a GPU, nothing is logged, and
training goes on. ``report_failures`` is for other programs, such as Ray workers.

A framework is imported only when its function is called; this module needs none of them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Final, Self

from fragdoctor.capture.record import record
from fragdoctor.capture.watch import read_figures
from fragdoctor.errors import ConfigError
from fragdoctor.recording.history_recorder import is_about_memory
from fragdoctor.tracking import hand_over

PREFIX: Final = "gpu_memory/"
StrPath = str | os.PathLike[str]


class MemoryMeter:
    """Reads the figures of a step, and records the steps if a bundle is asked for.

    Args:
        bundle: where to record, as for ``fragdoctor.record``; None records nothing.
        trackers: returns the framework's trackers, which get the report of a failure.
    """

    def __init__(
        self,
        bundle: StrPath | None = None,
        trackers: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        self._bundle = bundle
        self._trackers = trackers
        self._recording: record | None = None
        self._open = ExitStack()
        self._is_running = False
        self._torch: Any = None

    def start(self) -> None:
        """Start recording if that is asked for, and count the peak from here."""
        self._torch = importlib.import_module("torch")
        if self._is_running or not self._torch.cuda.is_available():
            return
        self._is_running = True
        if self._bundle is not None:
            self._recording = self._open.enter_context(record(self._bundle))
        self._torch.cuda.reset_peak_memory_stats()

    def read(self) -> dict[str, float]:
        """Return the figures since the last call, or {} without a GPU."""
        if not self._is_running:
            return {}
        found = read_figures(self._torch, None)._asdict()
        self._torch.cuda.reset_peak_memory_stats()
        ends = {"retries": ""}
        # Floats, because the frameworks average what they are given.
        return {
            f"{PREFIX}{name}{ends.get(name, '_bytes')}": float(value)
            for name, value in found.items()
            if value is not None
        }

    def stop(self, error: BaseException | None = None) -> None:
        """Stop; a recording writes its bundle, and an out-of-memory failure is reported."""
        self._is_running = False
        kind = None if error is None else type(error)
        self._open.__exit__(kind, error, None if error is None else error.__traceback__)
        bundles = () if self._recording is None else self._recording.bundles
        self._recording = None
        if bundles and error is not None and is_about_memory(error):
            hand_over(bundles[-1], self._trackers())


@contextlib.contextmanager
def report_failures(bundle: StrPath, *trackers: Any) -> Iterator[None]:
    """Record a block; report an out-of-memory failure to the trackers in use.

        with report_failures("bundles/run"):
            train()

    Args:
        bundle: where to record.
        trackers: trackers in addition to the active runs of Weights & Biases, MLflow and Comet,
            such as a ``SummaryWriter``.
    """
    meter = MemoryMeter(bundle, trackers=lambda: trackers)
    meter.start()
    try:
        yield
    except BaseException as e:
        meter.stop(e)
        raise
    meter.stop()


def trainer_callback(trainer: Any = None, bundle: StrPath | None = None) -> Any:
    """Return a callback for the ``Trainer`` of transformers (and of TRL).

        trainer.add_callback(trainer_callback(trainer))

    Figures are logged in the steps in which the trainer logs. Trainers do not tell callbacks about
    exceptions, so a failure is reported when it ends the program.

    Args:
        trainer: the trainer that gets the callback; figures go to its ``log``. None logs none.
        bundle: where to record; None records nothing.

    Raises:
        ConfigError: transformers is not installed.
    """
    base = _base("transformers", "TrainerCallback")
    # Its callbacks hold the writers of trackers without active runs.
    handler = getattr(trainer, "callback_handler", None)
    meter = MemoryMeter(bundle, trackers=lambda: getattr(handler, "callbacks", ()))
    ends = ExitStack()

    class MemoryCallback(base):  # type: ignore[misc, valid-type]
        """Logs GPU memory whenever the trainer logs."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.close()
            ends.enter_context(_told_of_failures(meter))
            meter.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del args, state
            if control.should_log and trainer is not None and (figures := meter.read()):
                trainer.log(figures)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            ends.close()
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
    loggers: list[Any] = []
    meter = MemoryMeter(bundle, trackers=lambda: loggers)

    class MemoryCallback(base):  # type: ignore[misc, valid-type]
        """Logs GPU memory at the end of each batch, as often as the trainer logs."""

        def on_train_start(self, *_: Any, **__: Any) -> None:
            meter.start()

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            every = max(1, getattr(trainer, "log_every_n_steps", 1) or 1)
            if trainer.global_step % every == 0 and (figures := meter.read()):
                # Not with the module's log_dict, which makes tensors on the measured GPU.
                for logger in trainer.loggers:
                    logger.log_metrics(figures, step=trainer.global_step)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            meter.stop()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            del pl_module
            loggers[:] = trainer.loggers
            meter.stop(exception)

    return MemoryCallback()


class AccelerateLog:
    """Logs GPU memory through the trackers of an ``Accelerator``.

        with AccelerateLog(accelerator, every=10) as memory:
            for batch in loader:
                train_step(batch)
                memory.step()

    Args:
        accelerator: what to log with; give it trackers with ``log_with`` and ``init_trackers``.
        every: log every n-th step.
        bundle: where to record; None records nothing.

    Raises:
        ConfigError: ``every`` is not a number of steps.
    """

    def __init__(self, accelerator: Any, *, every: int = 1, bundle: StrPath | None = None) -> None:
        if every < 1:
            raise ConfigError(f"every is {every!r}.", hint="Give a number of steps.")
        self._accelerator = accelerator
        self._every = every
        self._meter = MemoryMeter(
            bundle, trackers=lambda: getattr(self._accelerator, "trackers", ())
        )
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


@contextlib.contextmanager
def _told_of_failures(meter: MemoryMeter) -> Iterator[None]:
    """Stop a meter with the exception that ends the program, before other hooks see it."""
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        meter.stop(error)
        before(kind, error, trace)

    sys.excepthook = tell
    try:
        yield
    finally:
        if sys.excepthook is tell:
            sys.excepthook = before


def _base(module: str, name: str, *others: str) -> Any:
    """Return a class of a framework, from the first of its modules that is installed.

    Raises:
        ConfigError: none of the modules is installed.
    """
    for candidate in (module, *others):
        try:
            return getattr(importlib.import_module(candidate), name)
        except ImportError:
            continue
    package = module.partition(".")[0]
    raise ConfigError(f"{package} is not installed.", hint=f"pip install {package}")
