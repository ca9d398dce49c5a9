"""The fork server of ``record_outlooks.py``, which runs each program in a separate child process.

It needs PyTorch for CUDA, and loads PyTorch and the frameworks once. Jobs arrive as lines of JSON
on standard input, and results leave the same way on standard output. A child sets its environment
before CUDA starts, so that each run has its own capacity and allocator settings.

A program reports that a round of its loop is complete by printing a line that starts with "step".
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PRELOADED = (
    "transformers",
    "transformers.trainer",
    "transformers.trainer_seq2seq",
    "peft",
    "accelerate",
    "lightning",
    "timm",
    "diffusers",
    "trl",
)
MAX_EVENTS = 200_000
LIMIT_S = 60.0
LARGE = 20_000
"""A tensor in host memory with more elements than this is not filled with random numbers."""


@dataclass
class Outcome:
    """What a run did.

    Attributes:
        state: ``passed``, ``oom`` (out of memory ended the run), ``error`` (something else did).
        n_steps: complete rounds of the program's loop.
        reserved_bytes: the peak of reserved memory up to the end of each round.
        allocated_bytes: the same for allocated memory.
    """

    state: str = "error"
    n_steps: int = 0
    n_ooms: int = 0
    n_retries: int = 0
    peak_reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    reserved_bytes: list[int] = field(default_factory=list)
    allocated_bytes: list[int] = field(default_factory=list)
    message: str = ""
    seconds: float = 0.0


def preload() -> Callable[[], int]:
    """Import the frameworks; return PyTorch's function that counts the GPUs.

    Some frameworks count GPUs on import, which would break CUDA in the children, so this function
    is replaced by one that returns 1.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    count: Callable[[], int] = torch._C._cuda_getDeviceCount
    torch._C._cuda_getDeviceCount = lambda: 1
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return count


def import_what(path: Path) -> None:
    """Import what a program imports at its top level, so that its children need not."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            with contextlib.suppress(ImportError):
                exec(compile(ast.unparse(node), "imports", "exec"), {})
    gc.collect()
    gc.freeze()  # children then copy fewer pages, and have less to collect


def skip_random_numbers() -> None:
    """Skip random numbers for large tensors in host memory: only time matters here, not values."""
    import torch

    def skipping(real: Callable[..., Any]) -> Callable[..., Any]:
        def fill(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.device.type == "cpu" and tensor.numel() > LARGE:
                return tensor
            return real(tensor, *args, **kwargs)

        return fill

    def zeros(real: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            on_host = str(kwargs.get("device") or torch.get_default_device()).startswith("cpu")
            if on_host and "generator" not in kwargs:
                return torch.zeros(*args, **kwargs)
            return real(*args, **kwargs)

        return make

    for name in ("normal_", "uniform_", "trunc_normal_"):
        if hasattr(torch.Tensor, name):
            setattr(torch.Tensor, name, skipping(getattr(torch.Tensor, name)))
    for name in ("randn", "rand"):
        setattr(torch, name, zeros(getattr(torch, name)))


def run_program(job: dict[str, Any]) -> Outcome:
    """Run a program in this process."""
    # The program must not see this server's arguments.
    path = Path(job["program"])
    sys.argv = [path.name]
    os.environ["FAKECUDA_TOTAL_MB"] = str(job["total_mib"])
    os.environ["FAKECUDA_RESERVED_MB"] = str(job.get("other_mib", 0))
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = job["conf"]
    ctypes.CDLL(None).fakecuda_configure()
    import torch

    torch.set_num_threads(1)
    skip_random_numbers()
    torch.manual_seed(0)
    random.seed(0)
    outcome = Outcome()
    spoken = builtins.print

    def hear(*args: Any, **kwargs: Any) -> None:
        if args and str(args[0]).startswith("step"):
            outcome.n_steps += 1
            outcome.reserved_bytes.append(torch.cuda.max_memory_reserved())
            outcome.allocated_bytes.append(torch.cuda.max_memory_allocated())
        spoken(*args, **kwargs)

    builtins.print = hear
    torch.cuda.init()
    recording = job.get("recording")
    if recording:
        torch.cuda.memory._record_memory_history(
            "all", stacks=job.get("stacks", "python"), max_entries=MAX_EVENTS
        )

    def on_oom(*_: int) -> None:
        if recording:
            torch.cuda.memory._dump_snapshot(recording)

    core: Any = torch._C  # the type stubs lack some names
    core._cuda_attach_out_of_memory_observer(on_oom)
    code = compile(path.read_text("utf-8"), f"/workspace/{path.name}", "exec")
    try:
        exec(code, {"__name__": "__main__", "__file__": f"/workspace/{path.name}"})
        outcome.state = "passed"
    except torch.OutOfMemoryError as e:
        outcome.state, outcome.message = "oom", str(e)
    except SystemExit:
        outcome.message = "the program left"
    except BaseException:  # noqa: BLE001 - any exception that ends a program is its outcome
        outcome.message = traceback.format_exc()[-3000:]
    stats = torch.cuda.memory_stats()
    outcome.n_ooms = stats["num_ooms"]
    outcome.n_retries = stats["num_alloc_retries"]
    outcome.peak_reserved_bytes = stats["reserved_bytes.all.peak"]
    outcome.peak_allocated_bytes = stats["allocated_bytes.all.peak"]
    if recording and outcome.state == "passed":
        torch.cuda.memory._dump_snapshot(recording)
    return outcome


def child(job: dict[str, Any], pipe: int, count: Callable[[], int]) -> None:
    """Run a job in a forked process and write its result."""
    import torch

    start = time.perf_counter()
    torch._C._cuda_getDeviceCount = count
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w+") as nothing:
        os.chdir(folder)
        if not job.get("loud"):
            sys.stdout = sys.stderr = nothing
            for number in (1, 2):
                os.dup2(nothing.fileno(), number)
        try:
            outcome = run_program(job)
        except BaseException:  # noqa: BLE001 - the server waits for an answer
            outcome = Outcome(message=traceback.format_exc()[-3000:])
        outcome.seconds = round(time.perf_counter() - start, 3)
        with io.FileIO(pipe, "w") as file:
            file.write(json.dumps(asdict(outcome)).encode())
        os.chdir("/")


def result_of(job: dict[str, Any], count: Callable[[], int]) -> dict[str, Any]:
    """Fork a child for a job and wait for its result."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            child(job, writer, count)
        finally:
            os._exit(0)
    os.close(writer)
    parts = []
    until = time.monotonic() + job.get("limit_s", LIMIT_S)
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            os.kill(pid, signal.SIGKILL)
            break
        part = os.read(reader, 1 << 16)
        if not part:
            break
        parts.append(part)
    os.close(reader)
    os.waitpid(pid, 0)
    text = b"".join(parts)
    return json.loads(text) if text else asdict(Outcome(message="it did not end, or crashed"))


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    count, known = preload(), ""
    for line in sys.stdin:
        job = json.loads(line)
        if job["program"] != known:
            known = job["program"]
            import_what(Path(known))
        json.dump(result_of(job, count), answers)
        answers.write("\n")
        answers.flush()


if __name__ == "__main__":
    main()
