"""The cudaMallocAsync backend, fraction rejection, the 2.13 warning, address-space exhaustion."""

from __future__ import annotations

import re
from typing import Final

from fragdoctor.readers.log import Stream
from fragdoctor.readers.wordings import names
from fragdoctor.readers.wordings.base import Fields, Wording, compile_squeezed, parse_size

_ASYNC_FIELDS: Final = (
    ("allocated_bytes", compile_squeezed(r"currentlyallocated:<allocated_bytes>")),
    ("requested_bytes", compile_squeezed(r"requested:<requested_bytes>")),
    ("total_bytes", compile_squeezed(r"devicelimit:<total_bytes>")),
    ("free_bytes", compile_squeezed(r"free\(accordingtocuda\):<free_bytes>")),
    ("limit_bytes", compile_squeezed(r"memoryfraction\):<limit_bytes>")),
)


def _async_figures(fields: Fields, match: re.Match[str], stream: Stream) -> Fields:
    """Read the table below the first line; log tools often keep only that line."""
    text = stream.squeezed
    end = text.find("wouldexceedallowedmemory", match.end())
    end = min(match.end() + 600, end if end >= 0 else len(text))
    for name, pattern in _ASYNC_FIELDS:
        found = pattern.search(text, match.end(), end)
        if found:
            fields[name] = parse_size(found.group(name))
    return fields


WORDINGS: Final = (
    Wording(
        "cudaMallocAsync",
        names.ALLOCATOR,
        "cuda",
        "exceedallowedmemory",
        compile_squeezed(
            r"allocationondevice(?:cuda:)?<device_index>?wouldexceedallowedmemory"
            r"(?:\.?\(outofmemory\))?"
        ),
        back=40,
        refine=_async_figures,
        versions=("2.0", ""),
    ),
    Wording(
        "cudaMallocAsync",
        names.ALLOCATOR,
        "cuda",
        "outofmemoryerror:allocationondevice",
        compile_squeezed(
            r"outofmemoryerror:allocationondevice(?:(?:cuda:)?<device_index>)?(?!\d|would|cuda)"
        ),
        sub_kind="figures-lost",
        versions=("2.0", ""),
    ),
    Wording(
        "torch-2.12-fraction",
        names.ALLOCATOR,
        "cuda",
        "preemptivelyrejected",
        compile_squeezed(
            r"(?:(?:cuda|hip)outofmemory\.?)?allocationwaspreemptivelyrejectedbecauseitwouldexceed(?:per_process_memory_fraction)?"
            r"(?:limit)?\.?(?:requestedsize:<requested_bytes>)?"
        ),
        back=36,
        sub_kind="fraction-rejected",
        versions=("2.12", ""),
        group="fraction",
    ),
    Wording(
        "torch-2.12-fraction",
        names.ALLOCATOR,
        "cuda",
        "preemptivelyrejecting",
        compile_squeezed(
            r"preemptivelyrejectingallocation:requested<requested_bytes>"
            r"(?:buttotal_allocated_memory\(<reserved_bytes>\)\+requestedsizewouldexceedmemorylimit"
            r"\(<limit_bytes>(?:=\d{1,3}(?:\.\d{1,12})?%of<total_bytes>)?\))?"
        ),
        sub_kind="fraction-rejected",
        versions=("2.12", ""),
        group="fraction",
    ),
    Wording(
        "torch-2.13-warning",
        names.ALLOCATOR,
        "cuda",
        "failedwithoomondevice",
        compile_squeezed(
            r"(?:expandable_segments:)?memory(?:allocation|mapping)failedwithoomondevice"
            r"<device_index>(?:whiletryingtoallocate<requested_bytes>"
            r"(?:\(free:(?P<free_bytes>SIZE|COUNT),total:(?P<total_bytes>SIZE|COUNT)\))?)?"
        ),
        back=45,
        is_warning=True,
        is_marker=True,
        sub_kind="cudamalloc-warning",
        versions=("2.13", ""),
    ),
    Wording(
        "torch-2.15-va",
        names.ALLOCATOR,
        "cuda",
        "virtualaddressspace",
        compile_squeezed(
            r"(?:\[expandablesegmentva\])?failedtoreserve[^;]{0,80}?<requested_bytes>\)?"
            r"ofvirtualaddressspaceforanexpandablecudasegmentondevice<device_index>"
        ),
        back=140,
        sub_kind="va-exhausted",
        versions=("2.15", ""),
    ),
    Wording(
        "nvml-assert",
        names.ALLOCATOR,
        "cuda",
        "nvml_success==r",
        compile_squeezed(r"nvml_success==rinternalassertfailed"),
        sub_kind="nvml-unavailable",
        versions=("2.0", ""),
    ),
)
