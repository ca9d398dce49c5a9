"""What a model takes whose size a text names (``vicuna-13b``, ``Qwen-14B in fp8``), and on what.

Weights alone, or training with its gradients and optimizer state, against the GPUs that the text
names: what exceeds them needs no further sign.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.lazy import regex
from fragdoctor.model.case import OomMessage, ToldSettings
from fragdoctor.model.gpus import CARDS, FULL_SHARE, known_gpu
from fragdoctor.model.measures import ADAPTER, OFFLOADING, SHARDED_WEIGHTS, SHARDING, STATE_8BIT
from fragdoctor.rules.traceback_signs import n_steps_passed, sign_of
from fragdoctor.units import GIB, format_size

_BILLIONS: Final = regex(
    r"(?i)(?<![A-Z0-9.])(\d{1,3}(?:\.\d{1,2})?)B(?![A-Z0-9])"
    r"(?!(?: (?:version|model|one))?,? (?:(?:is|was|runs?|works?) )?"
    r"(?:okay|ok|well|fine(?!-?tun))\b)"
)
"""A size, unless the text says that it fits: "7B version, OK"."""
_LEAST, _MOST = 0.5, 700.0
"""Billions of parameters of a model; other numbers before a B are bytes or something else."""

_PRECISIONS: Final = {
    4: regex(r"(?i)(?<![\d.])4[ -]?bits?\b|gptq|\bawq\b|q4_|\b(?:int|mxfp|nv?fp?)4"),
    8: regex(r"(?i)(?<![\d.])8[ -]?bits?\b|q8_|\b(?:int|fp)8|\bw8a8"),
    16: regex(r"(?i)\b(?:bf16|fp16|bfloat16|float16|16[ -]?bits?)\b|\bhalf\b"),
}
"""Bits of a weight, and how texts name them."""
_PACKED: Final = regex(r"(?i)gptq|\bawq\b|q[48]_")

_SEVERAL_GPUS: Final = regex(
    r"(?i)device_map|parallel|\bfsdp\b|\bzero[-_ ]?3|offload|num[-_]shard|-tp\b|\bgpus\b"
    r"|DEVICES=\d,"
)
TRAINED_BYTES: Final = 16
"""What AdamW keeps of each parameter in mixed precision: weight and gradient in 16 bits, a copy of
the weight and two moments in 32 (ZeRO, arXiv:1910.02054, section 3.1); in 32 bits it is as much."""
SMALL_STATE: Final = frozenset({ADAPTER, STATE_8BIT, OFFLOADING})
"""What trains with less: few parameters, or state that is small or not on the GPU."""
LARGEST_BYTES: Final = 80 * GIB
"""A card that the text does not name is taken for one of the largest that most people have."""
_CARD: Final = regex(
    rf"(?i)(?<![a-z0-9])(?:[rg]tx ?)?{CARDS}(?!\d)"
    r"(?:[\s(\uff08*x_-]{0,3}(?:sxm|pcie)?[\s(\uff08*x_-]{0,3}(?P<size>\d{1,3}) ?G)?"
)
_SIZED: Final = regex(
    r"(?i)(?<![\d.])(?P<size>\d{1,3}) ?G(?:i?B|igs?)?(?:\W{1,3}(?:of ?)?)?"
    r"(?:v-?ram|gpu|card|显存|video|graphics|memory gpu|rtx|nvidia)\b"
)


class ToldWeights(Struct, frozen=True):
    """Weights by their number, and the bits of each; None if the text names none or several.

    Attributes:
        billions: their number.
        bits: the bits of each.
        name: the model's name if that has no size.
        smaller: how this model takes less, if that is known.
    """

    billions: float
    bits: int | None = None
    name: str = ""
    smaller: str = ""

    def n_bytes(self, bits: int) -> int:
        """Return the size of the weights in a precision."""
        return int(self.billions * 1e9 * bits / 8)

    @property
    def _model(self) -> str:
        if self.name:
            return self.name
        named = f"{self.billions:g}"  # an eight, an eleven, an eighteen, an eighty
        is_vowel = named[0] == "8" or named.partition(".")[0] in ("11", "18")
        return f"{'an' if is_vowel else 'a'} {named}B model"

    @property
    def text(self) -> str:
        """A clause about what the weights take."""
        each = (self.bits,) if self.bits else (16, 8, 4)
        sizes = (f"{format_size(self.n_bytes(bits))} in {bits}" for bits in each)
        return f"The weights of {self._model} take {', '.join(sizes)} bits"

    def fill(self, message: OomMessage, told: ToldSettings) -> bool:
        """Return whether they alone fill the one device of a message."""
        whole = told_card_bytes(message)
        is_alone = whole is not None and told.n_gpus == 1
        is_alone &= _SEVERAL_GPUS.search(message.said) is None
        return is_alone and self.n_bytes(self.bits or 16) > FULL_SHARE * (whole or 0)

    def trained_text(self, message: OomMessage, told: ToldSettings) -> str:
        """Return a clause on training all of the model if that exceeds its GPUs, or ""."""
        # What is not used may be named, too.
        unused = {ADAPTER} if is_told_to_train_all(message) else set()
        is_less = not (SMALL_STATE - unused).isdisjoint(told.in_use) or self.bits in (4, 8)
        if is_less or not message.is_of_training or _has_trained(message):
            return ""
        n_gpus = told.n_gpus if SHARDING in told.in_use else 1
        needed = self.n_bytes(8 * TRAINED_BYTES)
        whole = 0 if SHARDED_WEIGHTS in told.in_use else self.n_bytes(16)  # as ZeRO 2 leaves it
        of_one = whole + (needed - whole) // n_gpus
        if of_one <= FULL_SHARE * (told_card_bytes(message) or LARGEST_BYTES):
            return ""
        return (
            f"training all of {self._model} with AdamW takes about "
            f"{format_size(needed)}, whatever the batch ({TRAINED_BYTES} bytes a parameter)"
        )


_NAMED: Final = {
    regex(
        r"(?is)\A(?!.*(?:faster.?whisper|whisperx|ctranslate|cuda failed)).*"
        r"(?:whisper\b.{0,80}\blarge\b|\blarge-v[123]\b)(?!-(?:v3-)?turbo)"
    ): ToldWeights(
        1.55,
        32,
        "Whisper large",
        "use Whisper medium or small, or faster-whisper with compute_type='int8'",
    ),
    regex(r"(?i)\bflux(?:\.?1\b|[-_ .1]{0,3}(?:dev|schnell|kontext|fill)\b)"): ToldWeights(
        16.8,
        None,
        "FLUX.1 and its text encoder",
        "use an fp8, nf4 or GGUF checkpoint, and keep idle parts on the CPU "
        "(enable_model_cpu_offload() of Diffusers, or an option such as --lowvram)",
    ),
}
"""Models whose names have no size (their model cards), with the bits in which they are loaded."""


_ALL: Final = regex(
    r"(?i)\bfull[- _](?:param\w*|fine[- ]?tun|(?:sft|dpo|rl)\b)|finetuning_type\W{1,3}full\b"
    r"|\bwithout (?:any )?(?:peft|q?lora|adapters?)\b|全参|全量(?:参数)?(?:微调|训练|预训练)"
)


def is_told_to_train_all(message: OomMessage) -> bool:
    """Return whether the text says that all of a model is trained, and shows no step of it."""
    return _ALL.search(message.said) is not None and not _has_trained(message)


def _has_trained(message: OomMessage) -> bool:
    """Return whether steps went well before the failure, so that the state does fit."""
    if n_steps_passed(message) > 1:
        return True
    sign = sign_of(message)
    return sign is not None and (sign.is_surrounding or sign.can_leave_gpu or not sign.is_training)


def told_card_bytes(message: OomMessage) -> int | None:
    """Return the size of the GPU, from the message's figures or from the text around it."""
    return message.total_bytes or named_card_bytes(message.said) or None


