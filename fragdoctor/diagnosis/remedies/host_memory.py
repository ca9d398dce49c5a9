"""Remedies for the memory of the host: RAM, page-locked memory and /dev/shm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fragdoctor.diagnosis.remedies.framework_words import words_in
from fragdoctor.diagnosis.remedies.remedy import JudgedCase, Proposal, Remedy, Weight, proposes
from fragdoctor.lazy import regex
from fragdoctor.model.case import OomMessage
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.frameworks import Change
from fragdoctor.rules.traceback_signs import is_seen_to_grow
from fragdoctor.units import GIB, format_size

HOST_CHANGE: Final = (
    "load checkpoints with mmap=True or low_cpu_mem_usage, and not in every rank at once; use "
    "fewer DataLoader workers and a smaller prefetch_factor; offload less to the CPU; raise the "
    "limit of the container or scheduler"
)
LIMIT_CHANGE: Final = (
    "raise the limit first: --mem of sbatch, resources.limits.memory of the pod, --memory of "
    "docker run; the job's accounting (sacct, kubectl top) shows how much it took"
)
_PAGE_FILE: Final = (
    "use a larger page file (System > Advanced system settings > Performance > Advanced > Virtual "
    "memory: system managed, on a drive with room), since Windows commits no more memory than RAM "
    "and the page file have together"
)
_FEWER_WORKERS: Final = (
    "keep the data in one array, tensor or memory map (np.load(..., mmap_mode='r')) that all "
    "workers share, or use fewer DataLoader workers, each of which holds a copy of the dataset's "
    "Python objects; use a smaller prefetch_factor; read samples on demand"
)
_LESS_ON_HOST: Final = (
    "use fewer DataLoader workers, each of which loads CUDA's libraries on Windows; keep fewer "
    "blocks or layers on the host, and do not page-lock them (pin_memory=False, no non_blocking); "
    "enlarge the page file or swap, or in WSL2 memory= in .wslconfig"
)
_KEEP_LESS: Final = (
    "keep only what you need from each batch (a number, the arg max, the metric's state) instead "
    "of all outputs or features, or write them to disk as they come; then use fewer or smaller "
    "samples"
)
_LESS_DATA: Final = (
    "hold less of the data in memory: read samples on demand, or process the data in parts; use "
    "fewer DataLoader workers or Pool processes, each of which holds a copy; add RAM or swap"
)
_DATA: Final = regex(
    r"(?i)\bdata(?:sets?)?\b|pre-?process|\bpool\.\w*map|\bimages\b|\bvideos\b|\bscenes\b"
)
_WEIGHTS: Final = regex(
    r"(?i)\bshards\b|from_pretrained|checkpoint|\bload\w* (?:\w+ )?(?:model|weights)\b"
)
_NOTEBOOK: Final = regex(r"(?i)\bcolab\b|\bkaggle\b|\bipykernel_\d")
_FORKS: Final = regex(r"\bos\.fork\(|\bnum_workers\b|\b(?:number of|each) workers?\b")
OF_SERVERS: Final = r"\bgunicorn\b|\buvicorn\b|\bcelery\b"
"""Servers whose workers are not those of a DataLoader."""
_SERVES: Final = regex(rf"(?i){OF_SERVERS}")
HOST_CHANGES: Final = {
    "dataloader-killed": _FEWER_WORKERS,
    "cgroup-kill": f"{LIMIT_CHANGE}; then {HOST_CHANGE}",
    "page-file": f"{_PAGE_FILE}; use fewer DataLoader workers and processes, each of which loads "
    "PyTorch's libraries again",
    "windows-commit": f"{_PAGE_FILE}; close other programs; load smaller or fewer models at a time",
    "ray-memory": "run fewer tasks or actors at a time (num_cpus= or memory= of @ray.remote), "
    "keep smaller objects in the store, or use a node with more memory. "
    "RAY_memory_usage_threshold only moves the kill",
    "ray-worker": "look into that worker's own log first (ray logs worker-ID*), and into dmesg; "
    "if it was memory, run fewer tasks at a time (num_cpus= or memory= of @ray.remote), keep "
    "smaller blocks and objects in the store, or use a node with more memory",
    "notebook": "free what earlier cells left (del, or restart the session) and run only what is "
    "needed; choose a runtime with more RAM; read data from disk on demand (memory maps, "
    "streaming); load weights straight onto the GPU (device_map, low_cpu_mem_usage)",
    "evicted": "set the pod's resources.requests.memory as high as what it takes (kubectl top "
    "pod), so that it is put on a node with room and is not the first to go; use a larger node, "
    "or fewer pods on it; then use fewer DataLoader workers and load less at once",
    "ggml-host": "lower --ctx-size (n_ctx in Python), since the default is the context that the "
    "model was trained with; set --cache-type-k q8_0 and --cache-type-v q8_0; use a smaller "
    "quantization, or put more layers on the GPU (--n-gpu-layers)",
    "worker-gone": "use fewer worker processes: -npp and -nps of nnUNetv2_predict, "
    "nnUNet_n_proc_DA for nnU-Net's training, num_workers of a DataLoader; give the machine or "
    "container more memory",
    "mappings": "raise it (sysctl -w vm.max_map_count=1048576); pass fewer and larger tensors (one "
    "padded tensor in a sample instead of a list), and keep what a dataset loads in its __init__ "
    "as one array",
    "ggml-pinned": "set GGML_CUDA_NO_PINNED=1 in the environment, which makes llama.cpp use "
    "ordinary host memory; in WSL2 set a larger memory= in .wslconfig; then put fewer layers on "
    "the GPU",
    "pinned-host": "use fewer or smaller page-locked buffers (pin_memory=False in PyTorch's "
    "DataLoader): WSL2 and some containers allow few of them however much memory is free; in WSL2 "
    "set a larger memory= in .wslconfig",
}
"""Changes that use less of the host's memory, by the finer kind of the message."""

