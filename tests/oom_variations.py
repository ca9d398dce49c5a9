"""Our own out-of-memory messages, made from templates, and what pasting does to them.

``messages()`` draws a text with its true fields; ``disguises()`` draws a way to wrap, quote,
color, prefix or escape a text so that a person can still read the figures.
"""

from __future__ import annotations

import html
import json
import textwrap
from collections.abc import Callable
from decimal import Decimal

from hypothesis import strategies as st

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
OLD_ADVICE = (
    " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid"
    " fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
NEW_ADVICE = (
    " If reserved but unallocated memory is large try setting"
    " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    "  See documentation for Memory Management"
    "  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
XPU_ADVICE = " Please use `empty_cache` to release all unoccupied cached memory."


@st.composite
def sizes(draw) -> tuple[str, int]:
    """Draw a size the way PyTorch prints it, and its number of bytes."""
    if draw(st.integers(0, 9)) == 0:
        n = draw(st.integers(0, 1024))
        return f"{n} bytes", n
    unit = draw(st.sampled_from(sorted(UNITS)))
    hundredths = draw(st.integers(100, 102400))
    value = Decimal(hundredths) / 100
    return f"{value:.2f} {unit}", int((value * UNITS[unit]).to_integral_value())


@st.composite
def messages(draw) -> tuple[str, dict[str, object]]:
    """Draw a message of a random family, and the fields that must be read from it."""
    make = draw(st.sampled_from(FAMILIES))
    return make(draw)


def _many(draw, n: int) -> list[tuple[str, int]]:
    return [draw(sizes()) for _ in range(n)]


def one_cached(draw):
    (a, x), (b, y), (c, z), (d, w), (e, v) = _many(draw, 5)
    gpu = draw(st.integers(0, 15))
    text = (
        f"CUDA out of memory. Tried to allocate {a} (GPU {gpu}; {b} total capacity;"
        f" {c} already allocated; {d} free; {e} cached)"
    )
    reserved = v if z + v > y > z else z + v  # more than the card has: all that is reserved
    return text, {
        "backend": "cuda", "device_index": gpu, "requested_bytes": x, "total_bytes": y,
        "allocated_bytes": z, "free_bytes": w, "reserved_unallocated_bytes": max(0, reserved - z),
        "reserved_bytes": reserved,
    }  # fmt: skip


def one_reserved(draw):
    (a, x), (b, y), (c, z), (d, w), (e, v), (f, u) = _many(draw, 6)
    word, backend = draw(st.sampled_from([("CUDA", "cuda"), ("HIP", "rocm")]))
    gpu = draw(st.integers(0, 15))
    allowed = draw(st.booleans())
    text = (
        f"{word} out of memory. Tried to allocate {a} (GPU {gpu}; {b} total capacity; {c} already"
        f" allocated; {d} free; {f'{f} allowed; ' if allowed else ''}"
        f"{e} reserved in total by PyTorch)"
    )
    text += draw(st.sampled_from(["", OLD_ADVICE, OLD_ADVICE.replace("to avoid", "toavoid")]))
    return text, {
        "backend": backend, "device_index": gpu, "requested_bytes": x, "total_bytes": y,
        "allocated_bytes": z, "free_bytes": w, "reserved_bytes": v,
        "limit_bytes": u if allowed else None,
        "reserved_unallocated_bytes": max(0, v - z),
    }  # fmt: skip


def two(draw):
    (a, x), (b, y), (c, z), (d, w), (e, v) = _many(draw, 5)
    word, backend = draw(
        st.sampled_from([("CUDA", "cuda"), ("HIP", "rocm"), ("MUSA", "musa"), ("XPU", "xpu")])
    )
    gpu = draw(st.integers(0, 127))
    others = draw(st.lists(st.tuples(st.integers(2, 4_194_304), sizes()), max_size=3))
    own = draw(st.none() | sizes())
    allowed = draw(st.none() | sizes())
    private = draw(st.none() | sizes())
    text = (
        f"{word} out of memory. Tried to allocate {a}. GPU {gpu} has a total"
        f" {draw(st.sampled_from(['capacity', 'capacty']))} of {b} of which {c} is free. "
        + "".join(f"Process {pid} has {size} memory in use. " for pid, (size, _) in others)
    )
    if own:
        text += f"Including non-PyTorch memory, this process has {own[0]} memory in use. "
    if allowed:
        text += f"{allowed[0]} allowed; "
    text += f"Of the allocated memory {d} is allocated by PyTorch, "
    if private:
        text += f"with {private[0]} allocated in private pools (e.g., CUDA Graphs), "
    text += f"and {e} is reserved by PyTorch but unallocated."
    if backend != "xpu":
        text += draw(st.sampled_from(["", NEW_ADVICE]))
    else:
        text += XPU_ADVICE
    return text, {
        "backend": backend, "device_index": gpu, "requested_bytes": x, "total_bytes": y,
        "free_bytes": z, "allocated_bytes": w, "reserved_unallocated_bytes": v,
        "reserved_bytes": w + v, "process_bytes": own[1] if own else None,
        "limit_bytes": allowed[1] if allowed else None,
        "private_pools_bytes": private[1] if private else None,
        "other_processes": [(pid, size[1]) for pid, size in others],
    }  # fmt: skip


def npu(draw):
    (a, x), (b, y), (c, z), (d, w), (e, v), (f, u) = _many(draw, 6)
    device = draw(st.integers(0, 15))
    text = (
        f"NPU out of memory. Tried to allocate {a} (NPU {device}; {b} total capacity; {c} already"
        f" allocated; {d} current active; {e} free; {f} reserved in total by PyTorch)"
    )
    return text, {
        "backend": "npu", "device_index": device, "requested_bytes": x, "total_bytes": y,
        "allocated_bytes": z, "active_bytes": w, "free_bytes": v, "reserved_bytes": u,
    }  # fmt: skip


def mps(draw):
    (a, x), (b, y), (c, z), (d, w) = _many(draw, 4)
    limit = draw(st.booleans())
    text = (
        f"MPS backend out of memory (MPS allocated: {b}, other allocations: {c}"
        f"{f', max allowed: {d}' if limit else ''}). Tried to allocate {a} on"
        f" {draw(st.sampled_from(['private', 'shared']))} pool."
    )
    if limit:
        text += (
            " Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory"
            " allocations (may cause system failure)."
        )
    return text, {
        "backend": "mps", "device_index": None, "requested_bytes": x, "allocated_bytes": y,
        "other_allocations_bytes": z, "limit_bytes": w if limit else None, "reserved_bytes": None,
    }  # fmt: skip


def asynchronous(draw):
    (a, x), (b, y), (c, z), (d, w), (e, v) = _many(draw, 5)
    device = draw(st.integers(0, 15))
    text = (
        f"Allocation on device {device} would exceed allowed memory. (out of memory)\n"
        f"Currently allocated     : {a}\nRequested               : {b}\n"
        f"Device limit            : {c}\nFree (according to CUDA): {d}\n"
        "PyTorch limit (set by user-supplied memory fraction)\n"
        f"                        : {e}"
    )
    return text, {
        "backend": "cuda", "device_index": device, "allocated_bytes": x, "requested_bytes": y,
        "total_bytes": z, "free_bytes": w, "limit_bytes": v, "reserved_bytes": None,
    }  # fmt: skip


FAMILIES: tuple[Callable, ...] = (one_cached, one_reserved, two, two, npu, mps, asynchronous)

HEADS = st.sampled_from(
    ["", "RuntimeError: ", "torch.cuda.OutOfMemoryError: ", "torch.OutOfMemoryError: "]
)
UNKNOWN_PREFIX = "job-77/gpu5 # "
PREFIXES = st.sampled_from(
    [
        "[rank3]: ",
        "[default2]:",
        "> ",
        "> > ",
        "│ ",
        "2024-06-01 10:22:17,413 - ERROR - ",
        "2024-06-01T10:22:17.41Z worker-0 stderr: ",
        "2026-03-01T07:00:59.123456789Z stderr F ",
        "[2026-02-24 20:21:58,001] [ERROR] ",
        "vllm-1  | ERROR 11-18 18:07:28 engine.py:366] ",
        "(VllmWorker rank=3 pid=1090) ERROR 06-05 06:18:13 [multiproc_executor.py:470] ",
        "(RayTrainWorker pid=1234, ip=10.0.0.7) ",
        "E0330 21:37:34.807000 155011 site-packages/torch/api.py:869] ",
        "Nov 21 17:18:41 node7 python[4242]: ",
        "[node3:2]: ",
        "[1,3]<stderr>:",
        UNKNOWN_PREFIX,
        "    ",
        "\t",
        "ERROR:root:",
    ]
)


def hard_wrap(text: str, width: int) -> str:
    """Break lines at a column, even in the middle of words and numbers."""
    lines = []
    for line in text.split("\n"):
        lines += [line[i : i + width] for i in range(0, len(line), width)] or [""]
    return "\n".join(lines)


def soft_wrap(text: str, width: int) -> str:
    """Break lines at blanks, like mail programs."""
    return "\n".join(
        "\n".join(textwrap.wrap(line, width, break_long_words=False)) for line in text.split("\n")
    )


def each_line(text: str, prefix: str) -> str:
    return "\n".join(prefix + line for line in text.split("\n"))


def colour(text: str) -> str:
    return "\x1b[1;31m" + text.replace(". ", ".\x1b[0m \x1b[38;5;9m") + "\x1b[0m"


@st.composite
def disguises(draw) -> Callable[[str], str]:
    """Draw a way to spoil a text so that a person could still read it."""
    wrap = draw(st.sampled_from(["none", "hard", "soft"]))
    width = draw(st.integers(24, 120))
    prefix = draw(st.just("") | PREFIXES)
    finish = draw(
        st.sampled_from(["none", "colour", "html", "json", "repr", "crlf", "lower", "fence", "log"])
    )

    if prefix == UNKNOWN_PREFIX and finish in {"json", "repr", "html"}:
        prefix = ""  # it could not be told from the text that the finish adds in front

    def spoil(text: str) -> str:
        if wrap == "hard":
            text = hard_wrap(text, width)
        elif wrap == "soft":
            text = soft_wrap(text, width)
        if prefix:
            text = each_line(text, prefix)
        return FINISHES[finish](text)

    spoil.__name__ = f"spoil_{wrap}_{width}_{finish}_{prefix!r}"
    return spoil


FINISHES: dict[str, Callable[[str], str]] = {
    "none": lambda text: text,
    "colour": colour,
    "html": lambda text: "<p>" + html.escape(text).replace("\n", "<br>\n") + "</p>",
    "json": lambda text: json.dumps({"error": "OutOfMemoryError", "detail": text, "code": 500}),
    "repr": repr,
    "crlf": lambda text: text.replace("\n", "\r\n"),
    "lower": str.lower,
    "fence": lambda text: f"```python\n{text}\n```\nHow do I fix this?",
    "log": lambda text: f"Epoch 3: loss 0.71\n{text}\nTensorBoard caught SIGTERM; exiting...",
}
