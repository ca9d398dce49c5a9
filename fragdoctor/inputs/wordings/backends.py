"""Messages of other allocators: cudaMallocAsync, Apple's MPS, JAX/XLA and TensorFlow."""

from __future__ import annotations

import re
from functools import partial
from typing import Final

from fragdoctor.inputs.log_streams import LogStream
from fragdoctor.inputs.wordings.wording import (
    HOST,
    SHARED_MEMORY,
    Fields,
    Wording,
    compile_squeezed,
    on_host,
    printed_bytes,
    where,
)

_ASYNC_FIELDS: Final = (
    ("allocated_bytes", compile_squeezed(r"currentlyallocated:<allocated_bytes>")),
    ("requested_bytes", compile_squeezed(r"requested:<requested_bytes>")),
    ("total_bytes", compile_squeezed(r"devicelimit:<total_bytes>")),
    ("free_bytes", compile_squeezed(r"free\(accordingtocuda\):<free_bytes>")),
    ("limit_bytes", compile_squeezed(r"memoryfraction\):<limit_bytes>")),
)


def _async_figures(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields:
    """Read the table below the first line; it may be missing, as log tools often keep one line."""
    text = stream.squeezed
    end = text.find("wouldexceedallowedmemory", match.end())
    end = min(match.end() + 600, end if end >= 0 else len(text))
    for name, pattern in _ASYNC_FIELDS:
        found = pattern.search(text, match.end(), end)
        if found:
            fields[name] = printed_bytes(found.group(name))
    return fields


CUDA_ASYNC: Final = (
    Wording(
        "cudaMallocAsync",
        r"allocationondevice(?:cuda:)?<device_index>?wouldexceedallowedmemory"
        r"(?:\.?\(outofmemory\))?",
        refine=_async_figures,
        versions=("2.0", ""),
    ),
    Wording(
        "torch-2.12-fraction",
        r"(?:(?:cuda|hip)outofmemory\.?)?allocationwaspreemptivelyrejectedbecauseitwouldexceed(?:per_process_memory_fraction)?"
        r"(?:limit)?\.?(?:requestedsize:<requested_bytes>)?",
        "fraction-rejected",
        versions=("2.12", ""),
        group="fraction",
    ),
    Wording(
        "torch-2.12-fraction",
        r"preemptivelyrejectingallocation:requested<requested_bytes>"
        r"(?:buttotal_allocated_memory\(<reserved_bytes>\)\+requestedsizewouldexceedmemorylimit"
        r"\(<limit_bytes>(?:=\d{1,3}(?:\.\d{1,12})?%of<total_bytes>)?\))?",
        "fraction-rejected",
        versions=("2.12", ""),
        group="fraction",
    ),
    Wording(
        "torch-2.13-warning",
        r"(?:expandable_segments:)?memory(?:allocation|mapping)failedwithoomondevice"
        r"<device_index>(?:whiletryingtoallocate<requested_bytes>"
        r"(?:\(free:(?P<free_bytes>SIZE|COUNT),total:(?P<total_bytes>SIZE|COUNT)\))?)?",
        "cudamalloc-warning",
        is_warning=True,
        is_marker=True,
        versions=("2.13", ""),
    ),
    Wording(
        "torch-2.15-va",
        r"(?:\[expandablesegmentva\])?failedtoreserve[^;]{0,80}?<requested_bytes>\)?"
        r"ofvirtualaddressspaceforanexpandablecudasegmentondevice<device_index>",
        "va-exhausted",
        versions=("2.15", ""),
    ),
    Wording(
        "nvml-assert",
        r"nvml_success==rinternalassertfailed",
        "nvml-unavailable",
        versions=("2.0", ""),
    ),
)


_mps = partial(
    Wording,
    backend="mps",
    hint="PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0",
    versions=("1.12", ""),
)
_TRIED: Final = r"triedtoallocate<requested_bytes>(?:on(?:shared|private|sharedorprivate)pool)?"

MPS: Final = (
    _mps(
        "mps",
        r"(?:mpsbackendoutofmemory)?\(?mpsallocated:<allocated_bytes>"
        r"(?:,otherallocations:<other_allocations_bytes>)?(?:,maxallowed:<limit_bytes>)?"
        rf"\)?\.?(?:{_TRIED})?",
    ),
    _mps("mps-cut", rf"mpsbackendoutofmemory\.?(?:{_TRIED})?", may_be_prose=True),
    _mps("mps-buffer", r"invalidbuffersize:<requested_bytes>", "buffer-too-large", hint=""),
    _mps(
        "mps-array",
        # Metal Performance Shaders, MPSNDArray.mm
        r"ndarrayinitwithdevice[^;]{0,80}?error:(?:totalbytesofndarray|productofdimensionsizes)>2\*\*3[12]",
        "buffer-too-large",
        hint="",
    ),
)


_BESIDE: Final = (
    compile_squeezed(r"freememory/totalmemory:(?P<free_bytes>COUNT)/(?P<total_bytes>COUNT)"),
    compile_squeezed(r"(?<!max)inuse:(?P<allocated_bytes>COUNT)"),
    compile_squeezed(r"limit:(?P<limit_bytes>[1-9]\d{0,30})"),
    compile_squeezed(r"sumtotalofin-usechunks:<allocated_bytes>"),
)
"""Figures that XLA's bfc and cudaMallocAsync allocators print next to a failure (xla/tsl/framework/
bfc_allocator.cc: DumpMemoryLog; stream_executor/gpu/gpu_cudamallocasync_allocator.cc)."""
_BESIDE_CHARS: Final = 4000


def _beside(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields:
    """Add the figures in an allocator's own lines around a failure; those after it win."""
    text = stream.squeezed
    after = text[match.end() : match.end() + _BESIDE_CHARS]
    before = text[max(0, match.start() - _BESIDE_CHARS) : match.start()]
    for pattern in _BESIDE:
        found = pattern.search(after) or next(reversed(list(pattern.finditer(before))), None)
        for name, value in ({} if found is None else found.groupdict()).items():
            fields.setdefault(name, printed_bytes(value))
    return fields


_OF_JAX: Final = re.compile(r"jax|external/xla|xla/(?:python|pjrt)|pjit\(|jit\(main\)|xlalabel:")
"""Signs of JAX: TensorFlow's allocator prints the same lines, but different ones around them."""


def _of_xla(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields:
    """Tell JAX from TensorFlow, which both report through XLA, by the lines nearby."""
    text = stream.squeezed[max(0, match.start() - 800) : match.end() + 200]
    if "tensorflow" in text and not (_OF_JAX.search(text) or "xlaruntimeerror" in text):
        fields |= {"kind": "tf", "backend": "tf"}
    return _beside(fields, match, stream)


def _in_one_piece(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields:
    """Use the largest free piece, if it is printed next to the total of free memory."""
    if match["_piece"]:
        fields["free_bytes"] = printed_bytes(match["_piece"])
    return _of_xla(fields, match, stream)


def _allocator(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields:
    """Read the ``bfc`` allocator's log; the words "not a failure" make it a warning."""
    text = stream.squeezed
    if "host_bfc" in match.group():  # pinned host memory, used for copies
        fields |= {"kind": HOST, "is_device_oom": False, "sub_kind": "pinned-host"}
    tail = text[match.end() : match.end() + 200]
    if "notafailure" in tail.split("ranoutofmemory", maxsplit=1)[0]:
        fields["is_warning"] = True
    around = text[max(0, match.start() - _BESIDE_CHARS) : match.start()]
    if _OF_JAX.search(around) or "executionofreplica" in tail:
        fields |= {"kind": "jax", "backend": "jax"}
    return _beside(fields, match, stream)


def _tensor(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields:
    if match.group("_where") == "cpu":
        return on_host(fields, "tf-host")
    return _beside(fields, match, stream)


# Sizes as XLA prints them: "20.15G of 15.48G hbm". In squeezed text the next word follows directly.
_SHORT: Final = r"\d{1,9}(?:\.\d{1,6})?[kmgt]?(?:i?b)?"


_jax = partial(Wording, kind="jax", backend="jax", refine=_of_xla)
_tf = partial(Wording, kind="tf", backend="tf")

JAX_AND_TENSORFLOW: Final = (
    _jax("jax", r"(?:resource_exhausted:)?outofmemorywhiletryingtoallocate<requested_bytes>"),
    _jax("jax", r"resource_?exhausted:outofmemoryallocating<requested_bytes>"),
    _jax(
        "jax-request",
        r"(?:resource_?exhausted:)?failedtoallocaterequestfor"
        r"(?:<requested_bytes>|\d[\d.]{0,20}[kmgt]i?b)(?:\(\d{1,20}b\))?"
        r"(?:ondeviceordinal<device_index>)?",
    ),
    _jax(
        "jax-reserve",
        r"attemptingto(?:reserve|allocate)(?P<requested_bytes>SHORT)"
        r"(?:atthebottomofmemory)?\.?thatwasnotpossible\.?"
        r"(?:thereare(?P<free_bytes>SHORT)free(?:(?:\.duetofragmentation,thelargestcontiguous"
        r"regionoffreememoryis|,SHORTreserved,and)(?P<_piece>SHORT))?)?".replace("SHORT", _SHORT),
        refine=_in_one_piece,
    ),
    _jax(
        "jax-program",
        r"ranoutofmemoryinmemoryspacehbm\.?"
        r"(?:used(?P<requested_bytes>SHORT)of(?P<limit_bytes>SHORT)hbm)?".replace("SHORT", _SHORT),
    ),
    _jax(
        "jax-async",
        r"cumemallocasyncfailedtoallocate<requested_bytes>:?"
        r"(?:[a-z_]{0,30}:{0,4}cuda_error_out_of_memory(?::outofmemory)?)?",
    ),
    Wording(
        "xla-on-chip",
        r"ranoutofmemoryinmemoryspace(?:vmem|smem|cmem|sflag)",
        "on-chip",
        kind=SHARED_MEMORY,
        backend="jax",
        is_device_oom=False,
    ),
    _tf(
        "tf-tensor",
        r"oomwhenallocatingtensorwithshape\[[\d,]{0,200}\]"
        r"(?:andtype[a-z0-9_]{1,20}?(?=on/|on\[|by|[^a-z0-9_]|$))?"
        r"(?:on[\w/:]{0,80}?(?:device:)?(?P<_where>gpu|cpu|tpu|xla_gpu):<device_index>)?"
        r"(?:byallocator[\w]{1,40})?",
        refine=_tensor,
    ),
    _tf(
        "tf-failed",
        r"(?:resourceexhaustederror|resource_exhausted)[^\[\]]{0,200}?failedtoallocatememory",
        may_be_prose=True,
    ),
    _tf(
        "tf-allocator",
        r"(?:allocator\((?:gpu_<device_index>_bfc|[\w/:.-]{1,60})\))?ranoutofmemorytryingto"
        r"allocate<requested_bytes>(?:\(roundedto\d{1,20}\))?",
        refine=_allocator,
    ),
    _tf(
        "tf-device",
        r"failedtoallocateSIZE\((?P<requested_bytes>\d{1,25})bytes\)fromdevice"
        r"(?::(?:cuda_error_out_of_memory|resource_exhausted)(?::outofmemory)?)?",
        refine=where("jax", 400, 0, kind="jax", backend="jax"),
    ),
)
