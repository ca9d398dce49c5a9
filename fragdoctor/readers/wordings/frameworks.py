"""ggml (llama.cpp), Paddle, CuPy, ONNX Runtime, TensorRT, Ray's wrapper, IPEX's own check."""

from __future__ import annotations

import re
from typing import Final

from fragdoctor.readers.log import Stream
from fragdoctor.readers.wordings import names
from fragdoctor.readers.wordings.base import Fields, Wording, compile_squeezed

_BUFFER: Final = re.compile(r"(cuda|rocm|hip|vulkan|metal|sycl|musa|cann|cpu)(\d{1,3})?buffer")


def _ggml(fields: Fields, match: re.Match[str], stream: Stream) -> Fields | None:
    """Say which backend from the buffer's name: a ROCm build also prints "cudaMalloc"."""
    text = stream.squeezed
    named = _BUFFER.search(text, match.start(), match.end() + 300)
    word = named.group(1) if named else match.groupdict().get("_word") or "cuda"
    word = {"hip": "rocm", "cann": "npu", "mtl": "metal"}.get(word, word)
    fields["backend"] = names.BACKEND_OF_WORD.get(word, word)
    if named and named.group(2) and "device_index" not in fields:
        fields["device_index"] = int(named.group(2))
    if fields["backend"] == "cpu":
        fields |= {"kind": names.HOST, "is_device_oom": False, "sub_kind": "ggml-host"}
    return fields


WORDINGS: Final = (
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
        "paddle",
        names.OTHER,
        "paddle",
        "outofmemoryerrorongpu",
        compile_squeezed(
            r"outofmemoryerrorongpu\d{1,3}\.?cannotallocate<requested_bytes>memoryongpu"
            r"<device_index>,?(?:<allocated_bytes>memoryhasbeenallocatedand)?"
            r"(?:availablememoryisonly<free_bytes>)?"
        ),
    ),
    Wording(
        "cupy",
        names.OTHER,
        "cupy",
        "outofmemoryallocating",
        compile_squeezed(
            r"outofmemoryallocating<requested_bytes>(?:\(allocatedsofar:<allocated_bytes>"
            r"(?:,limitsetto:<limit_bytes>)?\))?"
        ),
    ),
    Wording(
        "onnxruntime",
        names.OTHER,
        "onnxruntime",
        "memoryforrequestedbufferofsize",
        compile_squeezed(
            r"failedtoallocatememoryforrequestedbufferofsize(?P<requested_bytes>COUNT)"
        ),
        back=16,
    ),
    Wording(
        "onnxruntime-limit",
        names.OTHER,
        "onnxruntime",
        "issmallerthanrequestedbytes",
        compile_squeezed(
            r"availablememoryof(?P<free_bytes>COUNT)issmallerthanrequestedbytesof(?P<requested_bytes>COUNT)"
        ),
        back=50,
    ),
    Wording(
        "tensorrt",
        names.OTHER,
        "tensorrt",
        "requestedamountofgpumemory",
        compile_squeezed(r"requestedamountofgpumemory\(<requested_bytes>\)couldnotbeallocated"),
    ),
    Wording(
        "tensorrt",
        names.OTHER,
        "tensorrt",
        "outofmemory(",
        compile_squeezed(
            r"outofmemory\((?:requested<requested_bytes>|nofurtherinformation)"
            r"[^()]{0,120}\)"
        ),
    ),
    Wording(
        "ipex-4gb",
        names.ALLOCATOR,
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
