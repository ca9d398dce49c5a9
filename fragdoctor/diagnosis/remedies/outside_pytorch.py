"""Remedies outside of PyTorch's allocator: processes, libraries, hosts, frameworks.

Some ask for one more check: a shape, a call, a recording.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from fragdoctor.diagnosis.decision import is_integrated
from fragdoctor.diagnosis.remedies.host_memory import OF_SERVERS
from fragdoctor.diagnosis.remedies.less_at_once import less_of_batch
from fragdoctor.diagnosis.remedies.remedy import (
    CLOSED,
    JudgedCase,
    Proposal,
    Remedy,
    Weight,
    proposes,
)
from fragdoctor.diagnosis.remedies.serving import LEAST_UTILIZATION
from fragdoctor.diagnosis.verdict_message import library_of
from fragdoctor.model.case import GPU_EMPTY, OtherProcess
from fragdoctor.model.diagnosis import Cause, Predicted
from fragdoctor.model.finding import Confidence, line_text
from fragdoctor.model.frameworks import OWN_LOOPS, SERVERS, Change, words_for
from fragdoctor.model.gpus import TYPICAL_CONTEXT_BYTES
from fragdoctor.rules.failed_request import CONTEXT_ALLOWANCE_BYTES, FailedRequest
from fragdoctor.rules.told_shapes import told_broadcast
from fragdoctor.rules.traceback_signs import FIRST_GPU, is_in_backward_pass
from fragdoctor.units import format_count, format_size

PEERS_LOOK_THE_SAME: Final = (
    "Ranks that all use device 0 look the same: torch.cuda.set_device(local_rank)."
)
OWN_DEVICE: Final = (
    "torch.cuda.set_device(local_rank) before anything else touches CUDA, or "
    "CUDA_VISIBLE_DEVICES=$LOCAL_RANK for each rank: these look like the workers of one program"
)

MIN_PEERS: Final = 3
"""Two processes of equal size may be a coincidence; three are workers of one program."""

NEAR_IDS: Final = 10
"""A launcher starts its workers at once, and the kernel numbers processes in order: four workers of
torchrun and of torch.multiprocessing.spawn() are 1 apart (2.13, Linux), more on a busy machine."""


def are_peers(listed: Sequence[OtherProcess]) -> bool:
    """Return whether processes started together, or hold the same, as one program's workers do."""
    ids = sorted(p.pid for p in listed)
    sizes = Counter(p.n_bytes for p in listed)
    is_row = len(ids) > 1 and all(b - a < NEAR_IDS for a, b in pairwise(ids))
    return is_row or max(sizes.values(), default=0) >= MIN_PEERS


WORKERS: Final = {
    r"\[gw\d{1,3}\]|\bxdist\b|\bpytest\b|\.py::\w": "pytest -n",
    OF_SERVERS: "gunicorn -w, uvicorn --workers, celery -c",
    r"\bray\.tune\b|\btune\.(?:run|Tuner)\b|resources_per_trial": "a larger share of a GPU for "
    "each trial of Ray Tune",
}
"""How to run fewer of the workers that a text speaks of, by its words."""


def _fewer(case: JudgedCase) -> str:
    """Return how to run fewer workers where a program starts several on one GPU, or ""."""
    said = "" if case.message is None else case.message.said
    how = next((how for words, how in WORKERS.items() if re.search(words, said)), "")
    return (
        how and f"with {how}, run only as many as fit (fragdoctor pack), or give each its own GPU"
    )


def _beside_server(case: JudgedCase, listed: Sequence[OtherProcess]) -> str:
    """Return how to lower the share of a server if the text names it as a listed process, or ""."""
    said = "" if case.message is None else case.message.said
    names = "|".join(f.name for f in case.frameworks if f.name in SERVERS)
    ids = "|".join(str(p.pid) for p in listed)
    named = names and ids and re.search(rf"(?i)\b({ids})\b[^|\n]{{0,60}}?\b(?:{names})\b", said)
    option = words_for(case.frameworks, Change.SHARE)
    return f"lower {option[1]} of the server (process {named[1]})" if named and option else ""


