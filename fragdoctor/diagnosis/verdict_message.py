"""What a single message says: each kind yields only what it can prove."""

from __future__ import annotations

import re
from typing import Final

from msgspec.structs import replace

from fragdoctor.diagnosis.decision import Hypothesis, decide, distinct, without_figures
from fragdoctor.diagnosis.verdict_foreign import by_its_figures, watch
from fragdoctor.model.case import (
    AFTER_ANY_FAILURE,
    GPU_EMPTY,
    GPU_TABLE,
    KEPT_MEMORY,
    TOO_MUCH,
    UNEVEN,
    OomLog,
    OomMessage,
)
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.engines import engine_of, is_of_other_program
from fragdoctor.model.finding import Confidence, Evidence, in_bytes
from fragdoctor.rules.failed_request import known
from fragdoctor.rules.request_sources import request_of_message
from fragdoctor.rules.told_shapes import told_broadcast
from fragdoctor.rules.told_weights import told_weights
from fragdoctor.rules.traceback_signs import (
    LOADING_WEIGHTS,
    RAN_BEFORE,
    is_at_first_call,
    is_seen_to_fail_late,
    n_steps_passed,
    sign_of,
)
from fragdoctor.units import format_count, format_size, plural

ALLOCATOR: Final = "pytorch-caching-allocator"
MESSAGE: Final = "oom message"

LIMIT_SUB_KINDS: Final = {
    "fraction-rejected": "The allocator rejected the request beforehand: it would exceed the "
    "process's memory fraction (per_process_memory_fraction).",
    "not-in-reserve": "The request exceeds the address space that expandable_segments_reserve "
    "sets aside for one segment.",
    "single-allocation-limit": "The device refuses single allocations of this size, however much "
    "memory is free.",
    "buffer-too-large": "Metal refuses single buffers of this size, however much memory is free.",
    "buffer-count": "Metal limits how many buffers a program has, however small: it is not memory "
    "that ran out.",
    "arena-limit": "The arena of ONNX Runtime was given a limit (gpu_mem_limit, or max_mem of "
    "OrtArenaCfg), and less than the request is left of it.",
    "workspace-limit": "The workspace of FlashInfer, a buffer of fixed size, is too small for the "
    "request; the GPU's memory is not what is short.",
    "va-exhausted": "The process ran out of virtual address space for expandable segments.",
}

KILLS: Final = ("killed", "sigkill", "oom-killer")
"""Signs of a kill, which are proof only if the kernel itself says why."""

TOLD_KILLS: Final = {
    "evicted": "Kubernetes",
    "kernel": "The kernel",
    "slurm": "The job's scheduler or the container's limit",
}
"""Who killed a process and said why, by variant."""

WENT_ON: Final = {
    "detectron2-retry": "Detectron2 could not make a call on the GPU and goes on with its inputs "
    "on the CPU, which is slow",
    "spilled": "The GPU's memory is full, and Windows' driver has moved part of it to the host's "
    "memory (shared GPU memory), which makes the program slow",
    "vae-retry": "The VAE did not fit at once and goes on in tiles, which is slower",
}
"""What a program says that caught the failure and went on another way, by variant."""

LIBRARIES: Final = {
    "cublas": "cuBLAS",
    "cudnn": "cuDNN",
    "nccl": "NCCL",
    "thrust": "Thrust",
    "ctranslate2": "CTranslate2",
    "bitsandbytes": "bitsandbytes",
}
"""Libraries that ask the driver for memory, by the kind or finer kind of their messages."""

_NAMED: Final = {"cusolver": "cuSOLVER", "cusparse": "cuSPARSE", "cufft": "cuFFT"}


def library_of(message: OomMessage) -> str:
    """Return the name of the library that failed; dense algebra libraries share a kind."""
    said = message.text.lower()
    named = next((name for word, name in _NAMED.items() if word in said), None)
    return named or LIBRARIES.get(message.kind) or LIBRARIES[message.sub_kind]


