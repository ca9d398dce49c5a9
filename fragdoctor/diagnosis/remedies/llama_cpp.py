"""Remedies for llama.cpp, whose buffers ggml asks the driver for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar, Final

from fragdoctor.diagnosis.remedies.host_memory import HOST_CHANGES
from fragdoctor.diagnosis.remedies.remedy import CURES, JudgedCase, Proposal, Remedy
from fragdoctor.model.finding import Confidence

WSL: Final = re.compile(r"\bWSL|/mnt/[a-z]/|microsoft-standard")

GGML_CHANGE: Final = (
    "lower --n-gpu-layers or --ctx-size, split over GPUs, or a smaller quantization"
)
GGML_BUFFERS: Final = {
    "compute-buffer": (
        "Make the compute buffer of that GPU smaller",
        (
            "flash attention (-fa), a lower --ubatch-size (512 by default) and --ctx-size; then "
            "fewer layers on that GPU (--n-gpu-layers, --tensor-split)"
        ),
    ),
    "kv-buffer": (
        "Make the KV cache smaller",
        (
            "a lower --ctx-size or --parallel, --cache-type-k q8_0 and --cache-type-v q8_0 with "
            "flash attention (-fa); then fewer layers on that GPU (--n-gpu-layers)"
        ),
    ),
    "weights-buffer": (
        "Put fewer layers on that GPU",
        (
            "lower --n-gpu-layers (for MoE models --n-cpu-moe), --tensor-split over several GPUs, "
            "or a smaller quantization: these are the weights, which no context size changes"
        ),
    ),
}
"""Title and change of what makes a buffer of llama.cpp smaller, by what it was for."""


class FewerLayersOnGpu(Remedy):
    """ggml (llama.cpp) puts too much on the device."""

    code: ClassVar[str] = "fewer-layers-on-gpu"
    title: ClassVar[str] = "Put fewer layers on the GPU, or a smaller context"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it for messages of ggml, by what the buffer was for."""
        message = case.message
        if case.kind != "ggml" or message is None:
            return
        title, change = GGML_BUFFERS.get(message.sub_kind, ("", GGML_CHANGE))
        said = f"{message.above} {message.intro} {message.text}"
        if message.requested_bytes is None and WSL.search(said):
            title = "Try without page-locked host memory first, then with fewer layers on the GPU"
            change = f"{HOST_CHANGES['ggml-pinned']}: {change}"
        yield self.proposal(
            title=title,
            weight=CURES,
            confidence=Confidence.LIKELY,
            change=change,
            why="One buffer holds what is put on the device; it is larger than the device can "
            "give.",
            cost="Slower inference.",
            verify="The log's buffer sizes stay below the free memory.",
        )