def _share(case: JudgedCase) -> str:
    """Return the option with which a server that takes a share leaves room for the others."""
    r, option = case.failed_request, words_for(case.frameworks, Change.SHARE)
    if option is None or r is None or not r.total_bytes or not r.other_bytes:
        return ""
    left = math.floor(100 * (1 - (r.other_bytes + TYPICAL_CONTEXT_BYTES) / r.total_bytes)) / 100
    return "" if left < LEAST_UTILIZATION else f"{option[1]} {left:.2f} or less"


def _beside_training(case: JudgedCase) -> str:
    """Return how to lower the share of a server that runs on the GPU of the training, or ""."""
    trainers = [f for f in case.frameworks if f.name in OWN_LOOPS]
    option = words_for((*trainers, *case.frameworks), Change.SHARE)
    is_served = any(f.name in SERVERS or f.name == "verl" for f in case.frameworks)
    if option is None or not trainers or not is_served:
        return ""
    return f"lower {option[1]}; {OFFLOADED_ROLLOUT}"


BESIDE_TRAINING: Final = "Give the server beside the training a smaller share of the GPU"
OFFLOADED_ROLLOUT: Final = (
    "move what waits to the host: the server sleeps while the model is updated "
    "(vllm_enable_sleep_mode, free_cache_engine), and the trained weights and states leave the GPU "
    "while it generates (param_offload)"
)


def _way_out(case: JudgedCase, listed: Sequence[OtherProcess]) -> tuple[str, str]:
    """Return title and change for memory that others hold; a title of "" is the usual one."""
    pids = ", ".join(str(p.pid) for p in listed)
    end = f"kill or move {'process' if len(listed) == 1 else 'processes'} {pids}"
    if case.ledger.n_sharing > 1 and not pids:
        own = "give each a GPU of its own (CUDA_VISIBLE_DEVICES=N on its command)"
        fewer = _fewer(case) or f"run only as many as fit (fragdoctor pack), or {own}"
        return "Run fewer processes at a time on this GPU", fewer
    if are_peers(listed):
        if fewer := _fewer(case):
            return "Run fewer workers at a time on this GPU", fewer
        as_fit = "or run only as many as fit (fragdoctor pack)"
        title = "Give each rank or worker its own GPU, or run fewer at once"
        return title, f"{OWN_DEVICE}; otherwise {end}, {as_fit}"
    if served := _beside_server(case, listed):
        return "Give the server on this GPU a smaller share of it", served
    title = ""
    host = "; in a container, look from the host" if case.ledger.held_before else ""
    change = (
        "use nvidia-smi or fuser -v /dev/nvidia* to see who holds it, and kill leftover processes"
        f"{host}"
    )
    if trained := _beside_training(case):
        title, change = BESIDE_TRAINING, trained
    elif pids:
        change = end
    if share := _share(case):
        change += f"; or share the GPU: with {share} both fit"
    if case.cause is not Cause.OTHER_PROCESS:
        return title, change
    elsewhere, pick = _elsewhere(case)
    change = "" if case.ledger.uses_first else change
    return elsewhere or title, "; otherwise ".join(filter(None, (pick, change)))


def _elsewhere(case: JudgedCase) -> tuple[str, str]:
    """Return title and change for a run on other GPUs, or "" for both if none may be free."""
    ledger = case.ledger
    if ledger.free_gpu is not None:
        title = f"Run it on GPU {ledger.free_gpu}, which is free, or stop what is on this one"
        return title, f"CUDA_VISIBLE_DEVICES={ledger.free_gpu} on the command itself"
    if ledger.uses_first:
        pick = "put CUDA_VISIBLE_DEVICES=N on the command itself, where that GPU is then cuda:0; "
        pick += "or call torch.cuda.set_device(N) before anything else touches CUDA"
        return "Hide the other GPUs from the program", pick
    if ledger.has_others or _has_several(case):
        pick = (
            "find a free one with nvidia-smi, and put CUDA_VISIBLE_DEVICES=N on the command itself"
        )
        return "Run it on a GPU that is free, or stop what is on this one", pick
    return "", ""


