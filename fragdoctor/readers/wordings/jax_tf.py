"""JAX/XLA and TensorFlow."""

from __future__ import annotations

import re
from typing import Final

from fragdoctor.readers.log import Stream
from fragdoctor.readers.wordings.base import Fields, Wording, compile_squeezed

_DEVICE: Final = re.compile(r"gpu_(\d{1,3})_bfc")
_INUSE: Final = compile_squeezed(r"inuse:<allocated_bytes>")
_LIMIT: Final = compile_squeezed(r"limit:<limit_bytes>")


def _jax(fields: Fields, match: re.Match[str], stream: Stream) -> Fields:
    """Tell JAX from TensorFlow by the neighbourhood; both speak through XLA."""
    text = stream.squeezed[max(0, match.start() - 800) : match.end() + 200]
    if "tensorflow" in text and "jax" not in text and "xlaruntimeerror" not in text:
        return fields | {"kind": "tf", "backend": "tf"}
    return fields


def _allocator(fields: Fields, match: re.Match[str], stream: Stream) -> Fields:
    """Read the ``bfc`` allocator's log: "not a failure" makes it a warning."""
    text = stream.squeezed
    tail = text[match.end() : match.end() + 200]
    if "notafailure" in tail.split("ranoutofmemory", maxsplit=1)[0]:
        fields["is_warning"] = True
    around = text[max(0, match.start() - 400) : match.start()]
    if "jax" in around or "external/xla" in around:
        fields |= {"kind": "jax", "backend": "jax"}
    return fields


def _tensor(fields: Fields, match: re.Match[str], stream: Stream) -> Fields:
    after = stream.squeezed[match.end() : match.end() + 4000]
    for pattern, name in ((_LIMIT, "limit_bytes"), (_INUSE, "allocated_bytes")):
        found = pattern.search(after)
        if found and name not in fields:
            fields[name] = int(found.group(1).rstrip("bytes").replace(",", ""))
    if match.group("_where") == "cpu":
        return fields | {
            "is_device_oom": False, "kind": "host-ram", "backend": "cpu", "sub_kind": "tf-host"
        }  # fmt: skip
    return fields


def _from_device(fields: Fields, match: re.Match[str], stream: Stream) -> Fields:
    before = stream.squeezed[max(0, match.start() - 400) : match.start()]
    return fields | ({"kind": "jax", "backend": "jax"} if "jax" in before else {})


WORDINGS: Final = (
    Wording(
        "jax",
        "jax",
        "jax",
        "outofmemorywhiletryingtoallocate",
        compile_squeezed(
            r"(?:resource_exhausted:)?outofmemorywhiletryingtoallocate<requested_bytes>"
        ),
        back=19,
        refine=_jax,
    ),
    Wording(
        "jax-program",
        "jax",
        "jax",
        "ranoutofmemoryinmemoryspace",
        compile_squeezed(
            r"ranoutofmemoryinmemoryspacehbm\.?(?:used<requested_bytes>of<limit_bytes>hbm)?"
        ),
        refine=_jax,
    ),
    Wording(
        "tf-tensor",
        "tf",
        "tf",
        "oomwhenallocatingtensor",
        compile_squeezed(
            r"oomwhenallocatingtensorwithshape\[[\d,]{0,200}\](?:andtype[a-z0-9_]{1,20}?(?=on/|on\[|by|[^a-z0-9_]|$))?"
            r"(?:on[\w/:]{0,80}?(?:device:)?(?P<_where>gpu|cpu|tpu|xla_gpu):<device_index>)?"
            r"(?:byallocator[\w]{1,40})?"
        ),
        refine=_tensor,
    ),
    Wording(
        "tf-allocator",
        "tf",
        "tf",
        "ranoutofmemorytryingtoallocate",
        compile_squeezed(
            r"allocator\((?:gpu_<device_index>_bfc|[\w/:.-]{1,60})\)ranoutofmemorytryingto"
            r"allocate<requested_bytes>(?:\(roundedto\d{1,20}\))?"
        ),
        back=80,
        refine=_allocator,
    ),
    Wording(
        "tf-device",
        "tf",
        "tf",
        "fromdevice",
        compile_squeezed(
            r"failedtoallocateSIZE\((?P<requested_bytes>\d{1,25})bytes\)fromdevice"
            r"(?::(?:cuda_error_out_of_memory|resource_exhausted)(?::outofmemory)?)?"
        ),
        back=90,
        refine=_from_device,
    ),
)
