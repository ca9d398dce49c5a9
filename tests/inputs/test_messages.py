"""Messages of every family; the shared texts with their truth; what is no message."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oom_variations import messages

from fragdoctor.inputs.messages import find_messages, parse_oom

FIELDS = (
    "kind", "backend", "is_device_oom", "device_index", "requested_bytes", "total_bytes",
    "free_bytes", "allocated_bytes", "reserved_bytes", "reserved_unallocated_bytes",
    "process_bytes", "private_pools_bytes", "limit_bytes", "rank",
)  # fmt: skip
OPTIONAL = ("kv_tokens_requested", "kv_tokens_capacity", "other_allocations_bytes")
GIB, MIB = 2**30, 2**20
TWO = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total"
    " capacity of 79.15 GiB of which 1.40 GiB is free. "
)


def n_memory(log):
    return sum(m.kind not in {"negative", "shared-memory"} for m in log.messages)


@pytest.mark.shared
def test_shared_texts_give_every_field_of_their_truth(shared):
    wrong = []
    for path in sorted((shared / "oom_messages").glob("*.json")):
        truth = json.loads(path.read_text())
        text = path.with_suffix(".txt").read_bytes().decode("utf-8", "replace")
        log = find_messages(text)
        assert log.messages, path.name
        message = log.messages[0]
        got = {name: getattr(message, name) for name in (*FIELDS, *OPTIONAL)}
        got["messages_in_text"] = n_memory(log)
        got["warning_only"] = message.is_warning
        got["other_processes"] = [
            {"pid": p.pid, "bytes": p.n_bytes} for p in message.other_processes
        ]
        names = (
            *FIELDS,
            *(o for o in OPTIONAL if o in truth),
            "messages_in_text",
            "other_processes",
        )
        truth.setdefault("warning_only", False)
        wrong += [
            (path.name, name, got[name], truth[name])
            for name in (*names, "warning_only")
            if got[name] != truth[name]
        ]
    assert not wrong


# text, kind, backend, sub_kind, fields
CASES = [
    ("RuntimeError: cuda runtime error (2) : out of memory at /a/THC/generic/THCStorage.cu:58",
     "driver-no-figures", "cuda", "", {"version_high": "0.4"}),
    (("CUDA out of memory. Tried to allocate 96.00 MiB (GPU 0; 8.00 GiB total capacity; 7.00 GiB"
      " already allocated; 80.00 MiB free; 7.25 GiB cached)"),
     "pytorch-caching-allocator", "cuda", "",
     {"reserved_bytes": int(7.25 * GIB), "reserved_unallocated_bytes": GIB // 4}),
    ("CUDA out of memory. Tried to allocate more than 1EB memory.",
     "pytorch-caching-allocator", "cuda", "size-bug", {"requested_bytes": None}),
    ("CUDA out of memory. Tried to allocate 130674.91 GiB (GPU 0; 7.79 GiB total capacity)",
     "pytorch-caching-allocator", "cuda", "size-bug", {"device_index": 0}),
    (("CUDA out of memory. Allocation was preemptively rejected because it would exceed"
     " per_process_memory_fraction limit. Requested size: 600.00 MiB"),
     "pytorch-caching-allocator", "cuda", "fraction-rejected", {"requested_bytes": 600 * MIB}),
    (("Preemptively rejecting allocation: requested 600.00 MiB but total_allocated_memory"
     " (1.00 MiB) + requested size would exceed memory limit (512.00 MiB = 50% of 1024.00 MiB)."),
     "pytorch-caching-allocator", "cuda", "fraction-rejected",
     {"limit_bytes": 512 * MIB, "total_bytes": 1024 * MIB, "reserved_bytes": MIB}),
    ("NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp:838",
     "pytorch-caching-allocator", "cuda", "nvml-unavailable", {}),
    (("[ExpandableSegmentVA] Failed to reserve 90.00 GiB of virtual address space for an expandable"
     " CUDA segment on device 3."),
     "pytorch-caching-allocator", "cuda", "va-exhausted",
     {"requested_bytes": 90 * GIB, "device_index": 3}),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU ",
     "pytorch-caching-allocator", "cuda", "figures-lost", {"requested_bytes": 2 * GIB}),
    (("CUDA out of memory. Tried to allocate 2.00 GiB. GPU \x03 has a total capacity of 8.00 GiB of"
     " which 1.00 GiB is free."),
     "pytorch-caching-allocator", "cuda", "", {"device_index": 3, "total_bytes": 8 * GIB}),
    (TWO + "Of the allocated memory 70.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by"
     " PyTorch but unallocated. This allocation exceeds the expandable-segment reserve of 1.00 GiB"
     " for this stream, and a single allocation cannot span expandable segments.",
     "pytorch-caching-allocator", "cuda", "not-in-reserve", {"version_low": "2.15"}),
    (("torch.AcceleratorError: CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in"
     " https://docs.nvidia.com"), "driver-no-figures", "cuda", "", {}),
    ("RuntimeError: CUDA driver error: out of memory",
     "driver-no-figures", "cuda", "driver-api", {}),
    ('Is there a fix for "RuntimeError: CUDA error: out of memory" on a card of 6 GB?',
     "driver-no-figures", "cuda", "", {"variant": "runtime-error"}),
    ("RuntimeError: /ops/spconv/src/indice_cuda.cu 124\ncuda execution failed with error 2",
     "driver-no-figures", "cuda", "", {}),
    ("ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough",
     "pytorch-caching-allocator", "cuda", "figures-lost", {"variant": "dispatched-modules"}),
    (" data = np.zeros((n,10,227,227))\nMemoryError\nI do not understand this.",
     "host-ram", "cpu", "python-memory-error", {"is_device_oom": False}),
    ("RuntimeError: HIP error: out of memory", "driver-no-figures", "rocm", "", {}),
    (('Traceback (most recent call last):\n  File "pin_memory.py", line 31, in _pin_memory_loop\n'
     "    data = data.pin_memory()\nRuntimeError: CUDA error: out of memory"),
     "host-ram", "cpu", "pinned-host", {"is_device_oom": False}),
    ("RuntimeError: Invalid buffer size: 12.50 GB",
     "pytorch-caching-allocator", "mps", "buffer-too-large", {"requested_bytes": 12.5 * GIB}),
    (("Current platform can NOT allocate memory block with size larger than 4GB! Tried to allocate"
     " 5.00 GiB (GPU 0; 15.00 GiB total capacity; 1.00 GiB already allocated; 2.00 GiB reserved)"),
     "pytorch-caching-allocator", "xpu", "single-allocation-limit",
     {"requested_bytes": 5 * GIB, "total_bytes": 15 * GIB}),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
     "cublas", "cuda", "maybe-memory", {}),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "cudnn", "cuda", "", {}),
    ("RuntimeError: Unable to find a valid cuDNN algorithm to run convolution",
     "cudnn", "cuda", "maybe-memory", {}),
    ("node7:11:12 [5] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 10485760 bytes",
     "nccl", "cuda", "", {"device_index": 5, "requested_bytes": 10485760}),
    (("ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
     "Cuda failure 2 'out of memory'"), "nccl", "cuda", "", {}),
    (("ValueError: To serve at least one request with the model's max seq len"
    " (131072), (16.00 GB KV"
     " cache is needed, which is larger than the available KV cache memory (9.25 GB). Try"),
     "kv-cache", "vllm", "kv-budget",
     {"kv_tokens_requested": 131072, "limit_bytes": 37 * GIB // 4}),
    (("ValueError: Free memory on device (5.00/6.0 GiB) on startup is less than desired GPU memory"
     " utilization (0.9, 5.4 GiB)."), "kv-cache", "vllm", "startup-check",
     {"free_bytes": 5 * GIB, "total_bytes": 6 * GIB, "device_index": None}),
    (("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 30.50GiB."
     " [executable_name='jit_x']"), "jax", "jax", "", {"requested_bytes": 30.5 * GIB}),
    (("ggml_vulkan: Device memory allocation of size 1073741824 failed.\n"
     "ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory"),
     "ggml", "vulkan", "", {"requested_bytes": GIB}),
    (("RuntimeError: [enforce fail at alloc_cpu.cpp:72] data. DefaultCPUAllocator: not enough"
     " memory: you tried to allocate 4294967296 bytes."),
     "host-ram", "cpu", "windows-commit", {"requested_bytes": 4 * GIB}),
    # c10/core/impl/alloc_cpu.cpp, built by any other compiler than Microsoft's
    (("RuntimeError: [enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't"
      " allocate memory: you tried to allocate 4294967296 bytes. Error code 12"),
     "host-ram", "cpu", "cpu-allocator", {"requested_bytes": 4 * GIB}),
    # ggml/src/ggml-cuda/ggml-cuda.cu: CUDA_CHECK of 2023, and CU_CHECK of the pool
    ("CUDA error 2 at /src/ggml-cuda.cu:5010: out of memory", "ggml", "cuda", "", {}),
    ("/src/ggml/src/ggml-cuda/ggml-cuda.cu:451: HipVMM Failure: out of memory",
     "ggml", "rocm", "vmm", {}),
    # src/llama-model.cpp
    ("llama_model_load: error loading model: unable to allocate CUDA3 buffer",
     "ggml", "cuda", "weights-buffer", {"device_index": 3}),
    # tensorrt_llm/common/cudaUtils.h
    (("RuntimeError: [TensorRT-LLM][ERROR] CUDA runtime error in ::cudaMallocAsync(ptr, n, s): out"
      " of memory (/src/tensorrt_llm/runtime/tllmBuffers.h:98)"),
     "other-framework", "tensorrt", "trtllm", {}),
    # onnxruntime/core/framework/bfc_arena.cc
    ("Available memory of 1024 is smaller than requested bytes of 4096",
     "other-framework", "onnxruntime", "arena-limit", {"free_bytes": 1024}),
    # text_generation_server/models/flash_causal_lm.py of 0.9
    ("Not enough memory to handle 24000 total tokens with 4096 prefill tokens.",
     "kv-cache", "tgi", "prefill", {"kv_tokens_requested": 24000}),
    # xla/stream_executor/gpu/gpu_cudamallocasync_allocator.cc
    (("gpu_async_0 cuMemAllocAsync failed to allocate 8589934592 bytes: RESOURCE_EXHAUSTED: :"
      " CUDA_ERROR_OUT_OF_MEMORY: out of memory\n Reported by CUDA: Free memory/Total memory:"
      " 1073741824/17179869184\nStats: Limit: 0\nInUse: 15032385536\nMaxInUse: 16106127360"),
     "jax", "jax", "",
     {"requested_bytes": 8 * GIB, "free_bytes": GIB, "total_bytes": 16 * GIB,
      "allocated_bytes": 14 * GIB, "limit_bytes": None}),
    # paddle/fluid/memory/detail/system_allocator.cc of 1.5
    ("Cannot malloc 12.5 MB GPU memory. Please shrink FLAGS_fraction_of_gpu_memory_to_use",
     "other-framework", "paddle", "", {"requested_bytes": 12.5 * MIB}),
    # mshadow/stream_gpu-inl.h
    ("Check failed: err == CUBLAS_STATUS_SUCCESS (3 vs. 0) : Create cublas handle failed",
     "cublas", "cuda", "handle", {}),
    # pkg/kubelet/eviction/helpers.go
    ("The node was low on resource: memory. Container trainer was using 61Gi",
     "host-ram", "cpu", "evicted", {}),
    ("OSError: [WinError 1455] The paging file is too small for this operation to complete.",
     "host-ram", "cpu", "page-file", {}),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.",
     "host-ram", "cpu", "oom-killer", {}),
    ("epoch 3\nKilled", "host-ram", "cpu", "oom-killer", {"line": 2}),
    ("[12.345678] Out of memory: Killed process 4242 (python)",
     "host-ram", "cpu", "oom-killer", {}),
    ("MemoryError", "host-ram", "cpu", "python-memory-error", {}),
    ("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
     "host-ram", "cpu", "bad-alloc", {}),
    ("java.lang.OutOfMemoryError: Java heap space", "host-ram", "cpu", "jvm-heap", {}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind", "backend", "sub_kind", "fields"), CASES)
def test_wording_gives_kind_backend_and_figures(text, kind, backend, sub_kind, fields):
    log = find_messages(text)

    assert len(log.messages) == 1
    message = log.messages[0]
    assert (message.kind, message.backend, message.sub_kind) == (kind, backend, sub_kind)
    assert message.is_device_oom == fields.get("is_device_oom", kind != "host-ram")
    assert {name: getattr(message, name) for name in fields} == fields


NEGATIVES = [
    ("RuntimeError: CUDA error: an illegal memory access was encountered", "illegal-access"),
    ("RuntimeError: CUDA error: device-side assert triggered", "device-assert"),
    ("cuda runtime error (59) : device-side assert triggered at /a/THCStorage.cu:58",
     "device-assert"),
    ("RuntimeError: CUDA error: no kernel image is available for execution", "no-kernel-image"),
    (("ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
     "Cuda failure 'invalid argument'"), "nccl-error"),
    ("OSError: [Errno 28] No space left on device", "disk-full"),
    ("If you get CUDA out of memory errors, use a smaller batch.", "no-failure"),
    ("- **CUDA error: out of memory** means that the driver failed.", "no-failure"),
    ("If you see `RuntimeError: CUDA out of memory`, lower the batch size.", "no-failure"),
    ('if "CUDA out of memory" in str(error):\n    retry()', "no-failure"),
    ('raise torch.cuda.OutOfMemoryError("CUDA out of memory.")', "no-failure"),
    ("except torch.cuda.OutOfMemoryError:\n    skip_batch()", "no-failure"),
    ("Epoch 3 | loss 2.1 | gpu_mem 12.3G | no out of memory so far", "no-failure"),
    ("CUDA graphs take memory. If you are running out of memory, use eager mode.", "no-failure"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sub_kind"), NEGATIVES)
def test_text_without_lack_of_memory_is_negative(text, sub_kind):
    message = parse_oom(text)

    assert message is not None
    assert (message.kind, message.is_device_oom, message.sub_kind) == ("negative", False, sub_kind)


def test_triton_shared_memory_is_not_device_memory():
    message = parse_oom("OutOfResources: out of resource: shared memory, Required: 98304")

    assert (message.kind, message.is_device_oom) == ("shared-memory", False)


def test_text_about_something_else_has_no_message():
    assert parse_oom("") is None
    assert parse_oom("hello world") is None


def test_interleaved_ranks_are_kept_apart():
    text = (
        "[rank0]: CUDA out of memory. Tried to allocate\n"
        "[rank1]: CUDA out of memory. Tried to allocate\n"
        "[rank0]: 2.00 GiB. GPU 0 has a total capacity of\n"
        "[rank1]: 3.00 GiB. GPU 1 has a total capacity of\n"
        "[rank0]: 8.00 GiB of which 1.00 GiB is free.\n"
        "[rank1]: 9.00 GiB of which 0 bytes is free.\n"
    )

    log = find_messages(text)

    got = [(m.rank, m.line, m.device_index, m.requested_bytes, m.total_bytes) for m in log.messages]
    assert got == [(0, 1, 0, 2 * GIB, 8 * GIB), (1, 2, 1, 3 * GIB, 9 * GIB)]


def test_first_cause_is_the_message_with_figures():
    text = (
        "[rank1]: RuntimeError: CUDA error: out of memory\n"
        f"[rank0]: {TWO}\n"
        "[rank2]:[E6 06:24:44.9 ProcessGroupNCCL.cpp:616] Watchdog caught collective operation"
        " timeout\n"
        "ERROR: failed (exitcode: -9) local_rank: 4\n"
    )

    log = find_messages(text)

    assert [m.rank for m in log.messages] == [1, 0]
    assert log.primary == 1
    assert [(m.kind, m.line) for m in log.markers] == [("collective-timeout", 3), ("killed", 4)]


def test_message_printed_again_is_listed_with_its_own_line():
    log = find_messages(f"{TWO}\nretrying\n{TWO}\n")

    assert [m.line for m in log.messages] == [1, 3]
    assert log.primary == 0


def test_cudamalloc_warning_alone_is_a_warning_and_beside_an_error_a_marker():
    warning = (
        "Warning: memory allocation failed with OOM on device 2 while trying to allocate 2097152"
        " bytes (free: 1048576, total: 8589934592)."
    )

    alone, beside = find_messages(warning), find_messages(f"{warning}\n{TWO}")

    assert [(m.is_warning, m.device_index, m.free_bytes) for m in alone.messages] == [
        (True, 2, 1048576)
    ]
    assert [m.is_warning for m in beside.messages] == [False]
    assert [m.kind for m in beside.markers] == ["cudamalloc-warning"]


VERSIONS = [
    ("(GPU 0; 8.00 GiB total capacity; 5.00 GiB already allocated; 1.00 GiB free; 1.00 GiB cached)",
     "torch-1.0", "1.0", "1.3"),
    (("(GPU 0; 8.00 GiB total capacity; 5.00 GiB already allocated; 1.00 GiB"
    " free; 6.00 GiB reserved"
     " in total by PyTorch)"), "torch-1.4", "1.4", "1.9"),
    (("(GPU 0; 8.00 GiB total capacity; 5.00 GiB already allocated; 1.00 GiB"
    " free; 6.00 GiB reserved"
     " in total by PyTorch) If reserved memory is >> allocated memory try setting"
     " max_split_size_mb to avoid fragmentation."), "torch-1.10", "1.10", "2.0"),
    (". GPU 0 has a total capacty of 8.00 GiB", "torch-2.1", "2.1", "2.1"),
    ((". GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free. 512.00 MiB allowed; Of"
     " the allocated memory 1.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch"
     " but unallocated. See (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"),
     "torch-2.2", "2.5", "2.8"),
    ((". GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free. If reserved but"
     " unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"),
     "torch-2.9", "2.9", "2.9"),
    ((". GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free. See"
     " (https://docs.pytorch.org/docs/stable/notes/cuda.html)"), "torch-2.10", "2.10", ""),
    ((". GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free. expandable_segments is"
     " enabled. If instead the process"), "torch-2.15", "2.15", ""),
]  # fmt: skip


@pytest.mark.parametrize(("rest", "variant", "low", "high"), VERSIONS)
def test_wording_tells_the_versions(rest, variant, low, high):
    message = parse_oom("CUDA out of memory. Tried to allocate 1.00 GiB" + rest)

    assert (message.variant, message.version_low, message.version_high) == (variant, low, high)


@given(case=messages(), data=st.data())
def test_message_cut_anywhere_gives_no_wrong_figure(case, data):
    text, truth = case
    cut = text[: data.draw(st.integers(0, len(text)))]

    message = parse_oom(cut)

    if message is not None and message.is_device_oom:
        for name in set(truth) - {"other_processes", "backend"}:
            assert getattr(message, name) in {None, truth[name]}, name


@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda b: b.decode("utf-8", "replace")))
def test_any_text_is_read_without_an_error(noise):
    log = find_messages(noise + TWO + noise)

    assert log.primary < max(1, len(log.messages))


FULL = (
    "CUDA out of memory. Tried to allocate 3.12 GiB. GPU 5 has a total capacity of 44.39 GiB of "
    "which 1.07 GiB is free. Of the allocated memory 31.11 GiB is allocated by PyTorch, and 2.33 "
    "GiB is reserved by PyTorch but unallocated."
)


def test_message_in_a_list_repr_is_no_program_text():
    log = find_messages(repr(["step 1\nstep 2", "RuntimeError: " + FULL]))

    assert [round(44.39 * 2**30)] == [m.total_bytes for m in log.messages]


def test_message_wrapped_twice_before_a_unit_keeps_its_figures() -> None:
    text = (
        "[rank3]: CUDA out of memory. Tried to allocate 0 \n"
        "[rank3]: bytes (GPU 0; 0 bytes total capacity; 0 \n"
        "[rank3]: bytes already allocated; 0 bytes free; 0\n"
        "[rank3]:  bytes cached)"
    )

    message = parse_oom(text)

    assert message is not None
    assert (message.requested_bytes, message.total_bytes, message.allocated_bytes) == (0, 0, 0)
    assert message.rank == 3


def test_message_cut_after_one_letter_of_a_label_gives_no_figure_for_it():
    head = "NPU out of memory. Tried to allocate 10 bytes (NPU 0; 100 bytes total capacity; "

    message = parse_oom(head + "100.00 GiB already allocated; 1000.00 GiB c")

    assert message.allocated_bytes == 100 << 30
    assert message.reserved_bytes is None
    assert message.reserved_unallocated_bytes is None


def test_size_that_a_broken_collective_left_is_its_consequence():
    garbage = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory."
    broken = "[rank3]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41) ran for 9"

    assert parse_oom(garbage).sub_kind == "size-bug"
    assert [m.sub_kind for m in find_messages(f"{broken}\n{garbage}").messages] == [
        "collective-timeout"
    ]


def test_title_that_cuts_a_message_leaves_the_judgment_to_its_repetition():
    cut = "Tried to allocate 2.00 MiB. GPU 6 has a total capacity of 44.53 GiB of which 1.00 MiB is"
    whole = (
        f"{cut} free. Of the allocated memory 42.50 GiB is allocated by PyTorch, and 57.10 MiB is "
    )
    text = f"# CUDA out of memory. {cut}\n{{}}CUDA out of memory. {whole}reserved by PyTorch.\n"

    assert find_messages(text.format("")).primary == 1
    other = "CUDA out of memory. Tried to allocate 4.00 MiB. GPU 6 has a total capacity of 1 GiB.\n"
    assert (
        find_messages(text.format("").replace(f"memory. {whole}", f"memory. {other}")).primary == 0
    )


def test_kill_whose_reason_is_told_is_judged_before_one_without():
    text = (
        "RuntimeError: DataLoader worker (pid 41932) is killed by signal: Killed.\n"
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7612309.0 cgroup.\n"
    )

    log = find_messages(text)

    assert log.messages[log.primary].variant == "slurm"
