"""What the weights of a model take whose size a text names: ``vicuna-13b``, ``Qwen-14B in fp8``."""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

from fragdoctor.model.case import OomMessage
from fragdoctor.units import format_size

_BILLIONS: Final = re.compile(r"(?<![A-Za-z0-9.])(\d{1,3}(?:\.\d{1,2})?)[bB](?![A-Za-z0-9])")
_LEAST, _MOST = 0.5, 700.0
"""Billions of parameters of a model; other numbers before a B are bytes or something else."""

_PRECISIONS: Final = {
    4: re.compile(r"(?i)(?<![\d.])4[ -]?bits?\b|gptq|\bawq\b|q4_|\b(?:int|mxfp|nv?fp?)4"),
    8: re.compile(r"(?i)(?<![\d.])8[ -]?bits?\b|q8_|\b(?:int|fp)8|\bw8a8"),
    16: re.compile(r"(?i)\b(?:b?fp?16|bfloat16|float16|16[ -]?bits?)\b|\bhalf\b"),
}
"""Bits of a weight, and how texts name them."""

_SEVERAL_GPUS: Final = re.compile(
    r"(?i)device_map|parallel|\bfsdp\b|\bzero[-_ ]?3|offload|num[-_]shard|-tp\b|\bgpus\b"
    r"|DEVICES=\d,"
)
FULL_SHARE: Final = 0.9
"""Weights that take more of a device leave nothing for what is computed with them."""


class ToldWeights(Struct, frozen=True):
    """Weights by their number, and the bits of each; None if the text names none or several."""

    billions: float
    bits: int | None

    def n_bytes(self, bits: int) -> int:
        """Return the size of the weights in a precision."""
        return int(self.billions * 1e9 * bits / 8)

    @property
    def text(self) -> str:
        """A clause about what the weights take."""
        each = (self.bits,) if self.bits else (16, 8, 4)
        sizes = (f"{format_size(self.n_bytes(bits))} in {bits}" for bits in each)
        return f"The weights of a {self.billions:g}B model take {', '.join(sizes)} bits"

    def fill(self, message: OomMessage) -> bool:
        """Return whether they alone fill the one device of a message."""
        is_alone = message.total_bytes is not None and not _SEVERAL_GPUS.search(message.said)
        return is_alone and self.n_bytes(self.bits or 16) > FULL_SHARE * (message.total_bytes or 0)


def told_weights(message: OomMessage | None) -> ToldWeights | None:
    """Return the weights of the one model whose size the text around a message names, or None."""
    said = "" if message is None else message.said
    sizes = {float(found) for found in _BILLIONS.findall(said)}
    sizes = {size for size in sizes if _LEAST <= size <= _MOST}
    if len(sizes) != 1:
        return None
    bits = [n for n, pattern in _PRECISIONS.items() if pattern.search(said)]
    return ToldWeights(sizes.pop(), bits[0] if len(bits) == 1 else None)