def named_card_bytes(said: str) -> int:
    """Return the size of the largest GPU that a text names in words, or 0."""
    sizes = [int(m["size"]) * GIB for m in _SIZED.finditer(said)]
    for m in _CARD.finditer(said):
        if m["size"]:
            sizes.append(int(m["size"]) * GIB)
        elif (gpu := known_gpu(m[0])) is not None:
            sizes.append(gpu.usable_bytes)
    return max(sizes, default=0)


def told_weights(message: OomMessage | None) -> ToldWeights | None:
    """Return the weights of the one model whose size the text around a message names, or None."""
    said = "" if message is None else message.said
    sizes = {float(found) for found in _BILLIONS.findall(said)}
    sizes = {size for size in sizes if _LEAST <= size <= _MOST}
    own = next((model for words, model in _NAMED.items() if words.search(said)), None)
    if own is not None and not sizes:
        return replace(own, bits=_bits_in(said) or own.bits)
    if len(sizes) != 1:
        return None
    return ToldWeights(sizes.pop(), _bits_in(said))


def _bits_in(said: str) -> int | None:
    """Return the bits of a weight if the text names one precision."""
    named = [n for n, pattern in _PRECISIONS.items() if pattern.search(said)]
    if _PACKED.search(said):  # what is packed into fewer bits is computed with in 16
        named = named[:1]
    return named[0] if len(named) == 1 else None
