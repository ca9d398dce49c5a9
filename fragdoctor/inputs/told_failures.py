"""The last resort if no known message is found: a sentence that says that memory ran out.

Programs that fragdoctor does not know report it in their own words, and people describe what they
got: "it throws a CUDA out of memory error". What only explains a failure is none
(``wordings/prose.py``).
"""

from __future__ import annotations

import re
from typing import Final

from msgspec.structs import replace

from fragdoctor.inputs.wordings.prose import reports_failure
from fragdoctor.inputs.wordings.wording import ALLOCATOR, DRIVER, HOST
from fragdoctor.model.case import TOO_MUCH, TRAINING, OomMessage
from fragdoctor.model.engines import ENGINES
from fragdoctor.model.frameworks import frameworks_in
from fragdoctor.model.gpus import CARDS
from fragdoctor.model.growth_words import GROWS

MAX_CHARS: Final = 256 * 1024
_MAX_TEXT: Final = 500
_TITLE_WORDS: Final = 6
_TITLE_CHARS: Final = 120

_MEMORY: Final = (
    r"(?:(?:allocatable|device|cuda|gpu|video|graphics|system|main|host|cpu|free|available)[ -])"
    r"{0,3}"
    r"(?:me[a-z]{1,5}[ro]y|vram|ram)(?:error)?(?![^\W_])"  # misspelled, or marked: _memory_
)
SHORTAGE: Final = re.compile(
    r"(?<![^\W_])(?:(?P<torch>cuda|hip)[ :_]{1,2})?(?!OutOfMemoryError)"
    rf"ou[tf][ _-]{{0,2}}of[ _-]?{_MEMORY}(?![ -]killer)"
    r"|(?:^|(?<=[a-z`:] ))`?(?P<name>(?:torch\.(?:cuda\.)?)?OutOfMemoryError)"
    r"(?=`?\s{1,80}[a-zT]|`?$)"
    r"|\b(?:(?:cuda|gpu|vram)[ -])?OOMs?\b"
    r"(?!\W{1,3}(?:0(?!\.\d)|count|safe|score|killer: disabled)\b|-?killer|[=\"'])"
    r"|\ballocation on device\b(?! \d? ?would)"  # ComfyUI
    rf"|\b(?:fail(?:ed|s|ure)? to|unable to|can(?:not|n't|'t)) allocate {_MEMORY}"
    rf"|(?:\bnot?|n't)(?: have| provide)? enough {_MEMORY}|\b(?:insufficient|no more) {_MEMORY}"
    rf"|\b{_MEMORY} (?:(?:is|was) (?:full|exhausted)|(?:(?:is|was|gets?|got) )?used up"
    r"|over-?(?:load|flow)s?\b)"
    rf"|(?P<loose>{GROWS}|\b(?:cuda|gpu|vram) memory (?:error|problem)s?\b|\black of {_MEMORY}"
    rf"|\b(?:problems?|issues?|trouble|errors?) (?:with|of|about) {_MEMORY}"
    r"|\bmemory (?:error|problem|issue)s? (?:on|in|with|of) (?:the |my )?(?:cuda|gpu)\b"
    rf"|{_MEMORY} (?:is|was)(?:n't| not) (?:enough|sufficient)"
    rf"|{_MEMORY} (?:is insufficient|limitations?|spikes?|(?:gets?|is|was) (?:fully|all) used)\b"
    rf"|\b{_MEMORY} (?:\S{{1,12}} ){{0,3}}(?:runs?|ran|running) out\b"
    rf"|{_MEMORY} (?:usage|consumption) (?:is|was) (?:very|too|so|extremely) high\b"
    rf"|\b(?:too much|a lot of|excessive) {_MEMORY}"
    rf"|\b(?:gpu|memory) (?:load|usage) is (?:not balanced|[iu][mn]balanced)"
    rf"|\bexceed(?:s|ed|ing)? (?:\w{{1,20}} ){{0,3}}\d{{1,3}} ?GB"
    rf"|\bmax(?:ing|ed|es) out (?:\S{{1,20}} ){{0,4}}{_MEMORY}"
    rf"|\bexceed(?:s|ed|ing)? (?:the |my )?{_MEMORY}|\b{_MEMORY} exceeded\b)"
    r"|爆显存|[显内]存(?:[就又都会直接]{0,2}[爆炸满]|不足|不够|溢出)"
    r"|\bfail(?:ed|s|ure)? to (?:re)?allocate (?:(?:gpu|device|memory|of|size) ){0,4}"
    r"(?P<bytes>\d{1,18}) bytes",
    re.IGNORECASE | re.MULTILINE | re.ASCII,  # a Latin word ends where another script begins
)
_ON_DEVICE: Final = re.compile(
    r"cuda|gpu|hip|rocm|vram|video ?ram|xpu|device|metal|opencl|vulkan|graphics|显存"
    rf"|\b(?:[rg]tx|geforce|quadro|tesla|radeon|{CARDS})\b"
    r"|\d ?卡|[每单多]张?卡|显卡",
    re.IGNORECASE | re.ASCII,
)
"""Words for a GPU and its memory, and the names of common ones."""
_TRAINS: Final = re.compile(
    rf"{TRAINING}|\bbatch[ _-]?size|\blora\b|\bvalidation\b|torch|gradio|推理|\bdef \w{{1,40}}\(",
    re.IGNORECASE | re.ASCII,  # a Latin word ends where another script begins
)
_POST: Final = re.compile(
    r"\b(?:I|I'm|I've|my|we)\b.{0,600}(?:\?|\bhelp|\bsolve|\bsuggest|\bfix|\badvice|\breduc)"
    r"|\bI(?:'ve| have)? (?:also )?tried\b|\bI (?:don't|do not) know\b"
    r"|\bhow (?:can|do|to|could|should) (?:I|we|reduce|solve|fix)\b"
    r"|\b(?:has|does|did|can|could) any(?:one|body)\b"
    r"|\bis there an?y? (?:\w{1,30} )?(?:way|solution)\b"
    r"|\bwhat (?:can|should|could) (?:I|we) do\b"
    r"|\bany (?:ideas?|suggestions?|advice|solutions?|workarounds?)\b"
    r"|\b(?:thanks|thank you)\b(?! (?:to|@))"
    r"|\A\W{0,9}[^\n]{3,120}\?\s{0,3}\n"  # the title
    r"|怎么|如何|请问|为(?:什么|啥|何)|求助|吗[?\uff1f]",
    re.IGNORECASE | re.DOTALL,
)
"""What people write who ask for help."""
_GROWS: Final = re.compile(r"grow|increas|leak|deplet", re.IGNORECASE)
_OTHERS: Final = re.compile(r"\b(?:jax|flax|tensorflow|keras|paddle)", re.IGNORECASE)
_ON_HOST: Final = re.compile(
    r"\b(?:ram|(?<!to )(?<!to the )cpu(?!.?offload)|host|swap|slurm|cgroup"
    r"|(?:system|main) memory)\b|内存",
    re.IGNORECASE,
)
_ON_METAL: Final = re.compile(r"(?<!bare.)\bmetal", re.IGNORECASE | re.ASCII)
_NOT_GPU: Final = re.compile(r"(?i)\bnot (?:on |the |in ){0,3}(?:gpu|cuda)\w*+")
_IN_RAM: Final = re.compile(
    r"(?i)data ?loader|workers\b|\bload\w*+ (?:\w++ ){0,4}data ?sets?|\bram\b|\bdevice\W{1,6}cpu\b"
)
_ANY_MEMORY: Final = "内存"
"""Memory of the host or, beside words for a GPU, of the GPU."""
_KILLED: Final = re.compile(
    r"(?:\b(?:(?:is|was|(?<!to )be|been|gets?|got|getting) |a )|[\"'`\u201c]|^)[\"'`]?killed\b"
    r"(?! by (?!the system|the kernel|os))(?P<system> by (?:the )?(?:system|kernel|os\b))?",
    re.IGNORECASE | re.MULTILINE,
)
SENTENCES: Final = re.compile(
    r"(?:[^\n.!?。]|(?:(?<=\be\.g)|(?<=\bi\.e)|(?<=\bvs)|(?<=\betc))\.|[.!?](?!\s)){1,2000}[.!?]?"
)


