"""What is not PyTorch's allocator: host memory, KV caches, JAX, TensorFlow, drivers."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.diagnosis.remedies.plan import ASKS, CURES, HELPS, Plan, Proposal, propose
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose what fits the kind of message."""
    if plan.cause is Cause.HOST_MEMORY:
        yield _host(plan)
    elif plan.kind == "kv-cache":
        yield _kv_cache(plan)
    elif plan.kind == "jax":
        yield _jax()
    elif plan.kind in ("tf", "cudnn") and plan.backend == "tf":
        yield _tensorflow()
    elif plan.kind == "ggml":
        yield _ggml()
    elif plan.kind == "driver-no-figures":
        yield _driver()
    elif plan.kind == "shared-memory":
        yield _kernel()


def _host(plan: Plan) -> Proposal:
    sub = plan.message.sub_kind if plan.message is not None else ""
    if sub == "dev-shm":
        return propose(
            "raise-shared-memory",
            "Give the container more shared memory",
            weight=CURES,
            confidence=Confidence.LIKELY,
            change="docker run --shm-size=8g or --ipc=host; fewer DataLoader workers",
            why="DataLoader workers pass batches through /dev/shm, which is 64 MiB in Docker.",
            cost="Host memory.",
            verify="df -h /dev/shm during the run.",
        )
    return propose(
        "less-host-memory",
        "Use less host memory, or have more",
        weight=CURES,
        confidence=Confidence.LIKELY,
        change="fewer DataLoader workers and a smaller prefetch_factor; load checkpoints with "
        "mmap=True or low_cpu_mem_usage; pin less memory; raise the cgroup or scheduler limit",
        why=plan.verdict.summary,
        cost="Slower loading with fewer workers.",
        caveats=("No GPU setting changes this.",),
        verify="dmesg shows no new kill; the resident size of the process stays below the limit.",
    )


def _kv_cache(plan: Plan) -> Proposal:
    return propose(
        "fit-kv-cache",
        "Shrink what is served, or give the cache more",
        weight=CURES,
        confidence=Confidence.LIKELY,
        change="lower max_model_len or max_num_batched_tokens; raise gpu_memory_utilization if "
        "nothing else uses the GPU, lower it if the start-up check fails; quantise; tensor "
        "parallel over more GPUs",
        why=plan.verdict.summary,
        cost="Shorter contexts or more GPUs.",
        caveats=("CUDA graphs and other processes need what is above the utilisation.",),
        verify="The log's 'Available KV cache memory' covers one request of the full length.",
    )


def _jax() -> Proposal:
    return propose(
        "jax-preallocation",
        "Size the preallocation of JAX",
        weight=HELPS,
        confidence=Confidence.POSSIBLE,
        setting="XLA_PYTHON_CLIENT_PREALLOCATE=false",
        change="or XLA_PYTHON_CLIENT_MEM_FRACTION=.9; smaller batch; jax.checkpoint",
        why="JAX takes 75 % of the device at start; PyTorch's settings do not apply.",
        cost="Slower allocation without preallocation.",
        verify="The peak in jax.profiler.device_memory_profile().",
    )


def _tensorflow() -> Proposal:
    return propose(
        "tf-memory-growth",
        "Let TensorFlow grow its memory on demand",
        weight=HELPS,
        confidence=Confidence.POSSIBLE,
        setting="TF_FORCE_GPU_ALLOW_GROWTH=true",
        change="tf.config.experimental.set_memory_growth(gpu, True); a smaller batch if the "
        "tensor itself is too large",
        why="TensorFlow takes nearly the whole device at start, which leaves libraries nothing.",
        cost="Some fragmentation.",
        verify="nvidia-smi shows less than the whole device in use after start.",
    )


def _ggml() -> Proposal:
    return propose(
        "fewer-layers-on-gpu",
        "Put fewer layers on the GPU, or a smaller context",
        weight=CURES,
        confidence=Confidence.LIKELY,
        change="lower --n-gpu-layers or --ctx-size, split over GPUs, or a smaller quantisation",
        why="One buffer holds what is put on the device; it is larger than the device can give.",
        cost="Slower inference.",
        verify="The log's buffer sizes stay below the free memory.",
    )


def _driver() -> Proposal:
    return propose(
        "locate-driver-call",
        "Find the call that failed",
        weight=ASKS + 10,
        confidence=Confidence.POSSIBLE,
        change="CUDA_LAUNCH_BLOCKING=1, pin_memory=False for a test, nvidia-smi beside the run",
        why="The driver's message does not say whether device memory, pinned host memory or the "
        "context ran out.",
        cost="A slow run for diagnosis.",
        verify="The traceback shows the call; nvidia-smi shows whether the device is full.",
    )


def _kernel() -> Proposal:
    return propose(
        "smaller-kernel-blocks",
        "Use smaller blocks or fewer stages in the kernel",
        weight=HELPS,
        confidence=Confidence.LIKELY,
        change="lower BLOCK sizes or num_stages of the Triton kernel, or use a build for this GPU",
        why="On-chip shared memory is a property of the GPU; freeing device memory changes "
        "nothing.",
        cost="The kernel may run slower.",
        verify="The kernel compiles and launches.",
    )
