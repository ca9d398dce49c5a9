"""Messages quoted by other exceptions, of other frameworks, and of the host's pinned memory."""

from __future__ import annotations

import pytest

from fragdoctor.inputs.messages import find_messages

DEVICE = {
    "quoted": "ValueError: worker 3 died: 'CUDA error: out of memory'",
    "in another sentence": "RuntimeError: Engine start failed (HIP error: out of memory)",
    "Ray alone": "ray.exceptions.RayTaskError(OutOfMemoryError): ray::Fit.run() (pid=7)",
    "Ray and below": "ray.exceptions.RayTaskError(OutOfMemoryError): ray::f() (pid=7)\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB.",
    "a number": "Exception: CUDA Error 2, out of memory",
    "a file": "CUDA error 2 at kernels.cu:704: out of memory",
    "a line of a file": "Cuda error in file 'src/kernels.cu' in line 33 : out of memory.",
    "a call": "pycuda._driver.MemoryError: cuMemAlloc failed: out of memory",
    "a retried call": "pool.h:161: cudaMalloc retry failed: out of memory",
    "a wrapped call": "cudaMalloc failed with error 2 (out of memory)",
    "a hint": "(External) CUDA error(2), out of memory. [Hint: 'cudaErrorMemoryAllocation'.]",
    "could not": "Internal: unable to load the model: CUDA out of memory",
    "with the advice that follows it": "CUDA error: out of memorySearch for "
    "`cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__"
    "TYPES.html for more information.CUDA kernel errors might be asynchronously reported",
    "a name alone": "Traceback (most recent call last):\ntorch.cuda.OutOfMemoryError",
    "RMM": "MemoryError: std::bad_alloc: out_of_memory: CUDA error at: cuda_memory_resource.hpp",
    "Metal": "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
    "cut request": "RuntimeError: CUDA out of memory. Tried to allocate 2.0",
    "TensorRT": "[TRT] [E] 1: Error Code 1: Cuda Runtime (out of memory)",
    "a graph": "ResourceExhaustedError: Graph execution error: failed to allocate memory",
    "Thrust": "terminate called after throwing an instance of 'thrust::system::system_error'\n"
    "  what():  parallel_for failed: cudaErrorMemoryAllocation: out of memory",
    "Thrust's bad_alloc": "terminate called after throwing an instance of "
    "'thrust::system::detail::bad_alloc'\n  what():  std::bad_alloc: out of memory",
    "Thrust of old": "RuntimeError: after cudaLaunch in triple_chevron_launcher::launch(): "
    "out of memory",
    "no context": "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda "
    "functions before calling NumCudaDevices() that might have already set an error? Error 2: out "
    "of memory",
    "mapping": "RuntimeError: CUDA driver error: unknown error",
    "ComfyUI": "torch.OutOfMemoryError: Allocation on device",
    "web UI": "RuntimeError: Not enough memory, use lower resolution (max approx. 832x832). Need: "
    "3.2GB free, Have:2.8GB free",
    "DirectML": "RuntimeError: Could not allocate tensor with 3221225472 bytes. There is not "
    "enough GPU video memory available!",
    "bold words": "**torch.OutOfMemoryError: CUDA out of memory.** Tried to allocate 3.00 GiB",
    "bold": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate **3.00 GiB**",
    "Ray, bare": "ray.exceptions.RayTaskError(RuntimeError): ray::f() (pid=7, ip=10.1.1.1)\n"
    "RuntimeError: CUDA error: out of memory",
}
SHARED = {
    "NCCL 2.7": "box:1:2 [1] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space "
    "left on device\nbox:1:2 [1] include/shm.h:48 NCCL WARN Error while creating shared memory "
    "segment nccl-shm-recv-0a-0-1-2 (size 9637888)",
    "NCCL 2.20": "box:1:2 [0] misc/shmutils.cc:88 NCCL WARN Error: failed to extend "
    "/dev/shm/nccl-Ab3 to 9637892 bytes, error: No space left on device (28)",
    "worker": "ERROR: Unexpected bus error encountered in worker. This might be caused by "
    "insufficient shared memory (shm).",
    "torch file": "RuntimeError: unable to write to file </torch_123_456>: No space left on device",
}
PADDLE = (
    "Expected allocating <= available, but received allocating:6442450944 > available:2147483648.",
    "EnforceNotMet: enforce allocating <= available failed, 6442450944 > 2147483648",
)
PINNED = (
    "bfc_allocator.cc:479] Allocator (gpu_host_bfc) ran out of memory trying to allocate 6.00GiB",
    "cuda_driver.cc:1018] failed to alloc 6442450944 bytes on host: CUDA_ERROR_OUT_OF_MEMORY",
    "W gpu_host_allocator.h:44] could not allocate pinned host memory of size: 6442450944",
)