NEGATIVES: Final = {
    "device-assert": "an index or label is out of range on the device",
    "illegal-access": "a kernel touched an address that is not its own",
    "launch-resources": "a kernel needs more registers or threads than a block may have",
    "launch-failure": "a kernel could not be launched or crashed",
    "no-kernel-image": "this build has no kernels for this GPU",
    "driver-init": "no usable GPU or driver was found",
    "driver-state": "the driver is in a bad state, as after sleep or an update without a reboot",
    "forked": "CUDA cannot start again in a process that was forked from one that uses it",
    "cudnn-execution": "cuDNN failed while it ran",
    "cublas-execution": "cuBLAS failed while it ran",
    "collective-timeout": "a collective operation timed out",
    "nccl-error": "NCCL failed to communicate",
    "shape-mismatch": "shapes do not fit together",
    "disk-full": "the disk is full",
    "file-limit": "too many files are open",
    "segfault": "the process crashed (segmentation fault)",
    "fixed-pool": "a pool of fixed size inside ggml was too small, which no memory changes: a "
    "newer llama.cpp sizes it by itself, else use a shorter context or batch",
}
"""The meaning of the reader's kinds of failures other than a lack of memory."""

OF_KERNEL: Final = frozenset(
    {"device-assert", "illegal-access", "launch-failure", "cublas-execution", "cudnn-execution"}
)
"""Failures of a kernel, which a later call reports."""


SHOWS_KILL: Final = "dmesg (or the scheduler's log) shows 'Out of memory: Killed process'."

_WATCHED: Final = (
    "nvidia-smi during the run shows whether the GPU is full, and which processes fill it"
)

TOLD: Final = {
    "driver-api": Hypothesis(
        Cause.UNKNOWN,
        "The driver refused to map an expandable segment: this error comes from no other call "
        "of the allocator. WSL2, Jetson and some containers refuse it with memory free.",
        settled_by="Run once with expandable_segments:False: a device that is full then "
        "prints its figures.",
        also=(Cause.CAPACITY,),
    ),
    "no-context": Hypothesis(
        Cause.OTHER_PROCESS,
        "CUDA could not start: the driver had no memory for a context, before this program "
        "put anything on the GPU.",
        settled_by="nvidia-smi shows whether the device is full; a limit of virtual memory "
        "(ulimit -v) or a driver that was updated without a reboot looks the same.",
        also=(Cause.HOST_MEMORY,),
    ),
    "nvml-unavailable": Hypothesis(
        Cause.CAPACITY,
        "PyTorch ran out of memory and asked NVML for the figures of its message, which failed, as "
        "it does on MIG slices and with some drivers: this assertion hides the message.",
        settled_by="nvidia-smi during the run shows whether the GPU, or the MIG slice, is full.",
    ),
    "unread": Hypothesis(
        Cause.UNKNOWN,
        "A line of a program that fragdoctor does not know says that memory ran out, but not "
        "whether it was the GPU's or the host's.",
        settled_by="nvidia-smi and free -h during the run show which of them fills up.",
        also=(Cause.CAPACITY, Cause.HOST_MEMORY),
    ),
    KEPT_MEMORY: Hypothesis(
        Cause.LEAK,
        "According to the text, memory is not given back after its use: something still refers to "
        "it, or its process still runs. PyTorch keeps freed memory in its cache, which is no loss.",
        settled_by="Print torch.cuda.memory_allocated() after gc.collect(): that much is still "
        "referred to.",
    ),
    UNEVEN: Hypothesis(
        Cause.CAPACITY,
        "According to the text, one of several GPUs holds more than the others and fills up first. "
        "With DataParallel, the first GPU also gathers all outputs.",
        settled_by=f"{_WATCHED}.",
    ),
    "kernel-died": Hypothesis(
        Cause.HOST_MEMORY,
        "The notebook's kernel died without a Python error: most often the host's memory ran out, "
        "but a crash in native code looks the same.",
        settled_by=SHOWS_KILL,
    ),
    "ray-worker": Hypothesis(
        Cause.HOST_MEMORY,
        "A Ray worker is gone, and Ray names possible reasons: the host's out-of-memory killer is "
        "one of them, a crash or a shutdown another.",
        settled_by=SHOWS_KILL,
    ),
    "worker-gone": Hypothesis(
        Cause.HOST_MEMORY,
        "Worker processes are gone. Unless they printed an error of their own further up, the "
        "host's out-of-memory killer ended them.",
        settled_by=SHOWS_KILL,
    ),
    "mappings": Hypothesis(
        Cause.HOST_MEMORY,
        "The kernel refused to map a small piece of shared memory: the process has reached its "
        "limit of mappings (vm.max_map_count), as a DataLoader with many small tensors does.",
        Confidence.LIKELY,
        "wc -l /proc/PID/maps counts the program's mappings (65530 is the default limit).",
    ),
    "pool-full": Hypothesis(
        Cause.CAPACITY,
        "A step needed more of SGLang's pool (tokens of KV cache, or slots for requests) than was "
        "free; the pool is full, not the GPU.",
        Confidence.LIKELY,
        "The lines above say how full the pool was (token usage).",
    ),
    "unbalanced-gpus": Hypothesis(
        Cause.OTHER_PROCESS,
        "SGLang found much less free memory on one GPU than on another before it loaded the model: "
        "another process holds a part of it, or the GPUs are of different sizes.",
        Confidence.LIKELY,
        "nvidia-smi names who holds it.",
        also=(Cause.CAPACITY,),
    ),
    **dict.fromkeys(
        ("ggml-pinned", "pinned-host"),
        Hypothesis(
            Cause.HOST_MEMORY,
            "Page-locked host memory ran out: WSL2 and some containers allow little of it. The "
            "text says CUDA, but it is the host's memory.",
            Confidence.LIKELY,
        ),
    ),
}
"""Failures without figures that the text distinguishes, by the finer kind of the message."""