_LAUNCHED: Final = r"\btorchrun\b|\bnproc|\baccelerate launch\b|\bdeepspeed\b|torch\.distributed"


def _has_several(case: JudgedCase) -> bool:
    """Return whether the machine has several GPUs, of which the program uses one."""
    m, told = case.message, case.told
    if told.visible_gpus:
        return "," not in told.visible_gpus
    is_launched = m is None or m.rank is not None or re.search(_LAUNCHED, m.said) is not None
    return told.n_gpus > 1 and not is_launched


@proposes("Stop the other processes on this GPU")
def free_other_process(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose a look at the other processes on the device, and ending them."""
    is_checked = case.message is not None and case.message.sub_kind == "startup-check"
    if is_checked or not case.supports(Cause.OTHER_PROCESS):  # the server's remedy says it
        return
    is_main = case.cause is Cause.OTHER_PROCESS
    weight = Weight.CURES if is_main else Weight.MAY_HELP
    r = case.failed_request
    held = r.other_bytes if r is not None else None
    can_leave = case.sign is not None and case.sign.can_leave_gpu and not case.has_only_begun
    # A call that works on the model asks for it piece by piece: the request is not all of it.
    is_more = case.is_of_model or r is None or r.requested_bytes > (held or 0)
    if is_main and can_leave and is_more:
        weight = Weight.HELPS  # the call need not be on this device at all
    listed = () if r is None else r.other_processes
    is_of_ranks = case.sign is not None and case.sign.name == FIRST_GPU
    if is_of_ranks and not (listed or case.ledger.is_shared or case.ledger.uses_first):
        return  # the others are this program's own
    peers = are_peers(listed)
    may_be_own = r is not None and listed and r.process_bytes is None
    title, change = _way_out(case, listed)
    yield remedy.proposal(
        title=title or remedy.title,
        weight=weight,
        confidence=Confidence.LIKELY if listed or is_main else Confidence.POSSIBLE,
        change=change,
        why=case.verdict.summary
        if is_main
        else f"{format_size(held)} may be held by other processes."
        if held
        else "A snapshot does not show other processes.",
        cost="None, if the other process is a leftover.",
        caveats=(
            *(() if peers else (PEERS_LOOK_THE_SAME,)),
            *(("In a container the listed process may be this one.",) if may_be_own else ()),
        ),
        predicted=Predicted(fits=held >= r.uncovered_bytes, method="arithmetic")
        if r is not None and held is not None and listed
        else None,
        saves_bytes=held,
    )


@proposes("Limit how much GPU memory other libraries use in this process")
def cap_other_libraries(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose capping them if their memory is the cause, or is known to be a lot beside it."""
    # What a server holds there are its own graphs and buffers, which its options limit.
    is_served = any(f.name in SERVERS for f in case.frameworks)
    if case.is_library_failure or is_served or case.backend == "mps":
        return
    r = case.failed_request
    held = r.non_pytorch_bytes if r is not None else None
    is_main = case.cause is Cause.NON_PYTORCH_MEMORY
    is_beside = case.supports(Cause.NON_PYTORCH_MEMORY)
    trained = _beside_training(case)
    if not is_main and not (is_beside and held and held > CONTEXT_ALLOWANCE_BYTES):
        return
    yield remedy.proposal(
        title=BESIDE_TRAINING if trained else "",
        weight=Weight.CURES if is_main else Weight.MAY_HELP,
        change=trained
        or "run fewer simulator environments (num_envs); set XLA_PYTHON_CLIENT_PREALLOCATE=false "
        "for JAX, or set_memory_growth for TensorFlow; use fewer NCCL communicators and channels "
        "(NCCL_MAX_NCHANNELS), and smaller TensorRT workspaces; set CUDA_MODULE_LOADING=LAZY "
        "before CUDA 12.2, where it became the default",
        why=f"{format_size(held)} of this process is outside PyTorch's cache."
        if held is not None
        else "Part of the device is held outside PyTorch's cache.",
        cost="Other libraries may run slower.",
        caveats=("A CUDA context of 0.3 to 0.9 GiB per process is normal and stays.",),
        saves_bytes=held,
    )


@proposes("Leave GPU memory for the library")
def library_headroom(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose headroom if a library failed that allocates its own memory."""
    if not case.is_library_failure or case.message is None or case.is_of_other_program:
        return
    is_open = case.supports(Cause.NOT_MEMORY) and case.message.is_device_oom
    if case.cause in CLOSED and not is_open:
        return
    library = library_of(case.message).partition(",")[0]
    room = (
        "call torch.cuda.set_per_process_memory_fraction(0.95), and create handles and "
        "communicators early, for example with one small matmul or all_reduce at startup"
    )
    less = "use a smaller batch; " if case.kind in ("cublas", "cudnn") else ""
    yield remedy.proposal(
        title="Find out whether the GPU is full or an index is out of range" if is_open else "",
        weight=Weight.CURES if is_open else Weight.HELPS,
        change="run nvidia-smi while the program runs: if the GPU is full, a smaller batch fits; "
        "run with CUDA_LAUNCH_BLOCKING=1, or the same step on the CPU, to see the line with a bad "
        "index; if it is neither, install a build of PyTorch that fits the GPU and its driver, "
        f"without other CUDA libraries in LD_LIBRARY_PATH. Against a full GPU, also {room}"
        if is_open
        else less + room,
        why=f"{library} allocates for itself; a cache that fills the device leaves it no room.",
        cost="" if is_open else "PyTorch has 5% less memory.",
    )


_RESTARTS: Final = {
    "driver-state": "with no program on the GPU, run sudo rmmod nvidia_uvm && sudo modprobe "
    "nvidia_uvm, or reboot; dmesg shows why (Xid, version mismatch). In a container, make sure "
    "that /dev/nvidia-uvm is there; set CUDA_VISIBLE_DEVICES only before the program starts",
    "forked": "call multiprocessing.set_start_method('spawn'), or give the DataLoader "
    "multiprocessing_context='spawn'; better, let the Dataset return CPU tensors and call .cuda() "
    "in the training loop. In a process that was not forked, reload nvidia_uvm or reboot",
}
"""What starts CUDA again, by the finer kind of the message."""


@proposes("Reload the driver's module, or reboot")
def restart_cuda(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose it where CUDA could not start, which no memory changes."""
    failure = "" if case.message is None else case.message.sub_kind
    if failure not in _RESTARTS or case.cause is not Cause.NOT_MEMORY:
        return
    yield remedy.proposal(
        title="Start the workers with spawn, or keep CUDA out of them"
        if failure == "forked"
        else "",
        weight=Weight.CURES,
        change=_RESTARTS[failure],
        why=case.verdict.summary,
    )


@proposes("Find out what refused the request: the GPU had room")
def find_the_limit(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose where to look for a limit that no figure of the message shows."""
    r = case.failed_request
    if case.cause is not Cause.UNKNOWN:
        return
    if case.message is not None and case.message.sub_kind == GPU_EMPTY:
        yield remedy.proposal(
            title="Find out what refused the request: the GPU looks empty",
            weight=Weight.MAY_HELP,
            change="check ulimit -v and the memory limit of the job or container, since CUDA "
            "reserves addresses for all of the host's and the GPUs' memory; check nvidia-smi -q "
            "-d COMPUTE for an exclusive mode, CUDA_VISIBLE_DEVICES for another GPU, and on "
            "Windows the page file; then reboot",
            why=case.verdict.summary,
        )
    if r is None:
        return
    # XPU's messages do not print free memory, but the device's size says as much. Other
    # messages without that figure were cut.
    unreserved = (r.total_bytes or 0) - (r.reserved_bytes or 0) if r.backend == "xpu" else 0
    is_roomy = r.free_bytes is None and unreserved >= 2 * r.requested_bytes
    if not (r.is_covered_by_free or is_roomy):
        return
    fraction = "" if not r.may_hide_limit else "set_per_process_memory_fraction() or "
    yield remedy.proposal(
        weight=Weight.MAY_HELP,
        change=f"look for {fraction}a memory option of the program; on Windows enlarge the "
        "page file, against which GPU memory counts, and close other programs; check ulimit -v; "
        "run nvidia-smi meanwhile to see a process that comes and goes",
        why=case.verdict.summary,
    )


@proposes("Turn expandable segments off")
def drop_expandable_segments(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose it for errors of driver calls that only expandable segments make."""
    if case.message is None or case.message.sub_kind != "driver-api":
        return
    yield remedy.proposal(
        weight=Weight.CURES,
        setting=case.assignment("expandable_segments:False"),
        why="'CUDA driver error' comes from the calls that map expandable segments. They fail "
        "on WSL2, on Jetson and in some containers with memory free; without them an error "
        "prints its figures.",
        cost="More fragmentation where shapes vary.",
        caveats=("A library may set it on import: look for it in os.environ.",),
    )


@proposes("Use PyTorch's own allocator")
def native_backend(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose it where the pool of cudaMallocAsync has what was asked for, in vain."""
    r = case.failed_request
    if r is None or not r.pool_is_unprinted or case.cause is not Cause.FRAGMENTATION:
        return
    is_comfy = any(f.name == "ComfyUI" for f in case.frameworks)
    yield remedy.proposal(
        weight=Weight.CURES,
        setting="" if is_comfy else case.assignment("backend:native"),
        change="start ComfyUI with --disable-cuda-malloc" if is_comfy else "",
        why=case.verdict.summary,
        cost="None; it is PyTorch's default.",
    )


@proposes("Give the integrated GPU more of the machine's memory")
def more_for_integrated(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose it for an integrated GPU, whose memory is what the BIOS gives it."""
    if case.failed_request is None or not is_integrated(case.failed_request):
        return
    yield remedy.proposal(
        weight=Weight.CURES,
        change="set a larger UMA frame buffer (also called VRAM or iGPU memory) in the BIOS, as "
        "much as it offers; where it offers no choice, use a newer Linux kernel and ROCm, which "
        "can also use ordinary memory (GTT); or run it on the CPU, which has all of the memory",
        why=case.verdict.summary,
        cost="Less memory for the rest of the machine.",
    )


@proposes("Use smaller blocks or fewer stages in the kernel")
def smaller_kernel_blocks(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose smaller blocks if a kernel needs more on-chip memory than the GPU has."""
    if case.kind != "shared-memory":
        return
    is_tpu = case.backend == "jax"
    yield remedy.proposal(
        title="Change the operation, or the compiler" if is_tpu else "",
        weight=Weight.HELPS,
        confidence=Confidence.POSSIBLE if is_tpu else Confidence.LIKELY,
        change="use smaller or more even shapes (multiples of 8 and 128) in the named operation, "
        "or smaller blocks if it is a Pallas kernel; upgrade jaxlib, libtpu or torch_xla: a "
        "kernel that XLA chose itself should fit, so this is worth a bug report"
        if is_tpu
        else "lower BLOCK sizes or num_stages of the Triton kernel, or use a build for this GPU",
        why="On-chip memory is a property of the core: a smaller model or batch, or free "
        "device memory, changes nothing by itself.",
        cost="The kernel may run slower.",
    )


HEADS: Final = 32
"""Batch times heads of the worked example: a model of 7 billion parameters, batch 1."""


SHAPE_CHANGE: Final = (
    "print(x.shape, x.dtype) before the call; look for sizes that are negative or come from NaN, "
    "a huge index (scatter, one_hot and bincount size their result by the largest), a broadcast "
    "of (N, 1) with (1, N), or a damaged checkpoint"
)
SMALLER_TENSOR: Final = (
    "use a shorter sequence, a smaller image (tiles), graph or batch, or do the work in parts; if "
    "it is not meant to be that large"
)


@proposes("Print the shape at the failing line and correct it")
def fix_shape(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose a look at the shape at the failing line: a size went wrong."""
    if told_broadcast(case.message) and case.supports(Cause.SIZE_BUG):
        yield remedy.proposal(
            title="Give both tensors the same shape before they are combined",
            weight=Weight.CURES,
            change="squeeze() or unsqueeze() one of them, or call a.view_as(b), so that each "
            "element meets its own; if all pairs are meant, compute a part of them at a time",
            why=case.verdict.summary,
        )
        return
    r = case.failed_request
    is_main = case.cause is Cause.SIZE_BUG
    is_beyond = r is not None and r.is_alone_too_large and case.is_allocator_case
    if not (case.supports(Cause.SIZE_BUG) or (is_beyond and case.cause is Cause.CAPACITY)):
        return
    line = case.asking_stack[:1]
    at = f" at {line_text(line[0])}" if line else ""
    if is_main:
        title, change = f"Print the shape{at or ' at the failing line'} and correct it", ""
    else:
        title, change = f"Shrink the one huge tensor{at}", f"{SMALLER_TENSOR}: "
    change += SHAPE_CHANGE
    yield remedy.proposal(
        title=title,
        locations=case.asking_stack,
        weight=Weight.CURES if is_main else Weight.FITS,
        confidence=Confidence.PROVEN if is_main else Confidence.POSSIBLE,
        change=change,
        why=case.verdict.summary if is_main or r is None else one_tensor_text(r),
    )


def one_tensor_text(r: FailedRequest) -> str:
    """Return what a single huge tensor usually is."""
    length = round(math.sqrt(r.requested_bytes / 2 / HEADS), -2)
    return (
        f"One tensor of {format_size(r.requested_bytes)} is usually attention scores (batch x "
        f"heads x length x length; with {HEADS} for batch x heads in 16 bits, a length of about "
        f"{format_count(int(length))}) or a shape that is not what was meant."
    )


@proposes("Check whether the GPU is full, and what fills it")
def locate_driver_call(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose finding the call behind a driver's message without figures."""
    message = case.message
    if message is None or case.cause is not Cause.UNKNOWN:
        return
    if message.kind != "driver-no-figures" or message.sub_kind == "driver-api":
        return
    if case.is_of_other_program:
        return
    title = ""
    change = (
        "run nvidia-smi (for the GPU) and free -h (for the host) while the program runs, and put "
        "less on whichever fills up"
        if message.sub_kind == "unread"
        else "run nvidia-smi while the program runs: if another process fills the GPU, end it, or "
        "pick a free GPU (CUDA_VISIBLE_DEVICES); if this program does, use a smaller batch, input "
        "or model; if there is room left, try pin_memory=False in the DataLoader, and "
        "CUDA_LAUNCH_BLOCKING=1, which makes the traceback name the call"
    )
    if is_in_backward_pass(message):  # activations that this program made are there by then
        title, less = less_of_batch(case)
        change = (
            f"{less}; run nvidia-smi meanwhile to see whether another process takes part of the GPU"
        )
    yield remedy.proposal(
        title=title,
        weight=Weight.MAY_HELP,
        change=change,
        why="The driver's message does not say whether device memory, pinned host memory or "
        "the context ran out.",
        cost="A slow run for diagnosis.",
    )


@proposes("Record a memory snapshot at the failure")
def record_snapshot(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose a recording if none shows what is open: who holds memory, or which line keeps it."""
    analysis = case.context.analysis
    is_found = analysis is not None and (analysis.kept or case.context.weight_copies) is not None
    is_leak = case.supports(Cause.LEAK) and not is_found
    is_open = analysis is None and case.cause not in CLOSED and case.is_allocator_case
    if not (is_leak or is_open):
        return
    yield remedy.proposal(
        title="Find the line that keeps memory" if is_leak else "",
        weight=(Weight.CURES if case.sign is None else Weight.HELPS) if is_leak else Weight.ASKS,
        confidence=Confidence.POSSIBLE if is_leak else Confidence.LIKELY,
        change="start the program with fragdoctor run, which diagnoses the failure itself; or, "
        "where that cannot be installed, call "
        "torch.cuda.memory._record_memory_history(max_entries=100000) at the start and "
        "torch.cuda.memory._dump_snapshot('oom.pickle') on the error, then run fragdoctor analyze "
        "oom.pickle",
        why=case.verdict.settled_by or "A snapshot shows which lines hold and strand the memory.",
        cost="A few microseconds per allocation.",
    )