def told_failure(text: str) -> OomMessage | None:
    """Return the first sentence of a text that says that memory ran out, or None.

    A sentence that says whose memory it was wins over those that do not. A short title counts, and
    so does an error's name at the start of a line. If the words only say that memory grows or is
    scarce, the sentence must also say that this did harm, or be the title of a text or a part of a
    post: who asks for help tells of a failure.
    """
    head = text[:MAX_CHARS]
    at, first_told, weak, is_post = 0, None, None, asks_for_help(head)
    while found := SHORTAGE.search(head, at):
        first = max(found.start() - _MAX_TEXT, 0)
        start = max(head.rfind("\n", first, found.start()) + 1, first)
        sentences = SENTENCES.finditer(head, start)
        sentence = next((s for s in sentences if s.end() > found.start()), found)
        told, before = sentence.group(), head[sentence.start() : found.start()]
        is_lone = not head[sentence.end() :].strip()
        is_title = len(told.split()) < _TITLE_WORDS and not (found["loose"] and is_lone)
        is_plain = not found["loose"] or _ON_DEVICE.search(told) is not None
        is_title |= len(told) <= _TITLE_CHARS and is_plain and not (found["loose"] and is_lone)
        is_title &= not head[:start].strip()
        is_head = not found["loose"] and not before.strip("\"'`([{>*-: #")
        line = head[start : sentence.end()]
        is_plain = is_title or is_head or not found["loose"]
        is_told = reports_failure(told, before, line, is_report=is_title or is_head)
        if is_told or (is_post and reports_failure(told, before, line, is_post=True)):
            line = head[start : found.end() + _MAX_TEXT].partition("\n")[0]
            message = replace(message_of(found, told, head), text=" ".join(line.split()))
            grows = message.kind == ALLOCATOR and re.search(f"(?i){GROWS}", told)
            if grows and all(m["loose"] for m in SHORTAGE.finditer(head)):
                message = replace(message, sub_kind=TOO_MUCH)  # it did not fail yet
            if not (is_told or is_plain):
                weak = weak or message  # another sentence may tell of the failure itself
            elif _ON_DEVICE.search(told) or _ON_HOST.search(told):
                return message
            else:
                first_told = first_told or message
        at = max(found.end(), sentence.end())
    return first_told or weak