def read_no_message(log: OomLog) -> Hypothesis:
    """Return the hypothesis on a text in which no memory failure was found."""
    lines = plural(log.n_lines, "line") if log.n_lines else "the text"
    return Hypothesis(
        Cause.NOT_MEMORY,
        f"Nothing in {lines} says that memory ran out.",
        Confidence.LIKELY,
        "Paste the whole output, with the lines before the first error.",
        "no-message",
    )


def read_message(message: OomMessage) -> Hypothesis:
    """Return the hypothesis on one message of any kind."""
    row = f"message-{message.sub_kind or message.kind}"
    found = as_told(_read(message), message)
    return replace(found, row=found.row or row)


def as_told(found: Hypothesis, message: OomMessage | None) -> Hypothesis:
    """Return a hypothesis with what people wrote: what the weights take, and a leak if it fits."""
    if message is not None and (broadcast := told_broadcast(message)):
        cause = Cause.SIZE_BUG if message.is_device_oom else found.cause
        return Hypothesis(cause, broadcast, Confidence.LIKELY, also=(Cause.SIZE_BUG,))
    do_fit = message is not None and n_steps_passed(message) > 1
    weights = told_weights(message) if found.cause is Cause.CAPACITY and not do_fit else None
    if weights is not None:
        found = replace(found, summary=f"{found.summary} {weights.text}.")
    is_open = found.cause is Cause.CAPACITY and found.confidence is Confidence.POSSIBLE
    if is_open and message is not None and is_seen_to_fail_late(message):
        return replace(found, also=distinct((*found.also, Cause.LEAK), found.cause))
    return found


def _read(message: OomMessage) -> Hypothesis:
    if message.sub_kind == "size-bug":
        return Hypothesis(
            Cause.SIZE_BUG,
            "More than 1 EiB was requested: a size was negative or overflowed."
            if message.requested_bytes is None
            else f"{format_size(message.requested_bytes)} was requested, far more than any "
            "device holds: a size was computed wrong.",
            Confidence.PROVEN,
        )
    sign = sign_of(message) if message.sub_kind == "unread" else None
    is_on_gpu = sign is not None and sign.is_of_model
    if message.sub_kind in TOLD and not is_on_gpu:
        told = TOLD[message.sub_kind]
        return replace(told, summary=_of_pages(message)) if has_room_in_pool(message) else told
    if message.sub_kind in LIMIT_SUB_KINDS:
        return Hypothesis(Cause.MEMORY_LIMIT, LIMIT_SUB_KINDS[message.sub_kind], Confidence.PROVEN)
    if message.sub_kind in LIBRARIES and engine_of(message) is None:
        return _library(message)
    if message.kind == ALLOCATOR and engine_of(message) is None:
        return _allocator(message)
    return _OF_KIND.get(message.kind, _foreign)(message)


def evidence_of_message(message: OomMessage) -> tuple[Evidence, ...]:
    """Return the printed figures as evidence."""
    figures = {
        "requested": message.requested_bytes,
        "device total": known(message.total_bytes),
        "device free": known(message.true_free_bytes),
        "allocated": known(message.allocated_bytes),
        "reserved": known(message.reserved_bytes),
        "reserved but unallocated": message.reserved_unallocated_bytes,
        "private pools": message.private_pools_bytes,
        "limit": known(message.limit_bytes),
        "this process": known(message.process_bytes),
    }
    return tuple(in_bytes(figures, MESSAGE))


