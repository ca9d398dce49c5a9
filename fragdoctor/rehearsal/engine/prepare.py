"""Preparing a process for a rehearsal, and restoring it afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from fragdoctor.errors import ConfigError
from fragdoctor.model.conf_keys import parse_version
from fragdoctor.model.gpus import DEFAULT
from fragdoctor.model.settings import parse_conf
from fragdoctor.rehearsal.engine import session
from fragdoctor.rehearsal.engine.gpu import Gpus

OLDEST: Final = (2, 6, 0)


def prepare(
    native: Path, n_devices: int, torch_version: str, scratch: Path | None
) -> session.Session:
    """Prepare this process; the GPUs' properties are set later.

    Args:
        native: the library of the fake GPUs.
        n_devices: how many GPUs.
        torch_version: the version whose allocator is modeled; "" = that of the installed PyTorch.
        scratch: the folder to which writes are redirected; None = no redirection.

    Raises:
        ConfigError: this PyTorch cannot be prepared.
    """
    version = torch.__version__.partition("+")[0]
    if parse_version(version) < OLDEST:
        raise ConfigError(
            f"PyTorch {torch.__version__} is not supported by rehearsals.",
            hint="Install PyTorch 2.6 or newer in the program's environment.",
        )
    if torch.cuda.is_initialized():
        raise ConfigError(
            "CUDA is already in use in this process.", hint="Rehearse in a fresh process."
        )
    gpus = Gpus(native)
    modeled = torch_version or version
    now = session.Session(
        gpus, n_devices, DEFAULT, None, DEFAULT.total_bytes, parse_conf(""), modeled
    )
    now.start_gpus()
    session.begin(now)
    from fragdoctor.rehearsal.engine import (
        activity,
        backward,
        compilation,
        cuda_api,
        deferred_dynamo,
        dispatch,
        foreign_operators,
        fused_layers,
        host,
        ranks,
        recurrent,
        sparse,
        tensors,
        values,
        vtables,
        writes,
    )
    from fragdoctor.rehearsal.engine.kernels import (  # noqa: F401 - they fill the table of rules
        composites,
        convolution,
        functional,
        indexing,
        linear_algebra,
        sorting,
        spectral,
    )

    del tensors  # it fills the table of kernels
    now.known.assume = values.assume
    cuda_api.install()
    vtables.install(gpus)
    now.is_started = torch.cuda._initialized = False  # testing the tables started it
    for part in (dispatch, foreign_operators, fused_layers, recurrent, backward):
        part.install()
    activity.install(now)
    for part in (values, sparse, host, compilation, deferred_dynamo, ranks):
        part.install()
    if scratch is not None:
        writes.install(scratch)
    torch._C._jit_set_texpr_fuser_enabled(False)  # TorchScript's, which compiles with the driver
    # Backward passes run in this thread, where the program's own modes and streams are set.
    torch.autograd.set_multithreading_enabled(False)
    return now