@pytest.mark.parametrize("name", DEVICE)
def test_message_of_the_device_is_found_once(name: str) -> None:
    (message,) = find_messages(DEVICE[name]).messages

    assert message.is_device_oom


@pytest.mark.parametrize("text", PADDLE)
def test_check_of_paddle_gives_its_figures(text: str) -> None:
    (message,) = find_messages(text).messages

    assert message.backend == "paddle"
    assert (message.requested_bytes, message.free_bytes) == (6 << 30, 2 << 30)


@pytest.mark.parametrize("text", PINNED)
def test_pinned_memory_is_that_of_the_host(text: str) -> None:
    (message,) = find_messages(text).messages

    assert (message.is_device_oom, message.sub_kind) == (False, "pinned-host")
    assert message.requested_bytes == 6 << 30


TOLD_APART = {
    "dev-shm": (
        (
            "RuntimeError: unable to resize file </torch_1_2> to the right size: No space left on "
            "device (28)"
        ),
        (
            "RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2_0>: Resource "
            "temporarily unavailable (11)"
        ),
    ),
    "mappings": (
        (
            "RuntimeError: unable to mmap 72 bytes from file </torch_1_2_63998>: Cannot allocate "
            "memory (12)"
        ),
        (
            "RuntimeError: unable to mmap 2048 bytes from file <filename not specified>: Cannot "
            "allocate memory (12)"
        ),
    ),
    "page-file": (
        "RuntimeError: Couldn't open shared file mapping: <torch_1_2_0>, error code: <1455>",
    ),
    "worker-gone": ("RuntimeError: DataLoader worker (pid(s) 41, 42) exited unexpectedly",),
    "maybe-memory": (
        "RuntimeError: cuFFT error: CUFFT_INTERNAL_ERROR",
        (
            "RuntimeError: cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling "
            "`cusolverDnCreate(handle)`"
        ),
        "RuntimeError: cusolver error: 7, when calling `cusolverDnCreate(handle)`",
        (
            "RuntimeError: CUDA error: insufficient resources when calling "
            "`cusparseSpGEMM_workEstimation( handle, opA, opB )`"
        ),
    ),
    "buffer-too-large": (
        (
            "MPSCore/MPSNDArray.mm:850: failed assertion `[MPSNDArray initWithDevice:descriptor:"
            "isTextureBacked:] Error: total bytes of NDArray > 2**32'"
        ),
        (
            "MPSNDArray.mm:705: failed assertion '[MPSTemporaryNDArray initWithDevice:descriptor:] "
            "Error: product of dimension sizes > 2**31'"
        ),
    ),
    "pool-full": (
        "RuntimeError: Prefill out of memory. Try to lower your batch size.",
        (
            "RuntimeError: Decode out of memory. Try to lower your batch size.\n"
            "Try to allocate 127 tokens.\nAvailable tokens: 5248 (available_size=5248)"
        ),
    ),
    "unbalanced-gpus": (
        (
            "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other "
            "processes. pre_model_load_memory=21.2, local_gpu_memory=14.1"
        ),
    ),
    "on-chip": (
        (
            "No valid triton configs. OutOfMemoryError: out of resource: triton_mm Required: "
            "294912 Hardware limit:232448 Reducing block sizes or `num_stages` may help."
        ),
    ),
}


@pytest.mark.parametrize(
    ("sub_kind", "text"), [(kind, text) for kind, texts in TOLD_APART.items() for text in texts]
)
def test_what_ran_out_is_told_apart(sub_kind: str, text: str) -> None:
    (message,) = find_messages(text).messages

    assert message.sub_kind == sub_kind


