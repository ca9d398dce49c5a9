"""cuBLAS, cuDNN, NCCL and their kin: memory that the caching allocator does not manage."""

from __future__ import annotations

import re
from typing import Final

from fragdoctor.inputs.log_streams import Stream
from fragdoctor.inputs.wordings.wording import Fields, Wording, compile_squeezed

_TF: Final = re.compile(r"tensorflow|stream_executor|xla/")


def _backend(fields: Fields, match: re.Match[str], stream: Stream) -> Fields:
    before = stream.before(match.start(), 300)
    if _TF.search(before):
        return fields | {"backend": "tf"}
    if re.search(r"hip|rocblas|miopen|rccl", match.group()):
        return fields | {"backend": "rocm"}
    return fields


def _nccl_error(fields: Fields, match: re.Match[str], stream: Stream) -> Fields | None:
    """Keep ``ncclUnhandledCudaError`` only where its ``Last error`` is a lack of memory."""
    tail = stream.squeezed[match.end() : match.end() + 400]
    return fields if "outofmemory" in tail or "calloc" in tail else None


WORDINGS: Final = (
    Wording(
        "cublas",
        "cublas",
        "cuda",
        "_alloc_failed",
        compile_squeezed(
            r"(?:cuda(?:error)?:)?(?:cublas|cusolver|cusparse|cufft|curand|hipblas|hipsparse)"
            r"(?:_status)?_alloc_failed(?:whencalling`[^`]{1,120}`)?"
        ),
        back=40,
        refine=_backend,
        sub_kind="handle",
    ),
    Wording(
        "cublas-init",
        "cublas",
        "cuda",
        "blas_status_not_initialized",
        compile_squeezed(r"(?:cu|hip)blas_status_not_initialized(?:whencalling`[^`]{1,120}`)?"),
        back=4,
        refine=_backend,
        sub_kind="maybe-memory",
    ),
    Wording(
        "rocblas",
        "cublas",
        "rocm",
        "rocblas_status_memory_error",
        compile_squeezed(r"rocblas_status_memory_error"),
    ),
    Wording(
        "cudnn",
        "cudnn",
        "cuda",
        "cudnn_status_alloc_failed",
        compile_squeezed(r"cudnn_status_alloc_failed"),
        refine=_backend,
    ),
    Wording(
        "cudnn-init",
        "cudnn",
        "cuda",
        "cudnn_status_not_initialized",
        compile_squeezed(r"cudnn_status_not_initialized"),
        refine=_backend,
        sub_kind="maybe-memory",
    ),
    Wording(
        "cudnn-no-algorithm",
        "cudnn",
        "cuda",
        "validcudnnalgorithm",
        compile_squeezed(r"unabletofindavalidcudnnalgorithmtorunconvolution"),
        back=14,
        sub_kind="maybe-memory",
    ),
    Wording(
        "cudnn-no-engine",
        "cudnn",
        "cuda",
        "wasunabletofindanengine",
        compile_squeezed(r"getwasunabletofindanenginetoexecutethiscomputation"),
        back=3,
        is_device_oom=False,
        sub_kind="maybe-memory",
    ),
    Wording(
        "cudnn-internal",
        "cudnn",
        "cuda",
        "cudnn_status_",
        compile_squeezed(r"cudnn_status_(?:internal_error|not_supported)"),
        refine=_backend,
        is_device_oom=False,
        sub_kind="maybe-memory",
    ),
    Wording(
        "nccl-warn",
        "nccl",
        "cuda",
        "failure",
        compile_squeezed(
            r"(?:\[<device_index>\](?:[\w/.-]{1,80}:\d{1,6})?ncclwarn(?:\[[^\]]{1,60}\])?)?"
            r"(?:cuda|hip)failure(?:2)?['\"]?outofmemory['\"]?"
        ),
        back=170,
        refine=_backend,
        group="nccl",
    ),
    Wording(
        "nccl-calloc",
        "nccl",
        "cuda",
        "failedtocuda",
        compile_squeezed(
            r"(?:\[<device_index>\](?:[\w/.-]{1,80}:\d{1,6})?ncclwarn(?:\[[^\]]{1,60}\])?)?"
            r"failedtocuda(?:host)?c?alloc(?:async)?<requested_bytes>"
        ),
        back=170,
        group="nccl",
    ),
    Wording(
        "nccl-unhandled",
        "nccl",
        "cuda",
        "ncclunhandledcudaerror",
        compile_squeezed(r"ncclunhandledcudaerror"),
        refine=_nccl_error,
        group="nccl",
    ),
)
