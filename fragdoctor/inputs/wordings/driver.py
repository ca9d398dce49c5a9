"""Errors of libraries, and of drivers and runtimes that say "out of memory" and nothing more.

The memory of cuBLAS, cuDNN, NCCL and similar libraries is not managed by the caching allocator.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Final

from fragdoctor.inputs.log_streams import LogStream
from fragdoctor.inputs.wordings.wording import (
    DRIVER,
    HOST,
    OTHER,
    Fields,
    Wording,
    compile_squeezed,
    ends_line,
    on_host,
    only_where,
    where,
)

_PINNED: Final = re.compile(r"pin_memory\(|inpin_memory|_pin_memory|cudahostalloc|cudahostregister")
_REQUEST: Final = compile_squeezed("SIZE")
_GGML: Final = re.compile(r"ggml[-_](?:cuda|backend)|infunction[a-z_:]{1,80}atggml")
_NO_PINNED: Final = "ofpinnedmemory:"


def _cuda_error(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields | None:
    """Recognize pinned host memory by the traceback above, and ggml's check by its file."""
    text = stream.squeezed
    stack = text[max(0, match.start() - 1200) : match.start()]
    if _GGML.search(text, match.start(), match.end() + 200):
        if _NO_PINNED not in text[max(0, match.start() - 4000) : match.start()]:
            return fields | {"kind": "ggml"}
        return on_host(fields, "ggml-pinned")
    if _PINNED.search(stack[stack.rfind("traceback") + 1 :]):
        return on_host(fields, "pinned-host")
    return fields