@pytest.mark.parametrize(
    "text",
    [
        "DataLoader worker (pid(s) 41) exited unexpectedly with exit code 1. Details are lost",
        (
            "An attempt has been made to start a new process before the current process has "
            "finished its bootstrapping phase.\nRuntimeError: DataLoader worker (pid(s) 41) exited "
            "unexpectedly"
        ),
        (
            "DataLoader worker (pid 41) is killed by signal: Segmentation fault.\nRuntimeError: "
            "DataLoader worker (pid(s) 41) exited unexpectedly"
        ),
        "RuntimeError: Couldn't open shared file mapping: <torch_1_2>, error code: <0>",
    ],
)
def test_worker_that_told_its_own_error_is_no_lack_of_memory(text: str) -> None:
    log = find_messages(text)

    assert {m.kind for m in log.messages} <= {"negative"}


XLA = {
    "Out of memory allocating 6442450944 bytes.": None,
    "Failed to allocate request for 6.00GiB (6442450944B) on device ordinal 1": None,
    "Attempting to reserve 6.00G at the bottom of memory. That was not possible."
    " There are 2.00G free, 0B reserved, and 2.00G reservable.": 2 << 30,
}


@pytest.mark.parametrize("text", XLA)
def test_message_of_xla_gives_its_figures(text: str) -> None:
    (message,) = find_messages(
        f"jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: {text}"
    ).messages

    assert (message.backend, message.requested_bytes) == ("jax", 6 << 30)
    assert message.free_bytes == XLA[text]


def test_program_too_large_for_a_tpu_gives_both_figures() -> None:
    text = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.48G hbm."

    (message,) = find_messages(text).messages

    assert message.requested_bytes == int(20.5 * 2**30)
    assert message.limit_bytes == round(15.48 * 2**30)


@pytest.mark.parametrize(
    "call",
    ["cudaMallocHost failed", "cudaHostAlloc(&p, n, 0) returned error", "cuMemHostAlloc failed"],
)
def test_call_for_pinned_memory_is_about_the_host(call: str) -> None:
    (message,) = find_messages(f"RuntimeError: {call}: out of memory").messages

    assert (message.is_device_oom, message.sub_kind) == (False, "pinned-host")


@pytest.mark.parametrize(
    "text",
    [
        "4.50 GiB allowed; 4.25 GiB reserved",
        'it ended with "4.50 GiB allowed; 4.25 GiB reserved" and nothing else',
        "... 12.00 MiB free; 4.50 GiB allowed; 4.25 GiB reserved in total by PyTorch)",
    ],
)
def test_figures_cut_out_of_their_message_are_read(text: str) -> None:
    (message,) = find_messages(text).messages

    assert (message.limit_bytes, message.reserved_bytes) == (4608 << 20, 4352 << 20)


def test_figures_of_a_quota_are_no_message() -> None:
    assert not find_messages("Quota: 4.50 GiB allowed; 4.25 GiB reserved for alice").messages


@pytest.mark.parametrize(
    "host",
    [
        "MemoryError: Unable to allocate 12.0 GiB for an array with shape (3, 4) and data type f8",
        "W gpu_host_allocator.h:44] could not allocate pinned host memory of size: 6442450944",
        "Killed",
    ],
)
def test_failure_of_the_device_comes_before_one_of_the_host(host: str) -> None:
    log = find_messages(f"{host}\nretrying\nRuntimeError: CUDA error: out of memory\n")

    assert [m.is_device_oom for m in log.messages] == [False, True]
    assert log.messages[log.primary].is_device_oom


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU {} has a total "
    "capacity of 23.50 GiB of which 1.00 GiB is free.\n"
)


@pytest.mark.parametrize(
    "text",
    [
        'If you see "CUDA error: out of memory", lower the batch size.',
        "To avoid cudaMalloc failed: out of memory use smaller batches",
        'raise RuntimeError("cudaMalloc failed: out of memory")',
        "    except torch.cuda.OutOfMemoryError:",
        "except (\n    torch.cuda.OutOfMemoryError,\n):",
        "# common errors: you may get CUDA error: out of memory when the batch is too large",
    ],
)
def test_advice_about_a_message_is_none(text: str) -> None:
    assert [m for m in find_messages(text).messages if m.is_device_oom] == []


@pytest.mark.parametrize("name", SHARED)
def test_full_shared_memory_is_neither_disk_nor_device(name: str) -> None:
    messages = find_messages(SHARED[name]).messages

    assert {m.sub_kind for m in messages} == {"dev-shm"}
    assert not any(m.is_device_oom for m in messages)


def test_full_disk_stays_a_full_disk() -> None:
    text = "OSError: [Errno 28] No space left on device: 'ckpt.pt'; the GPU is fine"

    assert [m.sub_kind for m in find_messages(text).messages] == ["disk-full"]


