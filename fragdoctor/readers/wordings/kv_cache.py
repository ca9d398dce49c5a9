"""Start-up checks of vLLM and SGLang: the budget for the KV cache."""

from __future__ import annotations

import re
from typing import Final

from fragdoctor.readers.log import Stream
from fragdoctor.readers.wordings import names
from fragdoctor.readers.wordings.base import Fields, Wording, compile_squeezed, parse_size

_HINT: Final = "gpu_memory_utilization"


def _free_share(fields: Fields, match: re.Match[str], _stream: Stream) -> Fields:
    """Read ``(5.01/6.0 GiB)``: the unit stands once, after the second figure."""
    unit = match.group("total_bytes").lstrip("0123456789.,")
    return fields | {"free_bytes": parse_size(match.group("_free") + unit)}


WORDINGS: Final = (
    Wording(
        "vllm-no-blocks",
        names.KV_CACHE,
        "vllm",
        "noavailablememoryforthecacheblocks",
        compile_squeezed(r"noavailablememoryforthecacheblocks"),
        sub_kind="kv-budget",
        hint=_HINT,
    ),
    Wording(
        "vllm-tokens",
        names.KV_CACHE,
        "vllm",
        "islargerthanthemaximumnumberoftokens",
        compile_squeezed(
            r"max(?:imum)?seq(?:uence)?len(?:gth)?\(<kv_tokens_requested>\)islargerthanthemaximum"
            r"numberoftokensthatcanbestoredinkvcache\(<kv_tokens_capacity>\)"
        ),
        back=60,
        sub_kind="kv-budget",
        hint=_HINT,
    ),
    Wording(
        "vllm-bytes",
        names.KV_CACHE,
        "vllm",
        "kvcacheisneeded",
        compile_squeezed(
            r"(?:max(?:imum)?seq(?:uence)?len(?:gth)?\(<kv_tokens_requested>\),?)?"
            r"\(?<requested_bytes>kvcacheisneeded,?"
            r"(?:whichislargerthantheavailablekvcachememory\(<limit_bytes>\))?"
            r"(?:\.?basedontheavailablememory,?(?:the)?estimatedmaximummodellengthis"
            r"<kv_tokens_capacity>)?"
        ),
        back=110,
        sub_kind="kv-budget",
        hint=_HINT,
    ),
    Wording(
        "vllm-startup",
        names.KV_CACHE,
        "vllm",
        "freememoryondevice",
        compile_squeezed(
            r"freememoryondevice(?:(?:cuda|xpu|hip|npu)?:?<device_index>)?"
            r"\((?P<_free>\d{1,9}(?:\.\d{1,9})?)(?:[kmgt]i?b)?/<total_bytes>\)onstartup"
            r"islessthandesiredgpumemoryutilization\(\d{1,3}(?:\.\d{1,9})?,<requested_bytes>\)"
        ),
        sub_kind="startup-check",
        hint=_HINT,
        refine=_free_share,
    ),
    Wording(
        "sglang",
        names.KV_CACHE,
        "sglang",
        "notenoughmemory.pleasetrytoincrease",
        compile_squeezed(r"notenoughmemory\.pleasetrytoincrease-{0,2}mem-fraction-static"),
        sub_kind="kv-budget",
        hint="mem-fraction-static",
    ),
)
