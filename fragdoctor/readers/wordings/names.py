"""Words that more than one family needs."""

from __future__ import annotations

from typing import Final

ALLOCATOR: Final = "pytorch-caching-allocator"
DRIVER: Final = "driver-no-figures"
HOST: Final = "host-ram"
KV_CACHE: Final = "kv-cache"
OTHER: Final = "other-framework"
NEGATIVE: Final = "negative"
SHARED_MEMORY: Final = "shared-memory"

BACKEND_OF_WORD: Final = {
    "cuda": "cuda",
    "hip": "rocm",
    "rocm": "rocm",
    "xpu": "xpu",
    "sycl": "xpu",
    "npu": "npu",
    "musa": "musa",
    "mlu": "mlu",
    "gcu": "gcu",
    "vulkan": "vulkan",
    "metal": "mps",
    "cpu": "cpu",
}
