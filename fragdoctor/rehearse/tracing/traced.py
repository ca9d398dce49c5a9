"""The ``--model`` route: run the user's model on fake tensors and return its footprint."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from fragdoctor.errors import ConfigError
from fragdoctor.frozen import frozen
from fragdoctor.model.estimate import Footprint, GpuModel
from fragdoctor.rehearse.machines import kernels_of
from fragdoctor.rehearse.process import native_library
from fragdoctor.rehearse.tracing.footprint import RequestLog, Served, footprint_of, serve, shown
from fragdoctor.rehearse.tracing.training_setup import TrainingSetup
from fragdoctor.units import GIB

if TYPE_CHECKING:
    from fragdoctor.rehearse.engine.session import Session

HOST: Final = 1  # a fake GPU that stands for the host's memory while the factory builds


@frozen
class Traced:
    """A traced run.

    Attributes:
        footprint: peaks, shares, reserved memory.
        log: the requests, to be served under a capacity or other settings.
        batch: first dimension of the first input; 0 = it has none.
        n_steps: training steps traced.
        optimizer: the name of the optimizer's class, lower case; "" = none.
    """

    footprint: Footprint
    log: RequestLog
    batch: int = 0
    n_steps: int = 1
    optimizer: str = ""

    def served(self, capacity_bytes: int, conf: str = "") -> Served:
        """Serve the requests on a GPU of this capacity under these allocator settings."""
        return serve(self.log, capacity_bytes=capacity_bytes, conf=conf)


def trace(spec: str, setup: TrainingSetup | None = None, gpu: GpuModel | None = None) -> Traced:
    """Trace ``pkg.module:factory``: the user's own code is imported and run, without a GPU.

    Args:
        spec: ``pkg.module:factory``.
        setup: how to train; None = the defaults.
        gpu: whose kernels and workspaces are assumed; None = Hopper.

    Raises:
        ConfigError: torch is missing or unfit, the factory does not keep its contract, or the
            user's code fails.
    """
    _import_torch()
    from fragdoctor.rehearse.tracing.factory import find_factory, told_in_one_sentence

    with told_in_one_sentence(spec):
        factory = find_factory(spec)
    return trace_factory(factory, setup, gpu, name=spec)


def trace_factory(
    factory: Callable[[], Any],
    setup: TrainingSetup | None = None,
    gpu: GpuModel | None = None,
    *,
    name: str = "the factory",
) -> Traced:
    """Trace what a factory builds; as :func:`trace`."""
    _import_torch()
    from fragdoctor.rehearse.engine.prepare import Machine, prepare
    from fragdoctor.rehearse.engine.session import GpuFacts
    from fragdoctor.rehearse.tracing.factory import told_in_one_sentence

    capability, n_multiprocessors = kernels_of(gpu)
    machine = Machine(
        native=native_library(),
        n_hidden=1,
        total_bytes=gpu.total_bytes if gpu else 80 * GIB,
        facts=GpuFacts(gpu.title if gpu else "GPU", capability, n_multiprocessors),
    )
    with (
        mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "0"}),
        warnings.catch_warnings(),
        ExitStack() as undo,
        told_in_one_sentence(name),
    ):
        now = prepare(machine, undo)
        now.start_all()
        # PyTorch warns about tensors on the GPU in places that were never meant for these.
        warnings.simplefilter("ignore")
        return _run(factory, setup or TrainingSetup(), now)


def _run(factory: Callable[[], Any], setup: TrainingSetup, now: Session) -> Traced:
    import torch

    from fragdoctor.rehearse.tracing.factory import as_program
    from fragdoctor.rehearse.tracing.recorder import Recorder
    from fragdoctor.rehearse.tracing.trainer import BUILD, Trainer

    recorder = Recorder(now)
    with recorder:
        recorder.mark(BUILD)
        # What is built on the CPU takes no memory there either: it may be larger than this machine.
        with torch.device("cuda", HOST):
            program = as_program(factory())
        trainer = Trainer(program, setup, recorder)
        trainer.run()
        recorder.mark("end")
    log = recorder.request_log()
    parameters = list(program.model.parameters())
    assumed = [
        f"Assumed of {made.operation} at {shown(made.filename)}:{made.line}: {made.assumed}."
        for made in now.assumptions.made
        if made.operation not in {"item", "copy"}
    ]
    footprint = footprint_of(
        log,
        n_parameters=sum(p.numel() for p in parameters),
        n_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        notes=[*trainer.notes, *recorder.warnings, *assumed],
    )
    return Traced(footprint, log, trainer.batch, trainer.setup.steps, trainer.optimizer_name)


def _import_torch() -> None:
    try:
        import torch  # noqa: F401 - only whether it is there
    except ImportError as err:
        raise ConfigError(
            "--model runs your model on fake tensors and needs PyTorch.",
            hint="Install it in this environment: pip install 'fragdoctor[torch]'",
        ) from err
