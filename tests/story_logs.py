"""Logs of sweeps and runs, in the formats of PyTorch and the usual loggers."""

from __future__ import annotations

ADVICE = (
    "If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation "
    "for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html"
    "#environment-variables)"
)
ASSERTION = (
    "../aten/src/ATen/native/cuda/Indexing.cu:1141: indexSelectLargeIndex: block: [{block},0,0], "
    "thread: [32,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
)
ASSERT = "RuntimeError: CUDA error: device-side assert triggered\n"


def message(live: float, cached: float, gpu: int = 0, others: str = "") -> str:
    """Return a message of PyTorch 2.2 or later, for a device of 23.69 GiB; figures are in GiB."""
    own = live + cached + 0.45
    return (
        f"CUDA out of memory. Tried to allocate 512.00 MiB. GPU {gpu} has a total capacity of "
        f"23.69 GiB of which 110.00 MiB is free. {others}Including non-PyTorch memory, this "
        f"process has {own:.2f} GiB memory in use. Of the allocated memory {live:.2f} GiB is "
        f"allocated by PyTorch, and {cached:.2f} GiB is reserved by PyTorch but unallocated. "
        + ADVICE
    )


def traceback(text: str, prefix: str = "") -> str:
    """Return a traceback that ends in an out-of-memory error."""
    return (
        f"{prefix}Traceback (most recent call last):\n"
        f'{prefix}  File "train.py", line 88, in <module>\n'
        f"{prefix}    loss = model(x)\n"
        f"{prefix}torch.OutOfMemoryError: {text}\n"
    )


def optuna(n: int = 8, growth: float = 1.6, n_failing: int = 2) -> str:
    """Return an Optuna sweep in which each trial prints its memory and the last ones fail."""
    lines = []
    for trial in range(n):
        base = 2 + growth * trial
        lines += [
            f"2024-05-01 10:{trial * 3 + epoch:02d}:00,123 INFO epoch {epoch} GPU memory "
            f"allocated: {base + 0.4 * epoch:.2f} GiB\n"
            for epoch in range(3)
        ]
        stamp = f"2024-05-01 10:{trial * 3 + 2:02d}:30,000"
        if trial >= n - n_failing:
            text = message(base + 3, 0.4)
            lines.append(
                f"[W {stamp}] Trial {trial} failed with parameters: {{'lr': 0.1}} because of the "
                f"following error: OutOfMemoryError('{text}').\n{traceback(text)}"
                f"[W {stamp}] Trial {trial} failed with value None.\n"
            )
        else:
            lines.append(
                f"[I {stamp}] Trial {trial} finished with value: 0.1 and parameters: "
                "{'lr': 0.1}. Best is trial 0 with value: 0.1.\n"
            )
    return "".join(lines)


def holes(n: int = 6) -> str:
    """Return a sweep with constant live memory, and more unallocated memory at each failure."""
    return "".join(
        f"=== Trial {i} ===\nEpoch 2/2: 100%|####| 25/25 [00:12<00:00, 2.1it/s]\n"
        + traceback(message(15.1 + 0.02 * (i % 2), 4 + 0.75 * i))
        for i in range(n)
    )


def assert_first() -> str:
    """Return a run that fails with an assert first, and then an OOM of the next process."""
    return (
        "Epoch 1/3\nstep 10 loss 0.3\n"
        + "".join(ASSERTION.format(block=b) for b in range(5))
        + f"Traceback (most recent call last):\n{ASSERT}"
        + "RuntimeError: CUDA error: out of memory\n"
        + "RuntimeError: CUDA error: unspecified launch failure\n"
        + "Restarting script in a new process\nstep 10 loss 0.3\n"
        + traceback(message(20, 1))
    )


def ranks() -> str:
    """Return four interleaved ranks: rank 2 runs out, ranks 1 and 2 assert, rank 0 waits."""
    steps = "".join(
        f"[rank{r}]: 2024-06-01 10:00:{s:02d} step {s * 10} loss 0.5\n"
        for s in range(10)
        for r in range(4)
    )
    return (
        steps
        + traceback(message(20.1, 1.2, gpu=2), "[rank2]: ")
        + f"[rank1]: {ASSERT}[rank2]: {ASSERT}"
        + "[rank0]:[E ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=12) ran for 600000 milliseconds before timing out.\n"
    )


def torchrun(n: int = 3) -> str:
    """Return a job that the elastic agent restarts after each OOM."""
    parts = []
    for attempt in range(n):
        parts += [
            f"[default0]:2024-06-01 1{attempt}:00:{s:02d} INFO step {s * 100} loss 0.4\n"
            for s in range(5)
        ]
        parts.append(traceback(message(21 + 0.01 * attempt, 0.4), "[default0]:"))
        if attempt < n - 1:
            where = "77 torch/distributed/elastic/agent/server/api.py:900]"
            parts.append(
                f"I0601 1{attempt}:01:05.000000 {where} [default] Worker group FAILED. 2/3 "
                "attempts left; will restart worker group\n"
                f"I0601 1{attempt}:01:05.100000 {where} [default] Restarting worker group\n"
            )
    return "".join(parts)


def bars() -> str:
    """Return a log with a progress bar: carriage returns and colors."""
    bar = "".join(
        f"\rEpoch 2: {i * 4:3d}%|{'#' * i}| {i}/25 [00:{i:02d}<00:25, 1.0it/s]" for i in range(14)
    )
    return f"\x1b[32mINFO\x1b[0m start{bar}\n\x1b[31m{traceback(message(21, 0.3))}\x1b[0m"


def trainer(*, fails: bool) -> str:
    """Return a log of Hugging Face's Trainer."""
    lines = "".join(
        f"{{'loss': 0.5, 'learning_rate': 5e-05, 'epoch': {s * 0.05:.2f}}}\n"
        f" {s}%|##        | {s * 10}/2000 [01:02<11:11, 3.1it/s]\n"
        for s in range(20)
    )
    return lines + (traceback(message(21.5, 0.3)) if fails else "")