_LIMITS: Final = ("page-file", "windows-commit", "cgroup-kill")
"""Finer kinds of messages that name a limit, which can be raised."""

_OF_CONTAINER: Final = regex(r"\b137\b")
"""Docker and Kubernetes report a kill as exit code 128 + 9."""

HUGE_ON_HOST_BYTES: Final = 8 * GIB
"""A tensor as large as a small machine's memory: its own dimensions are too large."""


def host_change(case: JudgedCase) -> str:
    """Return the change that uses less host memory, by the message and its place."""
    message = case.message
    if message is None:
        return HOST_CHANGE
    return next(filter(None, _changes(case, message)), HOST_CHANGE)


def _changes(case: JudgedCase, message: OomMessage) -> Iterator[str]:
    """Yield what fits the message, its traceback and the text around it, in this order."""
    if case.ledger.needs_host:
        yield _LESS_ON_HOST
    words = words_in(case, Change.HOST_MEMORY)
    own = HOST_CHANGES.get(message.variant) or HOST_CHANGES.get(message.sub_kind, "")
    if words and message.sub_kind in _LIMITS:
        # The limit that was hit comes before what the framework could do with less.
        words = f"{own.partition(';')[0]}; {words}"
    yield words or own
    if _NOTEBOOK.search(message.said):
        yield HOST_CHANGES["notebook"]
    if _FORKS.search(message.said) and not _SERVES.search(message.said):
        yield _FEWER_WORKERS
    if is_seen_to_grow(message):
        yield _KEEP_LESS
    is_array, asked = message.variant == "numpy", message.requested_bytes
    if asked is not None and (is_array or asked >= HUGE_ON_HOST_BYTES):
        yield (
            f"a smaller input, tile or batch: {format_size(asked)} is one "
            f"{'NumPy array' if is_array else 'tensor on the CPU'}; print its shape at the failing "
            f"line{'; run fewer such processes at a time' if is_array else ''}"
        )
    calls = " ".join(frame.code for frame in message.frames)
    if _DATA.search(f"{message.said} {calls}") and not _WEIGHTS.search(message.said):
        yield _LESS_DATA
    if message.variant == "slurm" or _OF_CONTAINER.search(message.text):
        yield f"{LIMIT_CHANGE}; then {HOST_CHANGE}"


_TITLES: Final = {
    "workers": "Let the DataLoader workers share the data, or use fewer of them",
    "mappings": "Raise the kernel's limit of mappings",
    "pinned-host": "Use less host memory, page-locked above all",
}
"""Titles by the finer kind of the message, where RAM as such is not short."""


@proposes("Use less RAM, or add more")
def less_host_memory(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose less host memory for every lack of it except in /dev/shm."""
    if case.cause is not Cause.HOST_MEMORY or _is_shared_memory(case):
        return
    kind = "" if case.message is None else case.message.sub_kind
    if case.ledger.needs_host:
        kind = "pinned-host"
    change = host_change(case)
    yield remedy.proposal(
        title=_TITLES.get("workers" if change == _FEWER_WORKERS else kind, ""),
        weight=Weight.CURES,
        change=change,
        locations=case.asking_stack[:1],
        cost="Slower loading with fewer workers.",
        caveats=("No GPU setting changes this.",),
    )


@proposes("Give the container more shared memory")
def raise_shared_memory(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose a larger /dev/shm where that ran out."""
    if case.cause is not Cause.HOST_MEMORY or not _is_shared_memory(case):
        return
    is_nccl = case.message is not None and case.message.variant == "nccl-shm"
    user = "NCCL passes data between GPUs" if is_nccl else "DataLoader workers pass batches"
    user += " through"
    said = "" if case.message is None else case.message.said
    is_inside = _CONTAINER.search(said) is not None and _NO_CONTAINER.search(said) is None
    yield remedy.proposal(
        title="" if is_inside else "Make the host's shared memory larger",
        weight=Weight.CURES,
        change=("" if is_inside else "run mount -o remount,size=8g /dev/shm, or in a container ")
        + "--shm-size=8g or --ipc=host for docker run; in Kubernetes an emptyDir with "
        "medium: Memory on /dev/shm; "
        + ("NCCL_SHM_DISABLE=1 to do without" if is_nccl else "fewer DataLoader workers"),
        why=f"{user} /dev/shm, which is 64 MiB in Docker.",
        cost="Host memory.",
    )


_CONTAINER: Final = regex(r"(?i)docker|container|kubernetes|\bk8s\b|\bpods?\b")
_NO_CONTAINER: Final = regex(r"(?i)\b(?:without|no|not|n't)\W{1,3}(?:\w{1,12} ){0,2}docker")


def _is_shared_memory(case: JudgedCase) -> bool:
    return case.message is not None and case.message.sub_kind == "dev-shm"