def _allocator(message: OomMessage) -> Hypothesis:
    if message.backend == "mps":
        return _mps(message)
    failed = request_of_message(message)
    if message.variant in WENT_ON:
        summary = f"{WENT_ON[message.variant]}: this alone is not a failure."
        return Hypothesis(Cause.CAPACITY, summary, also=(Cause.HEALTHY,))
    sign = sign_of(message)
    doing = "" if sign is None else sign.doing
    if message.variant == "batch-search":
        # accelerate 0.10 to 1.15, utils/memory.py: find_executable_batch_size
        return Hypothesis(
            Cause.CAPACITY,
            "accelerate's search for a batch size that fits (find_executable_batch_size, or "
            "auto_find_batch_size=True of Trainer) lowered it after each failure, and a batch of "
            f"one failed as well{doing and ', '}{doing}: the batch is not what is too large.",
            settled_by="Run once with a batch of one and without the search, which hides the "
            "errors that it caught: PyTorch's own error has the figures. The search also takes a "
            "lack of host memory for too large a batch.",
            also=(Cause.HOST_MEMORY,),
        )
    if failed is not None:
        return decide(failed)
    found = without_figures("request", doing)
    if message.variant == "allocation-on-device":
        summary = f"{found.summary.partition(';')[0]}; ComfyUI's message has no numbers."
        settled_by = "nvidia-smi during the run shows who fills the GPU."
    elif message.variant in ("told", "bare") and message.requested_bytes is None:
        when = f" {doing}" if doing else ""
        summary = f"The text says that the GPU ran out of memory{when}, but not what filled it."
        settled_by = "Paste the whole error, including its numbers and its traceback."
        if message.sub_kind == TOO_MUCH:
            summary = f"The text says that the program took too much memory{when}"
            summary += "." if doing else ", but not what takes it."
            settled_by = "A snapshot shows which lines take it."
        elif sign is not None and sign.name == RAN_BEFORE:
            summary = f"{summary.partition(',')[0]}, whose tensors are most likely still held."
    else:
        return found
    return replace(found, summary=summary, settled_by=settled_by)


def _mps(message: OomMessage) -> Hypothesis:
    """Read MPS: it refuses if heaps + other Metal memory + request exceed the watermark."""
    if message.requested_bytes is None or message.allocated_bytes is None:
        return by_its_figures(_framework(message), message)
    limit = known(message.limit_bytes)
    other = message.other_allocations_bytes or 0
    sums = (
        f"{format_size(message.allocated_bytes)} allocated, {format_size(other)} held by Metal "
        f"outside PyTorch's heaps and the request of {format_size(message.requested_bytes)}"
    )
    if limit is None:
        return Hypothesis(Cause.CAPACITY, f"The machine could not give {sums}.", Confidence.LIKELY)
    if other > message.allocated_bytes:
        return Hypothesis(
            Cause.NON_PYTORCH_MEMORY,
            f"Metal holds {format_size(other)} outside PyTorch's heaps (caches of the driver and "
            f"of compiled graphs), more than the {format_size(message.allocated_bytes)} of "
            f"tensors; the limit for both is {format_size(limit)}.",
            Confidence.LIKELY,
            also=(Cause.MEMORY_LIMIT,),
        )
    return Hypothesis(
        Cause.MEMORY_LIMIT,
        f"{sums} exceed the limit of {format_size(limit)} (PYTORCH_MPS_HIGH_WATERMARK_RATIO).",
        Confidence.PROVEN,
        also=(Cause.CAPACITY,),
    )


_ON_EMPTY: Final = Hypothesis(
    Cause.UNKNOWN,
    "The driver said that memory ran out, while the text shows GPUs with nothing on them: "
    "something other than the GPU's memory was short, or the program uses another GPU.",
    settled_by="Run nvidia-smi while the program runs, not after it.",
    also=(Cause.HOST_MEMORY, Cause.CAPACITY),
)


