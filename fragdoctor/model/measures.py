"""Measures against a lack of memory: how texts show that one is in use, and how advice names it.

A text shows it by words, or by an option with any value that does not turn it off. Whatever is in
use is not advised again: all advice is asked against this one table.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from fragdoctor.lazy import regex

ADAPTER: Final = "LoRA"
STATE_8BIT: Final = "an optimizer in 8 bits"
SHARDING: Final = "sharding"
SHARDED_WEIGHTS: Final = "sharded weights"
OFFLOADING: Final = "offloading"
CHECKPOINTING: Final = "checkpointing"
HALF: Final = "16 bits"
BITS_8: Final = "8 bits"
BITS_4: Final = "4 bits"
TILED: Final = "tiles"
NUMBERS: Final = "numbers instead of tensors"


class Measure(NamedTuple):
    """How a text shows a measure, and how advice names it ("" if no part of advice is only it)."""

    shown: str
    advised: str = ""


_QUANTIZED_LAYERS: Final = r"\bbitsandbytes[/\\]nn\b"
"""Layers of 8 or 4 bits, on which only adapters can be trained."""

MEASURES: Final = {
    HALF: Measure(
        r"\b(?:fp16|bf16|(?:mixed_)?b?float16)\b|mixed.?precision\W{1,4}(?:fp|bf)16|\b16-mixed",
        r"^16 bits$|^bf16 weights or autocast$|\bin 16 bits\b|dtype=torch\.bfloat16|\bbf16=True"
        r"|mixed_float16|precision=\"bf16",
    ),
    BITS_8: Measure(
        r"\b(?:int|fp)8\b|load_in_8bit|(?<![\d.])8[ -]bits?\b(?! (?:adam|optim))|\bw8a8"
        rf"|{_QUANTIZED_LAYERS}",
        r"\bin 8 bits\b",
    ),
    BITS_4: Measure(
        r"\b(?:int|fp|nf)4\b|load_in_4bit|(?<![\d.])4[ -]?bits?\b|\bgptq|\bawq\b|\bq[2-8]_[0k]"
        r"|\bgguf\b|\bqlora\b",
        r"(?i)load[-_]in[-_]4[-_]?bit|quantize\b|quantized (?:model|checkpoint|weights)"
        r"|\b(?:AWQ|GPTQ|FP8) checkpoint|in (?:8 or )?4 bits",
    ),
    ADAPTER: Measure(
        rf"\bq?lora\b|\bpeft\b|adapters?\b|\bfreez|\bfrozen|{_QUANTIZED_LAYERS}",
        r"^(?:train )?a LoRA\b",
    ),
    SHARDED_WEIGHTS: Measure(r"zero[-_ ]?3|stage\W{0,4}3|\bfsdp|megatron", "^ZeRO stage 3$"),
    SHARDING: Measure(r"\bzero\d?\b|zero[-_ ]?(?:stage|[123])|deepspeed|\bfsdp|megatron"),
    OFFLOADING: Measure(r"low_?vram|offload(?!\w*[\"']?\s?[:=]\s?[\"']?(?:false|none))"),
    # transformers, modeling_utils.py: "incompatible" is printed if the cache is on as well
    CHECKPOINTING: Measure(
        r"--gradient[_-]checkpointing\b(?!['\",= ]{1,4}(?:false|no|0))"
        r"|(?:gradient|activation)_checkpointing['\"`]{0,2} ?[:=] ?"
        r"(?!['\"]?(?:false|none|no|0|off)\b)|\.gradient_checkpointing_enable\("
        r"|\b(?:gradient|activation) checkpointing (?:is |was )?(?:already )?"
        r"(?:on\b|enabled|used|active)"
        r"|(?:with|using|enabled|use|activated) (?:gradient|activation) checkpointing"
        r"|incompatible with gradient checkpointing",
        r"gradient.checkpointing|^checkpoint\b",
    ),
    STATE_8BIT: Measure(
        r"(?:adamw?|adam|lion)_?8.?bit|8.?bit_?adam|\badafactor\b|\bbitsandbytes[/\\]optim\b",
        "8.?bit",
    ),
    NUMBERS: Measure(r"\.item\b|\bitem\(\)", r"^sum and store loss\.item"),
    TILED: Measure(
        r"VAEDecodeTiled|VAE Decode \(Tiled\)|\btiled_(?:scale|decode|vae)|decode_tiled"
        r"|\.enable_tiling\(",
        r"^use VAE Decode \(Tiled\)|^turn tiling on|enable_tiling\(",
    ),
}


def measures_in(text: str) -> frozenset[str]:
    """Return the measures that a text shows; fewer bits are also fewer than 16."""
    flags = re.IGNORECASE | re.ASCII
    shown = {name for name, m in MEASURES.items() if re.search(m.shown, text, flags)}
    return frozenset(shown if shown.isdisjoint({BITS_8, BITS_4}) else {*shown, HALF})


_SHOWN: Final = regex(
    r"(?:(?<![\w/-])(?:--(?P<flag>[A-Za-z][\w-]{2,60})(?:[= ]|\b)"
    r"|(?P<name>[A-Za-z][\w-]{2,60})['\"`]{0,2}\s{0,3}[=:]\s{0,3})['\"`]{0,2}(?P<value>\w[\w.-]{0,19})?"
    r"|(?<!torch)(?<!cuda)\.(?P<call>[a-z_]{3,60})\()",
    re.ASCII,
)
"""An option with its value, or a call of an object."""
_INCLUDES: Final = {
    "enable-sequential-cpu-offload": ("enable-model-cpu-offload",),
    "novram": ("lowvram", "medvram"),
    "lowvram": ("medvram",),
    "load-in-4bit": ("load-in-8bit",),
}
"""Options that do less of the same, by the stronger ones."""
_OFF: Final = frozenset({"false", "none", "null", "0", "off", "no"})
_NAMED: Final = regex(
    r"(?<![\w/-])(?:--([A-Za-z][\w-]{2,60})|([A-Za-z]{2,20}(?:[-_]\w{2,20}){1,5})(?!\w|\([^)])"
    r"|([A-Za-z]\w{2,60})=)",
    re.ASCII,
)


def option_name(name: str) -> str:
    """Return an option's name as all its spellings share it."""
    return name.strip("-").replace("_", "-").lower()


def options_shown(text: str) -> frozenset[str]:
    """Return the options that a text shows with any value that does not turn them off."""
    shown = {
        option_name(m["flag"] or m["name"] or m["call"])
        for m in _SHOWN.finditer(text)
        if (m["value"] or "").lower() not in _OFF
    }
    return frozenset(shown.union(*(_INCLUDES.get(name, ()) for name in shown)))


def options_named(advice: str) -> list[str]:
    """Return the options that a part of advice names, in order; a call with arguments is none."""
    return [option_name(next(filter(None, m.groups()))) for m in _NAMED.finditer(advice)]