def test_exit_code_inside_a_sentence_is_a_kill() -> None:
    call = "['python', '-u', 'fit.py', '--report_to', 'wandb']"

    (message,) = find_messages(f"[sigkill_handler] {call} exits with return code = -9").messages

    assert message.kind == "host-ram"


@pytest.mark.parametrize(
    "text",
    [
        "d2.utils.memory: Attempting to copy inputs of <function f at 0x1> to CPU due to CUDA OOM",
        "Warning: Ran out of memory when regular VAE decoding, retrying with tiled VAE decoding.",
    ],
)
def test_retry_in_another_way_is_a_warning(text: str) -> None:
    (message,) = find_messages(text).messages

    assert message.is_warning


def test_error_that_is_quoted_after_the_word_error_is_read() -> None:
    text = 'Getting the error "Failed to create cublas handle - CUBLAS_STATUS_ALLOC_FAILED" now.'

    (message,) = find_messages(text).messages

    assert message.kind == "cublas"


def test_size_that_ends_with_its_point_is_read() -> None:
    text = "MemoryError: Unable to allocate 113. GiB for an array with shape (122994, 122994)"

    (message,) = find_messages(text).messages

    assert message.requested_bytes == 113 << 30


def test_platform_without_expandable_segments_is_noted() -> None:
    log = find_messages(
        "UserWarning: expandable_segments not supported on this platform (function operator())\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )

    assert [m.kind for m in log.markers] == ["expandable-unsupported"]


def test_heading_gives_way_to_the_traceback_that_shows_the_host() -> None:
    text = (
        "CUDA error: out of memory with offload\n"
        "Traceback (most recent call last):\n"
        '  File "zero.py", line 7, in f\n'
        "    return tensor.pin_memory()\n"
        "RuntimeError: CUDA error: out of memory\n"
    )

    (message,) = find_messages(text).messages

    assert (message.kind, message.sub_kind) == ("host-ram", "pinned-host")


def test_warning_of_llama_cpp_is_about_pinned_memory_of_the_host() -> None:
    said = "ggml_cuda_host_malloc: failed to allocate 1536.00 MiB of pinned memory: {}\n"

    (warned,) = find_messages(said.format("out of memory")).messages
    (other,) = find_messages(said.format("no CUDA-capable device is detected")).messages

    assert (warned.kind, warned.sub_kind, warned.is_warning) == ("host-ram", "ggml-pinned", True)
    assert warned.requested_bytes == 1536 << 20
    assert (other.kind, other.sub_kind) == ("negative", "driver-init")


@pytest.mark.parametrize(
    "text",
    [
        "Some background worker is 6 feet under.\nOne of your background processes is missing.",
        "RuntimeError: One of the subprocesses has abruptly died during map operation.",
    ],
    ids=["nnU-Net", "datasets"],
)
def test_worker_process_that_is_missed_is_gone(text: str) -> None:
    (message,) = find_messages(text).messages

    assert message.sub_kind == "worker-gone"


TABLE = "|    1      7653    C   python                   5369MiB |\n"


def test_table_counts_where_memory_outlives_its_program() -> None:
    told = find_messages(f"My program crashed but the memory has not been released.\n{TABLE}")
    prose = find_messages("After the program is killed, the GPU memory is still occupied.\n")
    turned = find_messages("The GPU memory is still in use after I killed the process.\n")
    bare = find_messages(f"Training uses this much of the GPU:\n{TABLE}")

    assert told.messages[0].sub_kind == "gpu-table"
    assert prose.messages[0].sub_kind == "gpu-table"
    assert turned.messages[0].sub_kind == "gpu-table"
    assert bare.messages[0].kind == "negative"


def test_size_that_no_device_has_is_a_bug_in_any_allocators_message() -> None:
    text = "BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size "

    (message,) = find_messages(f"{text}4585490524328388608\n").messages

    assert message.sub_kind == "size-bug"


@pytest.mark.parametrize(
    "line",
    [
        "zsh: killed     python train.py",
        " 43%|####3     | 430/1000 [02:12<02:56,  3.24it/s]Killed",
    ],
)
def test_kill_is_told_beside_what_the_program_printed(line: str) -> None:
    (message,) = find_messages(f"epoch 3\n{line}\n").messages

    assert (message.kind, message.sub_kind) == ("host-ram", "oom-killer")