def told_kill(text: str) -> OomMessage | None:
    """Return what a text tells of a kill, without the reason for it.

    The kernel kills what is too large for the host; it does not look at the GPU.
    """
    head = text[:MAX_CHARS]
    is_post = asks_for_help(head)
    for killed in _KILLED.finditer(head):
        line = head[head.rfind("\n", 0, killed.start()) + 1 : killed.end()]
        around = head[max(0, killed.start() - _MAX_TEXT) : killed.end() + _MAX_TEXT]
        if _NEEDS_MEMORY.search(around) and reports_failure(
            line, line[: -len(killed.group())], line, is_post=is_post
        ):
            message = OomMessage(HOST, "cpu", is_device_oom=False, sub_kind="oom-killer")
            return replace(message, variant="told", text=" ".join(line.split()))
    return None


_NEEDS_MEMORY: Final = re.compile(
    rf"(?ia){TRAINING}|\bv?ram\b|\bgpus?\b|\bload(?:s|ed|ing)?\b|\bmodel|\bdata ?sets?\b"
)


def asks_for_help(text: str) -> bool:
    """Return whether a text is of somebody who asks for help, and so tells of a failure."""
    return _POST.search(text) is not None


def _is_of_torch(around: str) -> bool:
    """Return whether a text speaks of a program that trains on a GPU: most likely PyTorch's."""
    is_on_device = _ON_DEVICE.search(around) or not (
        _ON_HOST.search(around) or _GROWS.search(around)
    )
    is_other = _OTHERS.search(around) or any(re.search(e.logs, around) for e in ENGINES if e.logs)
    return bool(_TRAINS.search(around) and is_on_device) and not is_other


def message_of(found: re.Match[str], told: str, head: str) -> OomMessage:
    """Make a sentence's message; whose memory it means is read from it and the text around it."""
    named_by = found.groupdict().get  # a complaint has no such groups
    on_host = _ON_HOST.search(found.group())
    named = found.group() if on_host and on_host.group() != _ANY_MEMORY else told
    is_on_device = _ON_DEVICE.search(_NOT_GPU.sub("", named)) is not None
    around = _NOT_GPU.sub("", head[max(0, found.start() - 700) : found.end() + 700])
    # The system kills for its own memory; for the GPU's memory a program gets an error.
    kill = _KILLED.search(around)
    is_on_device &= kill is None or not kill["system"]
    is_on_host = not is_on_device and (kill or _ON_HOST.search(told)) is not None
    if not (is_on_host or _ON_DEVICE.search(around)):  # data that is loaded is on the host
        is_on_host = _IN_RAM.search(around) is not None
    if is_on_host:
        kind, sub_kind = HOST, ""
    elif named_by("torch") or named_by("name") or frameworks_in((), around) or _is_of_torch(around):
        kind, sub_kind = ALLOCATOR, "figures-lost"
    else:
        kind, sub_kind = DRIVER, "" if _ON_DEVICE.search(around) else "unread"
    return OomMessage(
        kind=kind,
        backend="cpu" if is_on_host else "mps" if _ON_METAL.search(around) else "cuda",
        is_device_oom=not is_on_host,
        sub_kind=sub_kind,
        variant="told",
        requested_bytes=int(asked) if (asked := named_by("bytes")) else None,
        line=head.count("\n", 0, found.start()) + 1,
    )