def _driver(message: OomMessage) -> Hypothesis:
    sign, is_told = sign_of(message), message.variant == "told"
    is_empty, starts = message.sub_kind == GPU_EMPTY, is_at_first_call(message)
    # What a table shows says more than words for what the program was doing.
    is_unseen = sign is None or sign.name == LOADING_WEIGHTS or not message.frames
    if starts or (is_empty and is_unseen):
        return _ON_EMPTY if is_empty else TOLD["no-context"]
    if message.sub_kind == GPU_TABLE and is_unseen:
        whole = "" if message.total_bytes is None else f" of {format_size(message.total_bytes)}"
        return Hypothesis(
            Cause.OTHER_PROCESS,
            "The text gives no numbers for the failure, but says that GPU memory outlived its "
            "program: what is left of an earlier run holds it."
            if message.process_bytes is None
            else "The error has no numbers, but a table in the text shows "
            f"{format_size(message.process_bytes)}{whole} in use on GPU "
            f"{message.device_index}: if this program was not running then, another program or "
            "what is left of an earlier run holds them.",
            settled_by="fuser -v /dev/nvidia* also names processes that nvidia-smi does not list.",
            also=(Cause.CAPACITY,),
        )
    if is_of_other_program(message) and sign is None:
        return by_its_figures(_framework(message), message)
    is_of_library = ".cu:" in message.text  # with allocations of its own
    is_bare = message.variant == "runtime-error" and not is_of_library
    if is_bare and sign is not None and sign.name == LOADING_WEIGHTS:
        return Hypothesis(
            Cause.OTHER_PROCESS,
            "The driver ran out of memory when the first weights went to the GPU. If weights do "
            "not fit, PyTorch's allocator says so with figures: here the GPU was already full at "
            "the start.",
            settled_by="nvidia-smi before the start shows who fills the GPU.",
            also=(Cause.CAPACITY,),
        )
    if sign is not None:
        return Hypothesis(
            Cause.CAPACITY,
            f"{'The GPU ran out of memory' if is_told else 'A call to the driver found no memory'} "
            f"{sign.doing}; "
            f"the {'text' if is_told else 'message'} has no numbers.",
            settled_by=f"{_WATCHED}.",
            also=() if is_empty else (Cause.OTHER_PROCESS,),
        )
    causes = Cause.UNKNOWN, Cause.CAPACITY
    summary = (
        "A direct call to the driver found no memory. Its message has no numbers: device "
        "memory, pinned host memory or the context may have run out."
    )
    settled = "Run with CUDA_LAUNCH_BLOCKING=1 to see the failing call, and watch nvidia-smi."
    if is_told:
        summary = (
            "The text says that the GPU's memory ran out, but not what filled it or what was "
            "asked for."
        )
        settled = f"{_WATCHED}; paste the error with its traceback."
    elif message.is_of_early_allocator:
        summary = "PyTorch could not get memory for a tensor; its early versions print no numbers."
        causes, settled = (Cause.CAPACITY, Cause.OTHER_PROCESS), f"{_WATCHED}."
    return Hypothesis(causes[0], summary, settled_by=settled, also=causes[1:])


def _library(message: OomMessage) -> Hypothesis:
    name = library_of(message)
    if not message.is_device_oom:
        return Hypothesis(
            Cause.UNKNOWN,
            f"{name} failed; lack of memory for its workspace is one possible reason, shapes "
            "or types that it does not support are another.",
            settled_by="Print torch.cuda.mem_get_info() before the call: with plenty free it "
            "is not memory.",
            also=(Cause.CAPACITY, Cause.NOT_MEMORY),
        )
    asked = message.requested_bytes
    sign = sign_of(message)
    failed = f" It failed {sign.doing}." if sign is not None and name not in sign.doing else ""
    if asked is None and message.variant in AFTER_ANY_FAILURE and message.backend != "tf":
        said = message.said.lower()
        if message.process_bytes is not None or _SEEN_FULL.search(said):
            why = f"{name} found no memory for itself: the text shows that the GPU is full.{failed}"
            return Hypothesis(Cause.CAPACITY, why, Confidence.LIKELY)
        why = (
            ", as it does when the GPU is full, but also after an index out of range (a token id "
            "beyond the vocabulary, a label beyond the classes), or if the build of PyTorch, its "
            "CUDA libraries and the driver do not match. The text does not say which"
        )
        causes = Cause.CAPACITY, Cause.NOT_MEMORY
        if _BAD_INDEX.search(said):
            why = ": the text speaks of an index out of range, after which every call of a library "
            why += "fails like this; a full GPU looks the same"
            causes = Cause.NOT_MEMORY, Cause.CAPACITY
        return Hypothesis(
            causes[0],
            f"{name} could not start{why}.{failed}",
            settled_by="CUDA_LAUNCH_BLOCKING=1, or the same step on the CPU.",
            also=causes[1:],
        )
    what = "memory for itself" if asked is None else f"{format_size(asked)} for itself"
    full = "the device was full" if asked is not None else "most likely the device was full"
    settled_by = (
        "nvidia-smi during the run shows whether the device is full."
        if message.kind == "driver-no-figures"
        else "Print torch.cuda.mem_get_info() before the library's first call."
    )
    return Hypothesis(
        Cause.CAPACITY,
        f"{name} could not get {what}. It asks the driver directly, and PyTorch's cache does not "
        f"make room for it: {full}.{failed}",
        settled_by=settled_by,
        also=(Cause.NON_PYTORCH_MEMORY,),
    )


