"""ggml, Paddle, CuPy, ONNX Runtime, TensorRT, Ray, IPEX, and the KV caches of vLLM and SGLang."""

from __future__ import annotations

import re
from typing import Final

from fragdoctor.inputs.log_streams import LogStream
from fragdoctor.inputs.wordings.wording import (
    ALLOCATOR,
    BACKEND_OF_WORD,
    HOST,
    KV_CACHE,
    OTHER,
    Fields,
    Wording,
    compile_squeezed,
    printed_bytes,
)

_PURPOSES: Final = (
    ("compute-buffer", re.compile(r"compute(?:pp|tg)?buffers")),
    ("kv-buffer", re.compile(r"kv_?cache|kv_?self|memorymodule")),
    ("weights-buffer", re.compile(r"alloc_tensor_range|errorloadingmodel")),
)
"""What llama.cpp says below ggml's lines of the buffer that it could not have (src/llama*.cpp)."""

_BUFFER: Final = re.compile(r"(cuda|rocm|hip|vulkan|metal|sycl|musa|cann|cpu)(\d{1,3})?buffer")


def _ggml(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields | None:
    """Say which backend from the buffer's name: a ROCm build also prints "cudaMalloc"."""
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


def _slow(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields | None:
    """Keep what tells of a slow program: the words alone are part of every talk about GPUs."""
    around = stream.squeezed[max(0, match.start() - 800) : match.end() + 800]
    return fields if _SLOW.search(around) else None


_SLOW: Final = re.compile(r"slow(?!est)|snail|crawl|takesforever|speeddrop|bottleneck")


def _tensorrt(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields | None:
    """Say whether TensorRT-LLM runs the builder: its own lines stand around TensorRT's."""
    around = stream.squeezed[max(0, match.start() - 8000) : match.end() + 8000]
    return fields | ({"sub_kind": "trtllm"} if _TRTLLM.search(around) else {})


_TRTLLM: Final = re.compile(r"trt-llm\]|tensorrt[-_]llm|trtllm")


def _ggml_check(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields | None:
    """Tell the pool with virtual memory, whose calls some drivers refuse, from a full device."""
    del stream
    if match.group("_vmm"):
        return fields | {"sub_kind": "vmm", "backend": "rocm" if "hip" in match.group() else "cuda"}
    return fields


FRAMEWORKS: Final = (
    Wording(
        "ggml",
        "ggml",
        "cuda",
        "buffer_type_alloc_buffer:",
        compile_squeezed(
            r"ggml_backend_(?P<_word>cuda|rocm|hip|musa|sycl|vk|cann|metal)_buffer_type_alloc_buffer:"
            r"allocating<requested_bytes>ondevice<device_index>:?[a-z_]{0,40}(?:failed)?(?::outofmemory)?"
        ),
        back=24,
        refine=_ggml,
        group="ggml",
    ),
    Wording(
        "ggml",
        "ggml",
        "vulkan",
        "memoryallocationofsize",
        compile_squeezed(
            r"ggml_(?P<_word>vulkan):(?:device|host)?memoryallocationofsize(?P<requested_bytes>COUNT)failed"
        ),
        back=20,
        refine=_ggml,
        group="ggml",
    ),
    Wording(
        "ggml",
        "ggml",
        "cuda",
        "bufferofsize",
        compile_squeezed(
            r"failedtoallocate(?P<_word>cuda|rocm|vulkan|metal|sycl|musa|cann|mtl|cpu)"
            r"(?:_host|_pinned)?<device_index>?(?:_split)?bufferofsize(?P<requested_bytes>COUNT)"
        ),
        back=36,
        refine=_ggml,
        group="ggml",
    ),
    Wording(
        "ggml-host",
        HOST,
        "cpu",
        "failedtoallocatebufferofsize",
        # ggml/src/ggml-backend.cpp: ggml_backend_cpu_buffer_type_alloc_buffer
        compile_squeezed(
            r"(?:ggml_backend_cpu_buffer_type_)?alloc_buffer:failedtoallocatebufferofsize"
            r"(?P<requested_bytes>COUNT)"
        ),
        back=42,
        is_device_oom=False,
        sub_kind="ggml-host",
    ),
    Wording(
        "ggml",
        "ggml",
        "mps",
        "failedtoallocatebuffer,size",
        compile_squeezed(
            r"ggml_(?P<_word>metal)[\w:()]{0,80}?failedtoallocatebuffer,size=<requested_bytes>"
        ),
        back=90,
        refine=_ggml,
        group="ggml",
    ),
    Wording(
        "ggml",
        "ggml",
        "vulkan",
        "erroroutofdevicememory",
        compile_squeezed(r"(?:vk::[\w:]{1,60}:)?erroroutofdevicememory"),
        back=64,
        refine=_ggml,
        group="ggml",
    ),
    Wording(
        "ggml",
        "ggml",
        "cuda",
        ":outofmemory",
        # ggml/src/ggml-cuda/ggml-cuda.cu: CUDA_CHECK of 2023, and CU_CHECK of the pool with
        # virtual memory, which a HIP build calls HipVMM
        compile_squeezed(
            r"ggml[-_](?P<_word>cuda|hip|sycl)[\w./-]{0,40}:\d{1,6}:(?P<_vmm>(?:hip|cu|cuda)vmmfailure)?"
            r":?outofmemory"
        ),
        back=80,
        refine=_ggml_check,
        group="ggml",
    ),
    Wording(
        "ggml-loading",
        "ggml",
        "cuda",
        "unabletoallocate",
        # src/llama-model.cpp: load_tensors
        compile_squeezed(
            r"(?:errorloadingmodel:)?unabletoallocate(?:(?P<_word>cuda|rocm|vulkan|metal|sycl|musa|cann"
            r"|cpu)<device_index>?|backend)buffer"
        ),
        back=18,
        refine=_ggml,
        group="ggml",
    ),
    Wording(
        "paddle",
        OTHER,
        "paddle",
        "cannotmalloc",
        # Paddle 1.5, paddle/fluid/memory/detail/system_allocator.cc
        compile_squeezed(r"cannotmalloc<requested_bytes>gpumemory"),
    ),
    Wording(
        "paddle",
        OTHER,
        "paddle",
        "outofmemoryerrorongpu",
        compile_squeezed(
            r"outofmemoryerrorongpu\d{1,3}\.?cannotallocate<requested_bytes>memoryongpu"
            r"<device_index>,?(?:<allocated_bytes>memoryhasbeenallocatedand)?"
            r"(?:availablememoryisonly<free_bytes>)?"
        ),
    ),
    Wording(
        "paddle",
        OTHER,
        "paddle",
        "allocating<=available",
        compile_squeezed(
            r"allocating<=available(?:,butreceivedallocating:|failed,)"
            r"(?P<requested_bytes>COUNT)>(?:available:)?(?P<free_bytes>COUNT)"
        ),
    ),
    Wording(
        "cupy",
        OTHER,
        "cupy",
        "outofmemoryallocating",
        compile_squeezed(
            r"outofmemoryallocating<requested_bytes>(?:\(allocatedsofar:<allocated_bytes>"
            r"(?:,limitsetto:<limit_bytes>)?\))?"
        ),
    ),
    Wording(
        "cupy",
        OTHER,
        "cupy",
        "outofmemoryerror",
        compile_squeezed(r"cupy(?:\.cuda)?\.memory\.outofmemoryerror(?!:outofmemory)"),
        back=17,
        may_be_prose=True,
        sub_kind="figures-lost",
    ),
    Wording(
        "onnxruntime",
        OTHER,
        "onnxruntime",
        "memoryforrequestedbufferofsize",
        compile_squeezed(
            r"failedtoallocatememoryforrequestedbufferofsize(?P<requested_bytes>COUNT)"
        ),
        back=16,
    ),
    Wording(
        "onnxruntime-limit",
        OTHER,
        "onnxruntime",
        "issmallerthanrequestedbytes",
        compile_squeezed(
            r"availablememoryof(?P<free_bytes>COUNT)issmallerthanrequestedbytesof(?P<requested_bytes>COUNT)"
        ),
        back=50,
        sub_kind="arena-limit",
    ),
    Wording(
        "directml",
        OTHER,
        "directml",
        "notenoughgpuvideomemory",
        compile_squeezed(
            r"couldnotallocatetensorwith(?P<requested_bytes>COUNT)bytes\.?"
            r"thereisnotenoughgpuvideomemory"
        ),
        back=80,
    ),
    Wording(
        "batch-search",
        ALLOCATOR,
        "cuda",
        "noexecutablebatchsizefound",
        # accelerate 0.10 to 1.15, utils/memory.py: each try ran out of memory, down to none
        compile_squeezed(r"noexecutablebatchsizefound,reachedzero"),
        sub_kind="batch-search",
    ),
    Wording(
        "detectron2-retry",
        ALLOCATOR,
        "cuda",
        "tocpuduetocudaoom",
        # detectron2/utils/memory.py, retry_if_cuda_oom: goes on with the inputs on the CPU
        compile_squeezed(r"attemptingtocopyinputsof[^`]{1,160}?tocpuduetocudaoom"),
        back=200,
        is_warning=True,
        sub_kind="went-on",
    ),
    Wording(
        "vae-retry",
        ALLOCATOR,
        "cuda",
        "whenregularvae",
        # ComfyUI 0.3, comfy/sd.py, and its forks: VAE.decode and VAE.encode
        compile_squeezed(r"ranoutofmemorywhenregularvae(?:de|en)coding,retryingwithtiledvae"),
        back=14,
        is_warning=True,
        sub_kind="went-on",
    ),
    *(
        Wording(
            "spilled",
            ALLOCATOR,
            "cuda",
            literal,
            compile_squeezed(literal),
            refine=_slow,
            is_warning=True,
            is_marker=True,
            sub_kind="went-on",
        )
        # What people write who watch Windows' task manager: no program prints it.
        for literal in ("sharedgpumemory", "sysmemfallback")
    ),
    Wording(
        "tensorrt",
        OTHER,
        "tensorrt",
        "requestedamountofgpumemory",
        compile_squeezed(r"requestedamountofgpumemory\(<requested_bytes>\)couldnotbeallocated"),
        refine=_tensorrt,
    ),
    Wording(
        "tensorrt",
        OTHER,
        "tensorrt",
        "outofmemory(",
        compile_squeezed(
            r"outofmemory\((?:requested(?:sizewas)?<requested_bytes>|nofurtherinformation)"
            r"[^()]{0,120}\)"
        ),
        refine=_tensorrt,
    ),
    Wording(
        "ipex-4gb",
        ALLOCATOR,
        "xpu",
        "memoryblockwithsizelargerthan",
        compile_squeezed(
            r"cannotallocatememoryblockwithsizelargerthanSIZE!?\.?"
            r"(?:triedtoallocate<requested_bytes>)?"
            r"(?:\((?:gpu|xpu)?<device_index>;<total_bytes>totalcapacity;"
            r"(?:<allocated_bytes>alreadyallocated;)?(?:<reserved_bytes>reservedintotal)?)?"
        ),
        back=17,
        sub_kind="single-allocation-limit",
    ),
)


_HINT: Final = "gpu_memory_utilization"


def _free_share(fields: Fields, match: re.Match[str], _stream: LogStream) -> Fields:
    """Read ``(5.01/6.0 GiB)``: the unit stands once, after the second figure."""
    unit = match.group("total_bytes").lstrip("0123456789.,")
    return fields | {"free_bytes": printed_bytes(match.group("_free") + unit)}


KV_CACHE_CHECKS: Final = (
    Wording(
        "tgi-prefill",
        KV_CACHE,
        "tgi",
        "notenoughmemorytohandle",
        # text_generation_server/models/flash_causal_lm.py, 1.0 to 2.4: warmup
        compile_squeezed(r"notenoughmemorytohandle<kv_tokens_requested>prefilltokens"),
        sub_kind="prefill",
        hint="max-batch-prefill-tokens",
    ),
    Wording(
        "tgi-total",
        KV_CACHE,
        "tgi",
        "notenoughmemorytohandle",
        # the same, 0.9 to 1.0
        compile_squeezed(
            r"notenoughmemorytohandle<kv_tokens_requested>totaltokenswith\d{1,9}prefilltokens"
        ),
        sub_kind="total-tokens",
        hint="max-batch-total-tokens",
    ),
    Wording(
        "vllm-no-blocks",
        KV_CACHE,
        "vllm",
        "noavailablememoryforthecacheblocks",
        compile_squeezed(r"noavailablememoryforthecacheblocks"),
        sub_kind="kv-budget",
        hint=_HINT,
        group="vllm-kv",
    ),
    Wording(
        "vllm-negative-cache",
        KV_CACHE,
        "vllm",
        "reservedforkvcacheis-",
        # worker/worker.py, 0.6 to 0.8: what weights and a step leave of the limit
        compile_squeezed(r"reservedforkvcacheis-SIZE"),
        sub_kind="kv-budget",
        hint=_HINT,
        group="vllm-kv",
    ),
    Wording(
        "vllm-tokens",
        KV_CACHE,
        "vllm",
        "islargerthanthemaximumnumberoftokens",
        compile_squeezed(
            r"max(?:imum)?seq(?:uence)?len(?:gth)?\(<kv_tokens_requested>\)islargerthanthemaximum"
            r"numberoftokensthatcanbestoredinkvcache\(<kv_tokens_capacity>\)"
        ),
        back=60,
        sub_kind="kv-budget",
        hint=_HINT,
    ),
    Wording(
        "vllm-bytes",
        KV_CACHE,
        "vllm",
        "kvcacheisneeded",
        compile_squeezed(
            r"(?:max(?:imum)?seq(?:uence)?len(?:gth)?\(<kv_tokens_requested>\),?)?"
            r"\(?<requested_bytes>kvcacheisneeded,?"
            r"(?:whichislargerthantheavailablekvcachememory\(<limit_bytes>\))?"
            r"(?:\.?basedontheavailablememory,?(?:the)?estimatedmaximummodellengthis"
            r"<kv_tokens_capacity>)?"
        ),
        back=110,
        sub_kind="kv-budget",
        hint=_HINT,
    ),
    Wording(
        "vllm-sampler",
        KV_CACHE,
        "vllm",
        "whenwarmingup",
        # v1/worker/gpu_model_runner.py, 0.8 to 0.11: _dummy_sampler_run, _dummy_pooler_run
        compile_squeezed(
            r"(?:cuda)?outofmemoryoccurredwhenwarmingup(?:sampler|pooler(?:\([^()]{1,40}\))?)with"
            r"<n_sequences>dummyrequests"
        ),
        back=24,
        sub_kind="warm-up",
        hint=_HINT,
    ),
    Wording(
        "vllm-startup",
        KV_CACHE,
        "vllm",
        "freememoryondevice",
        compile_squeezed(
            r"freememoryondevice(?:(?:cuda|xpu|hip|npu)?:?<device_index>)?"
            r"\((?P<_free>\d{1,9}(?:\.\d{1,9})?)(?:[kmgt]i?b)?/<total_bytes>\)onstartup"
            r"islessthandesiredgpumemoryutilization\(\d{1,3}(?:\.\d{1,9})?,<requested_bytes>\)"
        ),
        sub_kind="startup-check",
        hint=_HINT,
        refine=_free_share,
    ),
    Wording(
        "sglang",
        KV_CACHE,
        "sglang",
        "notenoughmemory.pleasetrytoincrease",
        compile_squeezed(r"notenoughmemory\.pleasetrytoincrease-{0,2}mem-fraction-static"),
        sub_kind="kv-budget",
        hint="mem-fraction-static",
    ),
)
