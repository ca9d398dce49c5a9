"""Apple's MPS backend. It prints KB/MB/GB or KiB/MiB/GiB and means powers of 1024."""

from __future__ import annotations

from typing import Final

from fragdoctor.readers.wordings import names
from fragdoctor.readers.wordings.base import Wording, compile_squeezed

_HINT: Final = "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0"
_TRIED: Final = r"triedtoallocate<requested_bytes>(?:on(?:shared|private|sharedorprivate)pool)?"

WORDINGS: Final = (
    Wording(
        "mps",
        names.ALLOCATOR,
        "mps",
        "mpsbackendoutofmemory",
        compile_squeezed(
            r"mpsbackendoutofmemory\(?mpsallocated:<allocated_bytes>"
            r"(?:,otherallocations:<other_allocations_bytes>)?(?:,maxallowed:<limit_bytes>)?"
            rf"\)?\.?(?:{_TRIED})?"
        ),
        hint=_HINT,
        versions=("1.12", ""),
    ),
    Wording(
        "mps-headless",
        names.ALLOCATOR,
        "mps",
        "mpsallocated:",
        compile_squeezed(
            r"\(?mpsallocated:<allocated_bytes>"
            r"(?:,otherallocations:<other_allocations_bytes>)?(?:,maxallowed:<limit_bytes>)?"
            rf"\)?\.?(?:{_TRIED})?"
        ),
        back=1,
        hint=_HINT,
        versions=("1.12", ""),
    ),
    Wording(
        "mps-cut",
        names.ALLOCATOR,
        "mps",
        "mpsbackendoutofmemory",
        compile_squeezed(rf"mpsbackendoutofmemory\.?(?:{_TRIED})?"),
        hint=_HINT,
        versions=("1.12", ""),
        may_be_prose=True,
    ),
    Wording(
        "mps-cut",
        names.ALLOCATOR,
        "mps",
        "triedtoallocate",
        compile_squeezed(r"triedtoallocate<requested_bytes>on(?:shared|private)pool"),
        hint=_HINT,
        versions=("1.12", ""),
    ),
    Wording(
        "mps-buffer",
        names.ALLOCATOR,
        "mps",
        "invalidbuffersize",
        compile_squeezed(r"invalidbuffersize:<requested_bytes>"),
        sub_kind="buffer-too-large",
        versions=("1.12", ""),
    ),
)