def _not_reported_before(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields | None:
    """Drop the exception if THCudaCheck has already reported the same failure above it."""
    above = stream.squeezed[max(0, match.start() - 4000) : match.start()]
    check, exception = above.rfind("thcudacheckfail"), above.rfind("cudaruntimeerror(2)")
    return None if check > exception else fields


def _cut_request(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields | None:
    """Keep a message only if it is cut off before its first figure is complete."""
    is_cut = "allocate".startswith(match.group("_label")) and stream.ends_at(match.end())
    return None if not is_cut or _REQUEST.match(stream.squeezed, match.end("_label")) else fields


def _of_trtllm(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields | None:
    """Attribute TensorRT-LLM's own checks to it (cpp/include/tensorrt_llm/common)."""
    around = stream.before(match.start(), 200) + stream.after(match.end(), 200)
    if "tensorrt" in around:
        return fields | {"kind": OTHER, "backend": "tensorrt", "sub_kind": "trtllm"}
    return fields


_NO_CONTEXT: Final = where(r"ctxcreate|primaryctxretain", 400, 400, sub_kind="no-context")

_driver = partial(Wording, kind=DRIVER)
_on_host = partial(Wording, sub_kind="driver-host", kind=HOST, backend="cpu", is_device_oom=False)
_lost = partial(Wording, sub_kind="figures-lost")

DRIVERS: Final = (
    _driver(
        "runtime-error",
        r"(?P<_word>cuda|hip|xpu|musa|npu|mlu)(?:runtime)?error:outofmemory"
        r"(?:\(?(?:at)?[\w./:\\+-]{1,160}\.(?:cc|cpp|cxx|cuh?|hpp|h|c):\d{1,6}\)?)?",
        refine=_cuda_error,
        may_be_prose=True,
    ),
    # spconv 1.0 to 1.2, include/tensorview/helper_launch.h: prints the error's number
    _driver("runtime-error", r"cudaexecutionfailedwitherror2(?!\d)"),
    # Ray's name for PyTorch's exception, unless the exception itself is printed below
    _lost(
        "ray-task",
        r"raytaskerror\(outofmemoryerror\)",
        refine=only_where("outofmemory", 0, 8000, is_there=False),
    ),
    _driver(
        "driver-error",
        # C10_CUDA_DRIVER_CHECK (c10/cuda/driver_api.h, 2.1 to 2.15): the allocator uses it only
        # for the calls that map expandable segments.
        r"(?P<_word>cuda|hip|musa)drivererror:(?:outofmemory|unknownerror|operationnotsupported"
        r"|devicenotready)",
        "driver-api",
        may_be_prose=True,
    ),
    _driver(
        "device-count",
        r"unexpectederrorfromcudagetdevicecount\(\)\.?"
        r"(?:didyourunsomecudafunctionsbeforecallingnumcudadevices\(\)thatmighthavealreadyset"
        r"anerror\?)?error2:outofmemory",
        "no-context",
    ),
    _driver(
        "torch-0.4",
        r"cudaruntimeerror\(2\):outofmemory",
        refine=_not_reported_before,
        versions=("", "0.4"),
    ),
    _driver(
        "thc-check",
        r"thcudacheckfailfile=\S{1,200}?line=\d{1,6}error=2:outofmemory",
        versions=("", "1.4"),
    ),
    _driver("hip-code", r"hiperroroutofmemory", backend="rocm"),
    _driver("hsa-code", r"hsa_status_error_out_of_resources", backend="rocm"),
    _driver(
        "unified-runtime",
        r"(?:ur_result|pi|ze_result)_error_out_of_(?:device_memory|resources)"
        r"(?:\)-?\d{1,3}\((?:ur_result|pi)_error_out_of_(?:device_memory|resources))?",
        backend="xpu",
    ),
    _on_host(
        "driver-host-code",  # Unified Runtime, Level Zero, OpenCL, Vulkan
        r"(?:(?:ur_result|pi|ze_result|vk)_error|cl)_out_of_host_memory",
        backend="cpu",
    ),
    _driver(
        "opencl-code",
        # Khronos' CL/cl.h; programs print the names of its error codes
        r"cl_(?:mem_object_allocation_failure|out_of_resources)",
        backend="opencl",
    ),
    _driver("vulkan-code", r"vk_error_out_of_device_memory", backend="vulkan"),
    _driver("driver-code", r"cuda_error_out_of_memory(?::outofmemory)?", refine=_NO_CONTEXT),
    _driver(
        "runtime-code",
        r"(?<!searchfor.)cudaerrormemoryallocation(?::outofmemory)?",
        may_be_prose=True,
    ),
    _driver(
        "ctranslate2",
        # CTranslate2, src/cuda/utils.h: CUDA_CHECK
        r"(?P<_word>cuda|hip)failedwitherroroutofmemory",
        "ctranslate2",
    ),
    _driver(
        "bitsandbytes",
        r"erroroutofmemoryatline\d{1,6}infile(?:[\w./\\:-]{1,200}?\.(?:cpp|cuh|cu|c|h))?",
        "bitsandbytes",
    ),
    _driver(
        "thrust",
        # xgboost, src/common/device_vector.cu and device_helpers.cuh: prints figures below it
        r"bad_alloc:cuda(?:error)?[a-z]{0,30}:outofmemory(?:-?freememory:(?P<free_bytes>COUNT)"
        r"-?requestedmemory:(?P<requested_bytes>COUNT))?",
        "thrust",
    ),
    _driver(
        "thrust",
        # thrust/system/cuda/detail/util.h: the step's name, "failed", and the error
        r"(?:parallel_for|trivial_device_copy[a-z>-]{0,8}|reduce|scan|sort|copy_if|unique)"
        r"(?:[a-z_0-9]{0,24})failed(?:tosynchronize|on[a-z0-9]{1,20}step)?:"
        r"(?:cudaerrormemoryallocation:)?outofmemory",
        "thrust",
    ),
    _driver(
        "thrust", r"(?:aftercudalaunchin)?triple_chevron_launcher::launch\(\):outofmemory", "thrust"
    ),
    _driver(
        "thrust",
        r"thrust::system::(?:system_error|detail::bad_alloc)'?what\(\):(?:std::bad_alloc:)?outofmemory",
        "thrust",
    ),
    *(
        Wording("rmm", pattern, kind=OTHER, backend="rmm")
        # rmm 0.10 to 25.08, error.hpp, cuda_memory_resource.hpp and pool_memory_resource.hpp
        for pattern in (
            (
                r"bad_alloc:out_of_memory(?::cudaerror)?(?:(?:at)?:[\w./:+-]{1,200}?"
                r":cudaerrormemoryallocationoutofmemory)?"
            ),
            r"bad_alloc:cudaerrorat:[\w./:+-]{1,200}?:cudaerrormemoryallocation(?:outofmemory)?",
            r"maximumpoolsizeexceeded",
            r"rmm_error_out_of_memory",
        )
    ),
    _driver(
        "cuda-malloc",
        r"(?P<_word>cuda|hip|cu)(?:malloc|memalloc)(?!\w{0,12}host)[\w&*,]{0,20}(?:\([^()]{0,60}\))?"
        r"(?:retry|call)?(?:failed|returned)?(?:witherror|error)?[\d:,(\"']{0,6}outofmemory",
        may_be_prose=True,
    ),
    _driver(
        "numbered-error",
        r"(?!cudaruntimeerror\(2\):outof)(?P<_word>cuda|hip)(?:runtime|driver|api|failedwith)?"
        r"(?:error|failure|status)(?:code)?[=:(\[#]{0,2}0{0,3}2[)\]]?"
        r"(?:(?:at|in|@)[\w./:+-]{1,120}?)?[:,;-]{0,2}[\"'(]{0,2}"
        r"(?:cudaerrormemoryallocation[:-]{1,2})?outofmemory",
        refine=_cuda_error,
    ),
    _driver("metal-buffer", r"kiogpucommandbuffercallbackerroroutofmemory", backend="mps"),
    _driver(
        "error-in-file",
        r"(?:(?P<_word>cuda|hip)(?:runtime|driver)?error(?:at|in)|gpuassert)"
        r"[\w./:+'\"(),*&>-]{0,140}?:outofmemory",
        refine=_of_trtllm,
    ),
    _lost(
        "allocation-on-device",
        # cudaMallocAsync's message as ComfyUI shows it: cut off after the device's number
        r"allocationondevice(?P<device_index>\d{1,3})?(?!\d?would)",
        refine=ends_line,
    ),
    _lost(
        "dispatched-modules",
        # transformers 4.30 to 4.57, quantizers/quantizer_bnb_*.py: modules did not fit on the GPUs
        r"somemodulesaredispatchedonthecpuorthedisk",
    ),
    _lost(
        "bare",
        r"(?P<_word>cuda|hip|xpu|npu|musa)outofmemory(?!error)(?!\W{0,3}(?:triedto|allocationwas))(?!,(?:can|please))",
        may_be_prose=True,
    ),
    _lost(
        "bare",
        r"(?P<_word>cuda|hip|xpu|npu|musa)outofmemory[.,:;]?triedto(?P<_label>[a-z]{0,8})[\d.,]{0,12}"
        r"(?:[kmg]i?|b[yte]{0,3})?",
        refine=_cut_request,
        may_be_prose=True,
    ),
)


_TF: Final = re.compile(
    r"tensorflow|stream_executor|xla/|couldnotcreatecudnnhandle:$|failedtocreatecublashandle:$"
)
"""TensorFlow's files, and words that only its stream executor prints (xla/stream_executor/cuda)."""


def _backend(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields:
    before = stream.before(match.start(), 300)
    if _TF.search(before):
        return fields | {"backend": "tf"}
    if re.search(r"hip|rocblas|miopen|rccl", match.group()):
        return fields | {"backend": "rocm"}
    return fields


_cublas = partial(Wording, kind="cublas")
_cudnn = partial(Wording, kind="cudnn")
_nccl = partial(Wording, kind="nccl", group="nccl")

LIBRARIES: Final = (
    _cublas(
        "cublas",
        r"(?:cuda(?:error)?:)?(?:cublas|cusolver|cusparse|cufft|curand|hipblas|hipsparse)"
        r"(?:_status)?_alloc_failed(?:whencalling`[^`]{1,120}`)?",
        "handle",
        refine=_backend,
    ),
    _cublas(
        "cublas",
        # MXNet, mshadow/stream_gpu-inl.h: CreateBlasHandle
        r"createcublashandlefailed",
        "handle",
    ),
    _cublas(
        "cublas-init",
        r"(?:(?:cu|hip)blas|cusolver)_status_not_initialized(?:,?whencalling`[^`]{1,120}`)?",
        "maybe-memory",
        refine=_backend,
    ),
    _cublas(
        "cusolver-init",
        r"cusolver(?:error:7|_status_internal_error),?whencalling`?cusolverdncreate",
        "maybe-memory",
    ),
    # calls that need a workspace; cuSPARSE's product of sparse matrices needs the largest one
    _cublas("cufft-internal", r"cufft_internal_error", "maybe-memory", is_device_oom=False),
    _cublas(
        "cusparse-resources",
        r"cusparse_status_insufficient_resources|cudaerror:insufficientresourceswhencalling`?cusparse",
        "maybe-memory",
        is_device_oom=False,
    ),
    _cublas("rocblas", r"rocblas_status_memory_error", backend="rocm"),
    _cudnn("cudnn", r"cudnn_status_alloc_failed", refine=_backend),
    _cudnn("cudnn-init", r"cudnn_status_not_initialized", "maybe-memory", refine=_backend),
    _cudnn(
        "cudnn-no-algorithm", r"unabletofindavalidcudnnalgorithmtorunconvolution", "maybe-memory"
    ),
    _cudnn(
        "cudnn-no-engine",
        r"getwasunabletofindanenginetoexecutethiscomputation",
        "maybe-memory",
        is_device_oom=False,
    ),
    _cudnn(
        "cudnn-internal",
        r"cudnn_status_(?:internal_error|not_supported)",
        "maybe-memory",
        refine=_backend,
        is_device_oom=False,
    ),
    _nccl(
        "nccl-warn",
        r"(?:\[<device_index>\](?:[\w/.-]{1,80}:\d{1,6})?ncclwarn(?:\[[^\]]{1,60}\])?)?"
        r"(?:cuda|hip)failure(?:2)?['\"]?outofmemory['\"]?",
        refine=_backend,
    ),
    _nccl(
        "nccl-calloc",
        r"(?:\[<device_index>\](?:[\w/.-]{1,80}:\d{1,6})?ncclwarn(?:\[[^\]]{1,60}\])?)?"
        r"failedtocuda(?:host)?c?alloc(?:async)?<requested_bytes>",
    ),
    _nccl(
        "nccl-unhandled",
        # torch/csrc/distributed/c10d/NCCLUtils.hpp: C10D_NCCL_CHECK prints the place before the
        # error; its "Last error" shows whether memory ran out
        r"(?:ncclerrorin:[^;]{1,260}?)?ncclunhandledcudaerror",
        refine=only_where(r"outofmemory|calloc", 0, 400),
    ),
)