_BAD_INDEX: Final = re.compile(
    r"\bout of (?:the )?(?:index|indices|range|bounds?)\b|\bindexerror\b"
    r"|\b(?:index|indices|ids?|labels?)\b[^.\n]{0,30}\b(?:beyond|exceeds?|too (?:large|high|big))\b"
)
_SEEN_FULL: Final = re.compile(r"(?<!not )(?<!not an )out of memory")
"""What people and programs say of an index, and of a full GPU, in lower case."""


_AT_START: Final = {
    "warm-up": "vLLM warmed up its sampler with {n} dummy requests, and what "
    "gpu_memory_utilization leaves beside the KV cache is not enough for their logits over "
    "the whole vocabulary.",
    "prefill": "At startup the server ran one prefill of {n} tokens, and what the weights leave "
    "of the card was not enough for it and its KV cache.",
}
"""What a server tried and failed to do, by the finer kind of its message."""


def has_room_in_pool(message: OomMessage) -> bool:
    """Return whether a pool refused fewer tokens than it had free."""
    wanted, free = message.kv_tokens_requested, message.kv_tokens_capacity
    is_of_pool = message.sub_kind == "pool-full" and None not in (wanted, free)
    return is_of_pool and (wanted or 0) <= (free or 0)


def _of_pages(message: OomMessage) -> str:
    wanted, free = message.kv_tokens_requested or 0, message.kv_tokens_capacity or 0
    return (
        f"A step was refused {plural(wanted, 'token')} of KV cache though {format_count(free)} "
        "were free in SGLang's pool. The pool hands out whole pages, and each running request may "
        "need a new one: there are too few pages, or they are too large. The GPU is not what is "
        "full."
    )


def _kv_cache(message: OomMessage) -> Hypothesis:
    told = _AT_START.get(message.sub_kind)
    if told is not None:
        n = format_count(message.n_sequences or message.kv_tokens_requested or 0)
        return Hypothesis(
            Cause.CAPACITY,
            told.format(n=n),
            Confidence.LIKELY,
            "PyTorch's own error, further up in the log, has the figures.",
            also=() if message.n_sequences else (Cause.OTHER_PROCESS,),
        )
    total, free, wanted = message.total_bytes, message.free_bytes, message.requested_bytes
    if total is not None and free is not None and wanted is not None:
        return Hypothesis(
            Cause.OTHER_PROCESS,
            f"{format_size(total - free)} of {format_size(total)} was in use at startup: "
            f"{format_size(free)} is free, and the server wants {format_size(wanted)}.",
            Confidence.LIKELY,
            "nvidia-smi names who holds it.",
            also=(Cause.CAPACITY,),
        )
    if wanted is not None and message.limit_bytes is not None:
        numbers = (
            f"the KV cache needs {format_size(wanted)} and may have "
            f"{format_size(message.limit_bytes)}"
        )
    elif message.kv_tokens_requested is not None and message.kv_tokens_capacity is not None:
        numbers = (
            f"{format_count(message.kv_tokens_requested)} tokens are asked for and "
            f"{format_count(message.kv_tokens_capacity)} fit"
        )
    else:
        numbers = "nothing is left for the KV cache after weights and profiling"
    return Hypothesis(
        Cause.CAPACITY,
        f"The budget of the KV cache is too small: {numbers}.",
        Confidence.PROVEN,
        also=(Cause.MEMORY_LIMIT,),
    )


