"""FD5xx: memory of other processes, other libraries and other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.model.story import FAILURES, Scene, SceneKind
from fragdoctor.rules.failed_request import CONTEXT_ALLOWANCE_BYTES
from fragdoctor.rules.rule import Context, Found, needed, rule
from fragdoctor.units import format_count, format_share, format_size, plural


@rule("FD501", Severity.WARNING)
def other_process(context: Context) -> Iterator[Found]:
    """Another process holds memory of the device.

    What it finds. Memory of other processes, listed in the message or left over when everything of
    this process is deducted from the device.

    Why it costs memory. A device is shared by all processes on it: leftover workers, notebooks,
    other ranks that all chose device 0.

    Evidence used. Device size, free memory, processes and own memory as printed in the message.

    What to do. nvidia-smi names the holders: end leftovers, give each rank its own device.

    What it can get wrong. In a container the listed process may be this very one; it is left out
    where its size fits. Without process lines the remainder may be other libraries of this process.

    Example. Process 4242 holds 6.35 of 8 GiB.

    References. torch.cuda.mem_get_info; torch.cuda.set_device.
    """
    r = context.need_request()
    why = "no input says how large the device is and what others hold"
    held = needed(r.other_bytes, why)
    missing = max(1, r.requested_bytes - (r.free_bytes or 0))
    if held < missing:
        return
    pids = ", ".join(str(p.pid) for p in r.other_processes)
    who = f"Process {pids} holds" if pids else "Others outside this PyTorch hold about"
    yield Found(
        f"{who} {format_size(held)} of {format_size(r.total_bytes)} "
        f"({format_share(held, r.total_bytes or 0)}).",
        confidence=Confidence.PROVEN if pids else Confidence.POSSIBLE,
        n_bytes=held,
        evidence=(Evidence("held by others", held, "bytes", r.source),),
    )


@rule("FD502", Severity.WARNING)
def memory_outside_pytorch(context: Context) -> Iterator[Found]:
    """This process holds much memory outside PyTorch's cache.

    What it finds. More than about 1.5 GiB between what the driver counts for this process and what
    PyTorch reserved.

    Why it costs memory. Context and libraries (NCCL, cuDNN, TensorRT), other frameworks that
    preallocate and CUDA graphs take memory that the caching allocator neither sees nor frees.

    Evidence used. The message's "this process has" and the reserved figure.

    What to do. Cap other frameworks (XLA_PYTHON_CLIENT_PREALLOCATE=false, TensorFlow's memory
    growth), fewer communicators, CUDA_MODULE_LOADING=LAZY.

    What it can get wrong. 0.3 to 0.9 GiB of context are normal and not reported.

    Example. 22.90 GiB in use by the process, 19.05 GiB of them reserved by PyTorch.

    References. CUDA semantics: Memory management.
    """
    r = context.need_request()
    why = "the message does not print the memory of this process"
    outside = needed(r.non_pytorch_bytes, why)
    if outside <= CONTEXT_ALLOWANCE_BYTES:
        return
    yield Found(
        f"{format_size(outside)} of this process's {format_size(r.process_bytes)} lie outside "
        "PyTorch's cache.",
        confidence=Confidence.PROVEN,
        n_bytes=outside,
        evidence=(Evidence("outside PyTorch", outside, "bytes", r.source),),
    )


@rule("FD503", Severity.INFO)
def several_ranks(context: Context) -> Iterator[Found]:
    """Several ranks ran out of memory in the same log.

    What it finds. Messages of more than one rank, and whether they name the same device.

    Why it costs memory. Ranks that share a device by mistake divide it among themselves; ranks that
    fail on devices of their own share the cause.

    Evidence used. Rank prefixes and device numbers of the messages.

    What to do. Same device: torch.cuda.set_device(local_rank) before anything else. Different
    devices: the first message is the one to read.

    What it can get wrong. With CUDA_VISIBLE_DEVICES every rank calls its own device 0, which is no
    mistake; ranks of other machines count their devices anew.

    Example. Ranks 0 to 3 all fail on GPU 0.

    References. torch.distributed.run: Definitions; torch.cuda.set_device.
    """
    context.need_message()
    log = context.case.oom
    messages = () if log is None else log.messages
    failed = [m for m in messages if m.is_device_oom and m.rank is not None]
    ranks = sorted({m.rank for m in failed if m.rank is not None})
    if len(ranks) < 2:
        return
    devices = {m.device_index for m in failed}
    same = len(devices) == 1 and None not in devices
    where = f"all on device {devices.pop()}" if same else "on devices of their own"
    yield Found(
        f"{format_count(len(ranks))} ranks ran out of memory, {where}; the first is rank "
        f"{failed[0].rank} in line {format_count(failed[0].line)}.",
        severity=Severity.WARNING if same else Severity.INFO,
        confidence=Confidence.POSSIBLE if same else Confidence.PROVEN,
        evidence=(Evidence("ranks", len(ranks), "count", "oom message"),),
    )


NAMES: Final = {"cublas": "cuBLAS", "cudnn": "cuDNN", "nccl": "NCCL"}


@rule("FD504", Severity.ERROR)
def starved_library(context: Context) -> Iterator[Found]:
    """A CUDA library found no memory for itself.

    What it finds. Messages of these libraries about failed allocations or initialization.

    Why it costs memory. They allocate outside PyTorch's cache. When the cache holds the whole
    device, nothing flushes it for them.

    Evidence used. The text of the message.

    What to do. Leave headroom: a memory fraction of 0.95, torch.cuda.empty_cache() before, handles
    and communicators created early.

    What it can get wrong. An index out of range on the device ruins the context and shows as the
    same message: rerun with CUDA_LAUNCH_BLOCKING=1.

    Example. CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle).

    References. CUDA semantics: cuBLAS workspaces; Memory management.
    """
    message = context.need_message()
    if message.kind not in NAMES:
        return
    yield Found(
        f"{NAMES[message.kind]} failed for lack of memory outside PyTorch's cache"
        f"{'' if message.is_device_oom else ', or of support for these shapes'}.",
        confidence=Confidence.LIKELY if message.is_device_oom else Confidence.POSSIBLE,
        key=message.kind,
    )


@rule("FD505", Severity.ERROR)
def host_memory(context: Context) -> Iterator[Found]:
    """The host's memory ran out, not the GPU's.

    What it finds. Kills by the operating system, failed CPU allocations, a full /dev/shm,
    page-locked memory that could not be allocated.

    Why it costs memory. Data loading, checkpoints and page-locked buffers live in host memory; no
    GPU setting changes that.

    Evidence used. The text of the log: exit codes, signals, the CPU allocator's message.

    What to do. Fewer workers, lazy loading of checkpoints, a larger /dev/shm, a higher limit of the
    container.

    What it can get wrong. A SIGKILL may come from a person or a scheduler for another reason; only
    the kernel's log proves it.

    Example. exitcode: -9 without any traceback.

    References. torch.utils.data: Multi-process data loading.
    """
    message = context.need_message()
    if message.kind != "host-ram" and message.sub_kind != "pinned-host":
        return
    yield Found(
        f"Line {message.line} is about host memory ({message.sub_kind or message.variant}).",
        confidence=Confidence.LIKELY,
        n_bytes=message.requested_bytes or 0,
        key=message.sub_kind,
    )


@rule("FD506", Severity.INFO)
def consequence_errors(context: Context) -> Iterator[Found]:
    """Errors follow from an earlier failure.

    What it finds. Asserts, CUDA errors, time-outs of collectives and kills that come after a
    failure of the same process, or of a rank that the others wait for.

    Why it costs memory. It does not: it costs time to chase what goes away with the first failure.

    Evidence used. Order of the lines, ranks, process ids, trials and restarts as printed.

    What to do. Cure the first failure. After a device-side assert or an illegal access the process
    is no longer usable: start a new one, do not catch the error and go on.

    What it can get wrong. A log that prints no ranks or trials may mix processes. An assert after a
    caught OOM may be a bug of its own that the smaller batch brought out.

    Example. OOM of rank 2, then a watchdog time-out of rank 0.

    References. CUDA Runtime API: errors from previous, asynchronous launches; NCCL watchdog.
    """
    events = needed(context.story, "no log with several events was given").events
    grouped: dict[int, list[Scene]] = {}
    for event in events:
        if event.caused_by is not None and event.kind in FAILURES:
            grouped.setdefault(event.caused_by, []).append(event)
    for cause, followers in grouped.items():
        first = events[cause]
        kinds = ", ".join(dict.fromkeys(e.kind.value for e in followers))
        is_sure = all(e.confidence is Confidence.PROVEN for e in followers)
        verb = "follows" if len(followers) == 1 else "follow"
        yield Found(
            f"{plural(len(followers), 'later error')} ({kinds}) {verb} from the "
            f"{first.kind.value} in line {format_count(first.line)}: {followers[0].reason}.",
            confidence=Confidence.PROVEN if is_sure else Confidence.LIKELY,
            evidence=(Evidence("consequences", len(followers), "count", "log"),),
            key=f"{first.kind.value} {kinds}",
        )


@rule("FD507", Severity.WARNING)
def separate_failure(context: Context) -> Iterator[Found]:
    """A failure of the device that no OOM explains.

    What it finds. Device-side asserts, illegal accesses and CUDA errors that come before the first
    OOM, or in another rank, process or trial.

    Why it costs memory. It does not; but more memory will not cure it, and later errors of that
    process follow from it.

    Evidence used. Order of the lines, ranks, process ids, trials and restarts as printed.

    What to do. Run again with CUDA_LAUNCH_BLOCKING=1: the traceback then names the line. Most
    asserts are indices out of range (labels, tokens, embedding sizes).

    What it can get wrong. A log that prints no ranks or trials may mix processes.

    Example. Assertion `srcIndex < srcSelectDimSize` failed, and 200 lines later an OOM.

    References. torch.cuda: Asynchronous execution; CUDA_LAUNCH_BLOCKING.
    """
    seen: set[SceneKind] = set()
    for event in needed(context.story, "no log with several events was given").events:
        is_own = event.caused_by is None and event.kind in (
            SceneKind.DEVICE_ASSERT,
            SceneKind.ILLEGAL_ACCESS,
            SceneKind.CUDA_ERROR,
        )
        if not is_own or event.kind in seen:
            continue
        seen.add(event.kind)
        why = event.reason or "no OOM of its process came before it"
        yield Found(
            f"The {event.kind.value} in line {format_count(event.line)} does not follow from "
            f"an OOM: {why}.",
            confidence=Confidence.LIKELY,
            evidence=(Evidence("line", event.line, "count", "log"),),
            key=event.kind.value,
        )
