"""Messages of ggml, Paddle, ONNX Runtime, TensorRT, MLX, IPEX, and of servers' KV caches."""

from __future__ import annotations

import re
from functools import partial
from typing import Final

from fragdoctor.inputs.log_streams import LogStream
from fragdoctor.inputs.wordings.wording import (
    BACKEND_OF_WORD,
    HOST,
    KV_CACHE,
    OTHER,
    Fields,
    Wording,
    only_where,
    printed_bytes,
    where,
)

_PURPOSES: Final = (
    ("compute-buffer", re.compile(r"compute(?:pp|tg)?buffers")),
    ("kv-buffer", re.compile(r"kv_?cache|kv_?self|memorymodule")),
    ("weights-buffer", re.compile(r"alloc_tensor_range|errorloadingmodel")),
)
"""What llama.cpp prints below ggml's lines about the buffer it did not get (src/llama*.cpp)."""

_BUFFER: Final = re.compile(r"(cuda|rocm|hip|vulkan|metal|sycl|musa|cann|cpu)(\d{1,3})?buffer")


def _ggml_buffer(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields | None:
    """Take the backend from the buffer's name, because a ROCm build also prints "cudaMalloc"."""
    text = stream.squeezed
    named = _BUFFER.search(text, match.start(), match.end() + 300)
    word = named.group(1) if named else match.groupdict().get("_word") or "cuda"
    word = {"hip": "rocm", "cann": "npu", "mtl": "metal"}.get(word, word)
    fields["backend"] = BACKEND_OF_WORD.get(word, word)
    if named and named.group(2) and "device_index" not in fields:
        fields["device_index"] = int(named.group(2))
    if fields["backend"] == "cpu":
        return fields | {"kind": HOST, "is_device_oom": False, "sub_kind": "ggml-host"}
    below = text[match.start() : match.end() + 400]
    return fields | {"sub_kind": next((name for name, p in _PURPOSES if p.search(below)), "")}


_SLOW: Final = only_where(r"slow(?!est)|snail|crawl|takesforever|speeddrop|bottleneck", 800, 800)
"""Signs of a slow program: without them, the words occur in any discussion of GPUs."""

_TENSORRT: Final = where(r"trt-llm\]|tensorrt[-_]llm|trtllm", 8000, 8000, sub_kind="trtllm")
"""Signs that TensorRT-LLM runs TensorRT's builder: its own lines around those of TensorRT."""


_PARTS: Final = {"kvcache": "kv-buffer", "model": "weights-buffer"}


def _executor(fields: Fields, match: re.Match[str], _stream: LogStream) -> Fields:
    """Read which part TensorRT-LLM could not create, and its figures, which lack their unit."""
    told = match.groupdict()
    if told["_total"]:
        fields["total_bytes"] = printed_bytes(f"{told['_total']}gib")
        fields["free_bytes"] = printed_bytes(f"{told['_free']}gib")
    return fields | {"sub_kind": _PARTS.get(told["_part"] or "", "compute-buffer")}


def _ggml_check(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields | None:
    """Tell the virtual-memory pool, whose calls some drivers refuse, from a full device."""
    del stream
    if match.group("_vmm"):
        return fields | {"sub_kind": "vmm", "backend": "rocm" if "hip" in match.group() else "cuda"}
    return fields


_ggml = partial(Wording, kind="ggml", refine=_ggml_buffer, group="ggml")
_other = partial(Wording, kind=OTHER)

FRAMEWORKS: Final = (
    _ggml(
        "ggml",
        r"ggml_backend_(?P<_word>cuda|rocm|hip|musa|sycl|vk|cann|metal)_buffer_type_alloc_buffer:"
        r"allocating<requested_bytes>ondevice<device_index>:?[a-z_]{0,40}(?:failed)?(?::outofmemory)?",
    ),
    _ggml(
        "ggml",
        r"ggml_(?P<_word>vulkan):(?:device|host)?memoryallocationofsize(?P<requested_bytes>COUNT)failed",
        backend="vulkan",
    ),
    _ggml(
        "ggml",
        r"failedtoallocate(?P<_word>cuda|rocm|vulkan|metal|sycl|musa|cann|mtl|cpu)"
        r"(?:_host|_pinned)?<device_index>?(?:_split)?bufferofsize(?P<requested_bytes>COUNT)",
    ),
    Wording(
        "ggml-host",
        # ggml/src/ggml-backend.cpp: ggml_backend_cpu_buffer_type_alloc_buffer
        r"(?:ggml_backend_cpu_buffer_type_)?alloc_buffer:failedtoallocatebufferofsize"
        r"(?P<requested_bytes>COUNT)",
        "ggml-host",
        kind=HOST,
        backend="cpu",
        is_device_oom=False,
    ),
    _ggml("ggml", r"(?:vk::[\w:]{1,60}:)?erroroutofdevicememory", backend="vulkan"),
    Wording(
        "ggml",
        # ggml/src/ggml-cuda/ggml-cuda.cu: CUDA_CHECK of 2023, and CU_CHECK of the virtual-memory
        # pool, which a HIP build calls HipVMM
        r"ggml[-_](?P<_word>cuda|hip|sycl)[\w./-]{0,40}:\d{1,6}:(?P<_vmm>(?:hip|cu|cuda)vmmfailure)?"
        r":?outofmemory",
        kind="ggml",
        refine=_ggml_check,
        group="ggml",
    ),
    _ggml(
        "ggml-loading",
        # src/llama-model.cpp: load_tensors
        r"(?:errorloadingmodel:)?unabletoallocate(?:(?P<_word>cuda|rocm|vulkan|metal|sycl|musa|cann"
        r"|cpu)<device_index>?|backend)buffer",
    ),
    _other(
        "paddle",
        # Paddle 1.5, paddle/fluid/memory/detail/system_allocator.cc
        r"cannotmalloc<requested_bytes>gpumemory",
        backend="paddle",
    ),
    _other(
        "paddle",
        r"outofmemoryerrorongpu\d{1,3}\.?cannotallocate<requested_bytes>memoryongpu"
        r"<device_index>,?(?:<allocated_bytes>memoryhasbeenallocatedand)?"
        r"(?:availablememoryisonly<free_bytes>)?",
        backend="paddle",
    ),
    _other(
        "paddle",
        r"allocating<=available(?:,butreceivedallocating:|failed,)"
        r"(?P<requested_bytes>COUNT)>(?:available:)?(?P<free_bytes>COUNT)",
        backend="paddle",
    ),
    _other(
        "cupy",
        # cupy 7 to 13, cuda/memory.pyx: OutOfMemoryError
        r"outofmemoryallocating(?P<requested_bytes>COUNT)bytes"
        r"(?:\(allocatedsofar:(?P<allocated_bytes>COUNT)bytes)?",
        backend="cupy",
    ),
    _other(
        "onnxruntime",
        r"failedtoallocatememoryforrequestedbufferofsize(?P<requested_bytes>COUNT)",
        backend="onnxruntime",
    ),
    _other(
        "onnxruntime-limit",
        r"availablememoryof(?P<free_bytes>COUNT)issmallerthanrequestedbytesof(?P<requested_bytes>COUNT)",
        "arena-limit",
        backend="onnxruntime",
    ),
    _other(
        "flashinfer",
        # flashinfer, include/flashinfer/allocator.h: a buffer with a fixed size
        r"(?:failedtoallocate|bufferoverflowwhenallocating)memoryfor\w{1,60}withsize"
        r"(?P<requested_bytes>COUNT)andalignment\d{1,4}(?:,butonly(?P<free_bytes>COUNT)bytes)?",
        "workspace-limit",
    ),
    # mlx 0.5 to 0.31, mlx/backend/metal/allocator.cpp
    _other(
        "mlx-buffer",
        r"attemptingtoallocate<requested_bytes>whichisgreaterthanthemaximumallowedbuffersize"
        r"of<limit_bytes>",
        "buffer-too-large",
        backend="mps",
    ),
    _other(
        "mlx-count",
        r"\[metal::malloc\]resourcelimit\(\d{1,9}\)exceeded",
        "buffer-count",
        backend="mps",
    ),
    _other(
        "mlx-malloc",
        r"\[(?:metal::)?malloc(?:_or_wait)?\]unabletoallocate<requested_bytes>",
        backend="mps",
    ),
    _other(
        "directml",
        r"couldnotallocatetensorwith(?P<requested_bytes>COUNT)bytes\.?"
        r"thereisnotenoughgpuvideomemory",
        backend="directml",
    ),
    Wording(
        "batch-search",
        # accelerate 0.10 to 1.15, utils/memory.py: every batch size ran out of memory
        r"noexecutablebatchsizefound,reachedzero",
        "figures-lost",
    ),
    Wording(
        "detectron2-retry",
        # detectron2/utils/memory.py, retry_if_cuda_oom: continues with the inputs on the CPU
        r"attemptingtocopyinputsof[^`]{1,160}?tocpuduetocudaoom",
        "went-on",
        is_warning=True,
    ),
    Wording(
        "vae-retry",
        # ComfyUI 0.3, comfy/sd.py, and its forks: VAE.decode and VAE.encode
        r"ranoutofmemorywhenregularvae(?:de|en)coding,retryingwithtiledvae",
        "went-on",
        is_warning=True,
    ),
    *(
        Wording("spilled", literal, "went-on", refine=_SLOW, is_warning=True, is_marker=True)
        # Written by people who watch Windows' task manager; no program prints this.
        for literal in ("sharedgpumemory", "sysmemfallback")
    ),
    _other(
        "trtllm-executor",
        # tensorrt_llm 1.0 to 1.2, _torch/pyexecutor/py_executor_creator.py
        r"executorcreationfailedduetoinsufficientgpumemory\.?"
        r"(?:thefollowingcomponentcouldnotbecreated:(?P<_part>[a-z]{1,60}?)totalgpumemory\(gib\):"
        r"(?P<_total>\d{1,6}\.\d\d)freegpumemorybeforecomponentcreationattempt\(gib\):"
        r"(?P<_free>\d{1,6}\.\d\d))?",
        backend="trtllm",
        refine=_executor,
    ),
    _other(
        "tensorrt",
        r"requestedamountofgpumemory\(<requested_bytes>\)couldnotbeallocated",
        backend="tensorrt",
        refine=_TENSORRT,
    ),
    _other(
        "tensorrt",
        r"outofmemory\((?:requested(?:sizewas)?<requested_bytes>|nofurtherinformation)"
        r"[^()]{0,120}\)",
        backend="tensorrt",
        refine=_TENSORRT,
    ),
    Wording(
        "ipex-4gb",
        r"cannotallocatememoryblockwithsizelargerthanSIZE!?\.?"
        r"(?:triedtoallocate<requested_bytes>)?"
        r"(?:\((?:gpu|xpu)?<device_index>;<total_bytes>totalcapacity;"
        r"(?:<allocated_bytes>alreadyallocated;)?(?:<reserved_bytes>reservedintotal)?)?",
        "single-allocation-limit",
        backend="xpu",
    ),
)


def _free_share(fields: Fields, match: re.Match[str], _stream: LogStream) -> Fields:
    """Read ``(5.01/6.0 GiB)``, in which only the second figure has a unit."""
    unit = match.group("total_bytes").lstrip("0123456789.,")
    return fields | {"free_bytes": printed_bytes(match.group("_free") + unit)}


_tgi = partial(Wording, kind=KV_CACHE, backend="tgi")
_sglang = partial(Wording, kind=KV_CACHE, backend="sglang")
_vllm = partial(Wording, kind=KV_CACHE, backend="vllm", hint="gpu_memory_utilization")

KV_CACHE_CHECKS: Final = (
    _tgi(
        "tgi-prefill",
        # text_generation_server/models/flash_causal_lm.py, 0.9 to 2.4: warmup
        r"notenoughmemorytohandle<kv_tokens_requested>(?:prefill|total)tokens",
        "prefill",
        hint="max-batch-prefill-tokens",
    ),
    _vllm("vllm-no-blocks", r"noavailablememoryforthecacheblocks", "kv-budget", group="vllm-kv"),
    # v1/core/kv_cache_planning.py, 0.33: with --max-model-len -1
    _vllm("vllm-auto-fit", r"cannotauto-fitmax_model_len:notenoughgpumemory", "kv-budget"),
    _vllm("vllm-short-cache", r"(?:insufficient|notenough)kvcache(?:memory|space)", "kv-budget"),
    _vllm(
        "vllm-negative-cache",
        # worker/worker.py, 0.6 to 0.8: what is left of the limit after weights and one step
        r"reservedforkvcacheis-SIZE",
        "kv-budget",
        group="vllm-kv",
    ),
    _vllm(
        "vllm-tokens",
        r"max(?:imum)?seq(?:uence)?len(?:gth)?\(<kv_tokens_requested>\)islargerthanthemaximum"
        r"numberoftokensthatcanbestoredinkvcache\(<kv_tokens_capacity>\)",
        "kv-budget",
    ),
    _vllm(
        "vllm-bytes",
        r"(?:max(?:imum)?seq(?:uence)?len(?:gth)?\(<kv_tokens_requested>\),?)?"
        r"\(?<requested_bytes>kvcacheisneeded,?"
        r"(?:whichislargerthantheavailablekvcachememory\(<limit_bytes>\))?"
        r"(?:\.?basedontheavailablememory,?(?:the)?estimatedmaximummodellengthis"
        r"<kv_tokens_capacity>)?",
        "kv-budget",
    ),
    _vllm(
        "vllm-sampler",
        # v1/worker/gpu_model_runner.py, 0.8 to 0.33: _dummy_sampler_run, _dummy_pooler_run
        r"(?:cuda)?outofmemoryoccurredwhenwarmingup(?:sampler|pooler(?:\([^()]{1,40}\))?)with"
        r"<n_sequences>dummyrequests",
        "warm-up",
    ),
    _vllm(
        "vllm-startup",
        r"freememoryondevice(?:(?:cuda|xpu|hip|npu)?:?<device_index>)?"
        r"\((?P<_free>\d{1,9}(?:\.\d{1,9})?)(?:[kmgt]i?b)?/<total_bytes>\)onstartup"
        r"islessthan(?:desiredgpumemoryutilization|theengine'sbudget"
        r"afterexcludingexternalprocess'sweights)\(\d{1,3}(?:\.\d{1,9})?,<requested_bytes>\)",
        "startup-check",
        refine=_free_share,
    ),
    _sglang(
        "sglang",
        r"notenoughmemory\.pleasetrytoincrease-{0,2}mem-fraction-static",
        "kv-budget",
        hint="mem-fraction-static",
    ),
    _sglang(
        "sglang-window",
        # srt/model_executor/pool_configurator.py, 0.5.23: the pool of sliding windows took it all
        r"leavesnoroomforthefullkvpoolwithintheavailable",
        "kv-budget",
        hint="mem-fraction-static",
    ),
    _sglang(
        "sglang-pool",
        # srt/mem_cache/common.py (allocation.py in 0.5.23): alloc_token_slots, its paged variants
        r"(?:prefill|decode|(?=outofmemory\.trytoloweryourbatchsize\.?trytoallocate\d))"
        r"outofmemory\.trytoloweryourbatchsize(?:\.?trytoallocate"
        r"<kv_tokens_requested>tokens\.?(?:av\w{5,9}tokens:<kv_tokens_capacity>)?)?",
        "pool-full",
    ),
    _sglang("sglang-slots", r"alloc_req_slotsrunsoutofmemory", "pool-full"),
    _sglang(
        "sglang-unbalanced",
        # sglang/srt/model_executor/model_runner.py: checked before the model is loaded
        r"thememorycapacityisunbalanced",
        "unbalanced-gpus",
        kind=OTHER,
    ),
)