def _foreign(message: OomMessage) -> Hypothesis:
    """Read JAX, TensorFlow, ggml and others, which have allocators and figures of their own."""
    name, wanted = _framework(message), message.requested_bytes
    if message.is_warning:
        return Hypothesis(
            Cause.CAPACITY,
            f"{name} only warns: {format_size(wanted)} could not be allocated, so it took a slower "
            "way; the device is nearly full.",
            also=(Cause.HEALTHY,),
        )
    if message.sub_kind == "vmm":
        text = (
            "The driver refused a call of ggml's pool that maps virtual memory: a full GPU causes "
            "that, and some drivers do it with memory free."
        )
        return Hypothesis(Cause.UNKNOWN, text, settled_by=watch(message), also=(Cause.CAPACITY,))
    if message.variant == "tf-device":
        return Hypothesis(
            Cause.OTHER_PROCESS,
            f"{name} tried to reserve {format_size(wanted)} at start and was refused: someone "
            "else has memory on this device. It often retries with less, which is harmless.",
            Confidence.LIKELY,
            "nvidia-smi names who holds it.",
        )
    return by_its_figures(name, message)


def _host(message: OomMessage) -> Hypothesis:
    is_kill = message.sub_kind in KILLS and message.variant not in TOLD_KILLS
    is_told = "space" in message.text
    # These give no reason, or are what people think.
    is_likely = is_kill or message.variant == "told"
    is_likely |= message.variant == "nccl-shm" and not is_told
    if message.variant in TOLD_KILLS:
        summary = (
            f"{TOLD_KILLS[message.variant]} says that it killed a process because the host's "
            "memory ran out."
        )
    elif message.sub_kind == "dev-shm":
        most = "most likely " if is_likely else ""
        summary = f"The shared memory of the host (/dev/shm) {most}ran out, not the GPU's memory"
        summary += ", and not the disk." if is_told else "."
    elif is_kill:
        summary = "The process was killed, most often by the host's out-of-memory killer."
    else:
        summary = "The host ran out of memory, not the GPU."
        if message.variant == "told":
            summary = "According to the text, it is the host's memory that is short, not the GPU's."
        if message.requested_bytes is not None:
            asked = format_size(message.requested_bytes)
            summary = f"The host, not the GPU, could not satisfy a request of {asked}."
    return Hypothesis(
        Cause.HOST_MEMORY,
        summary,
        Confidence.LIKELY if is_likely else Confidence.PROVEN,
        SHOWS_KILL if is_kill else "",
    )


_ON_CHIP: Final = re.compile(
    r"[Rr]equired: (\d{1,12}), ?,? ?[Hh]ardware limit(?:ation)?: (\d{1,12})"
)
"""Bytes of on-chip memory of a multiprocessor, as Triton prints them (triton/runtime/errors.py)."""


def _not_memory(message: OomMessage) -> Hypothesis:
    if message.kind == "shared-memory":
        told = _ON_CHIP.search(message.text)
        figures = f": {format_size(int(told[1]))} of {format_size(int(told[2]))}" if told else ""
        summary = (
            "A kernel needs more on-chip memory than a core of the TPU has; HBM is not short."
            if message.backend == "jax"
            else "A kernel needs more on-chip shared memory or registers than a multiprocessor "
            f"has{figures}; device memory is not short."
        )
    else:
        what = NEGATIVES.get(message.sub_kind)
        summary = "This error is not about memory running out" + (f": {what}." if what else ".")
    finds = "Run with CUDA_LAUNCH_BLOCKING=1, or on the CPU: the traceback then names the line."
    settled_by = finds if message.sub_kind in OF_KERNEL else ""
    return Hypothesis(Cause.NOT_MEMORY, summary, Confidence.LIKELY, settled_by)


def _framework(message: OomMessage) -> str:
    engine = engine_of(message)
    if engine is not None:
        return engine.name
    return {"vllm": "vLLM", "mps": "MPS"}.get(message.backend, "The program")


_OF_KIND: Final = {
    "driver-no-figures": _driver,
    "cublas": _library,
    "cudnn": _library,
    "nccl": _library,
    "kv-cache": _kv_cache,
    "jax": _foreign,
    "tf": _foreign,
    "ggml": _foreign,
    "other-framework": _foreign,
    "host-ram": _host,
    "shared-memory": _not_memory,
    "negative": _not_memory,
}
