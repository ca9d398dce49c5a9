"""The ``--model`` route: run the user's model on fake tensors and return its footprint."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.tracing.footprint import Rehearsal, footprint_of, rehearse
from fragdoctor.estimation.tracing.plan import Plan
from fragdoctor.estimation.tracing.request_log import RequestLog
from fragdoctor.model.estimate import Footprint, GpuModel
from fragdoctor.units import GIB, MIB

CAPABILITIES: Final = {
    "volta": (7, 0), "turing": (7, 5), "ampere": (8, 0), "ada": (8, 9), "hopper": (9, 0),
    "blackwell": (10, 0),
}  # fmt: skip
HOPPER: Final = (9, 0)
# getChosenWorkspaceSize in PyTorch's CublasHandlePool: 4096 x 8 KiB from Hopper on, else
# two of 4 MiB and eight of 16 KiB; one for each thread's handle.
LARGE_WORKSPACE: Final = 32 * MIB
SMALL_WORKSPACE: Final = 2 * 4096 * 1024 + 8 * 16 * 1024


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced run.

    Attributes:
        footprint: peaks, shares, reserved memory.
        log: the requests, to be rehearsed under a capacity or other settings.
        batch: first dimension of the first input; 0 = it has none.
        n_steps: training steps traced.
        optimizer: the name of the optimizer's class, lower case; "" = none.
    """

    footprint: Footprint
    log: RequestLog
    batch: int = 0
    n_steps: int = 1
    optimizer: str = ""

    def rehearsed(self, capacity_bytes: int, conf: str = "") -> Rehearsal:
        """Serve the requests on a GPU of this capacity under these allocator settings."""
        return rehearse(self.log, capacity_bytes=capacity_bytes, conf=conf)


def trace(spec: str, plan: Plan | None = None, gpu: GpuModel | None = None) -> Traced:
    """Trace ``pkg.module:factory``: the user's own code is imported and run, without a GPU.

    Args:
        spec: ``pkg.module:factory``.
        plan: how to train; None = the defaults.
        gpu: whose kernels and workspaces are assumed; None = Hopper.

    Raises:
        ConfigError: torch is missing or unfit, the factory does not keep its contract, or the
            user's code fails.
    """
    _import_torch()
    from fragdoctor.estimation.tracing.factory import find_factory
    from fragdoctor.estimation.tracing.user_errors import told_in_one_sentence

    with told_in_one_sentence(spec):
        factory = find_factory(spec)
    return trace_factory(factory, plan, gpu, name=spec)


def trace_factory(
    factory: Callable[[], Any],
    plan: Plan | None = None,
    gpu: GpuModel | None = None,
    *,
    name: str = "the factory",
) -> Traced:
    """Trace what a factory builds; as :func:`trace`."""
    _import_torch()
    from fragdoctor.estimation.tracing.factory import as_program
    from fragdoctor.estimation.tracing.fake_cuda import FakeMode, pretend_cuda
    from fragdoctor.estimation.tracing.recorder import Recorder
    from fragdoctor.estimation.tracing.training import BUILD, Trainer
    from fragdoctor.estimation.tracing.user_errors import told_in_one_sentence

    capability = CAPABILITIES.get(gpu.architecture, HOPPER) if gpu else HOPPER
    log = RequestLog()
    large = capability >= HOPPER
    recorder = Recorder(log, workspace=LARGE_WORKSPACE if large else SMALL_WORKSPACE)
    pretended = pretend_cuda(
        total_bytes=gpu.total_bytes if gpu else 80 * GIB,
        name=gpu.title if gpu else "GPU",
        capability=capability,
        allocated=lambda: log.live_bytes,
    )
    with (
        warnings.catch_warnings(),
        pretended,
        FakeMode(allow_non_fake_inputs=True),
        recorder,
        told_in_one_sentence(name),
    ):
        # PyTorch warns about fake tensors in places that were never meant for them.
        warnings.simplefilter("ignore")
        log.mark(BUILD)
        program = as_program(factory())
        trainer = Trainer(program, plan or Plan(), recorder)
        trainer.run()
        log.mark("end")
    parameters = list(program.model.parameters())
    footprint = footprint_of(
        log,
        n_parameters=sum(p.numel() for p in parameters),
        n_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        notes=[*trainer.notes, *recorder.warnings],
    )
    return Traced(footprint, log, trainer.batch, trainer.plan.steps, trainer.optimizer_name)


def _import_torch() -> None:
    try:
        import torch  # noqa: F401 - only whether it is there
    except ImportError as err:
        raise ConfigError(
            "--model runs your model on fake tensors and needs PyTorch.",
            hint="Install it in this environment: pip install 'fragdoctor[torch]'",
        ) from err
