"""Read where memory is: from tables of nvidia-smi or gpustat, launch lines and what people say."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from fragdoctor.inputs.told_failures import MAX_CHARS, SENTENCES, SHORTAGE
from fragdoctor.model.case import GPU_TABLE, OomMessage
from fragdoctor.model.growth_words import NOT_RELEASED, STAYS
from fragdoctor.model.ledger import HELD_BEFORE, USES_FIRST, Ledger
from fragdoctor.units import MIB

_ROWS: Final = re.compile(
    # memory in use on a GPU: gpustat prints the GPU's number, nvidia-smi one row per GPU
    r"(?:^\[(?P<index>\d{1,3})\][^|\n]{1,80}\|[^|\n]{1,60})?"
    r"\|\s{0,8}(?P<used>\d{1,7})(?:MiB)?\s?/\s{0,4}(?P<total>\d{1,7})\s?M(?:iB|B)\b"
    # nvidia-smi, one row per process
    r"|^\|\s{1,6}(?P<gpu>\d{1,3})\s{1,6}(?:\S{1,6}\s{1,6}){0,2}\d{1,9}\s[^|\n]{1,100}?"
    r"(?P<held>\d{1,7})MiB",
    re.MULTILINE,
)
_MIN_USED: Final = 512
"""MiB; more than a desktop and a context use. Less than this is not a program that filled a GPU."""

_GONE: Final = (
    r"\b(?:zombie|(?:crash|kill|terminat|interrupt|stopp?|finish|exit|abort|end)(?:s|e[sd]|ing)?)\b"
)
_KEPT: Final = f"(?:{NOT_RELEASED}|{STAYS})"
_OUTLIVES: Final = re.compile(
    rf"{_GONE}[^\n]{{0,200}}?\b(?:memory|vram)\b[^\n]{{0,60}}?{_KEPT}"
    rf"|{_GONE}[^\n]{{0,200}}?{_KEPT}[^\n]{{0,60}}?\b(?:memory|vram)\b"
    r"|(?:kill|终止|结束|中断|停止|ctrl ?\+? ?c)[^。\n]{0,60}显[存卡][^。\n]{0,10}?"
    r"(?:[不未没]有?释放|占)"
    r"|\bzombie process\w{0,2} (?:\w++ ){0,3}?(?:occup|hold|keep|us|tak)\w{1,4}\b[^\n]{0,40}?"
    r"\bmemory\b"
    rf"|\b(?:memory|vram)\b[^\n]{{0,60}}?{_KEPT}[^\n]{{0,60}}?\bafter\b[^\n]{{0,60}}?{_GONE}",
    re.IGNORECASE,
)
"""A program that is gone while its memory is not: enough by itself to report a shortage."""


def _gpus(head: str) -> Iterator[tuple[float, int, int, int | None, re.Match[str]]]:
    """Yield (share in use, MiB in use, GPU, MiB in all, row) of each row."""
    for n, row in enumerate(_ROWS.finditer(head)):
        total = None if row["total"] is None else max(1, int(row["total"]))
        used, index = int(row["used"] or row["held"]), row["index"] or row["gpu"]
        yield (0.0 if total is None else used / total, used, n if index is None else int(index),
               total, row)  # fmt: skip


_ROOM: Final = re.compile(
    r"(?i)\bnvidia-smi\b[^.\n]{0,80}\b(?:0 ?MiB|nothing|no (?:running )?process(?:es)?|empty|idle"
    r"|unused|not (?:in use|used))\b"
)
_GPU: Final = re.compile(
    r"(?i)(?:gpu|card|device)s?\d?\b|\b[ahlv]\d{2,3}s?\b|\btitan|\d号|[显张]卡"
)
_WORD: Final = r"\w{1,20} "
_USES: Final = (
    r"(?:us(?:es?|ing|ed)|utili[sz](?:es?|ing|ed)|occup\w{1,4}|tak(?:es?|ing|en)|hold(?:s|ing)?|runn?(?:ing|s)?"
    r"|fill\w{0,3})"
)
_PROGRAM: Final = (
    r"(?:process|worker|job|training|script|program|instance|trial|experiment|notebook|actor)"
)
_OTHERS: Final = re.compile(
    rf"(?i)\b(?:someone|somebody|others|other (?:people|users?|models?|{_PROGRAM}\w{{0,2}})"
    rf"|another (?:{_WORD}){{0,2}}?(?:user|person|model|server|{_PROGRAM}))\b"
    rf"[^.\n]{{0,30}}\b{_USES}\b"
    rf"|\b{_USES} by (?:another|others?|someone|somebody)\b"
    r"|(?<!memory )(?<!ram )\b(?:is|are|was|were|being) (?:\w{1,20} )?(?:occupied|busy|taken)\b"
    rf"|\b(?:\d|one|two|three|another|a) (?:other )?{_PROGRAM}\w{{0,2}} (?:{_WORD})?"
    r"(?:already|still) running"
    # or a GPU that is free
    r"|(?<!\d )(?<!gb )(?<!ib )\b(?:free|empty|idle|unused|spare) (?:\w{1,20} )?(?:gpus?|cards?)\b"
    r"(?! (?:memory|ram))"
    r"|(?<!other )(?:gpus?|cards?|[ahlv]\d{2,3})(?: \d)? (?:is|are|was|were) (?:\w{1,20} )?"
    r"(?:free|empty|idle|unused|not (?:being )?(?:used|occupied|in use))\b"
)
_NEGATED: Final = re.compile(r"(?i)\b(?:no|not|nothing|any|without|never|nor)\b|n't\b|\bif \Z")
_NEAR: Final = 25
_NEEDS_HOST: Final = re.compile(
    r"(?i)\b(?:increas\w{0,3}|rais\w{1,3}|enlarg\w{1,3}|more|larger) (?:the |of )?"
    r"[`'\"]?(?:num_?)?workers?\b"
    r"|\b(?:for|with|when|if|where) [`'\"]?num_?workers?[`'\"]? ?[=>]{1,2} ?[1-9]"
    r"|\A(?=.{0,2000}(?:block ?swap|off-?load|\bpinn))"
    r".{0,2000}(?:\bworks?\b.{0,60}\bwithout\b|\bwithout\b.{0,80}\bworks\b)"
)
"""What takes the host's memory, where a sentence says that a program fails only with it."""

_NUMBERS: Final = {"both": 2, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "eight": 8}
_COUNT: Final = rf"(?P<n>\d{{1,2}}|{'|'.join(_NUMBERS)}|several|multiple|many)"
_SAME: Final = (
    r"(?:shar(?:es?|ed|ing) (?:one|a|the)|the same|same) (?:\w{1,20} )?(?:gpus?|cards?)\b"
)
_SHARING: Final = re.compile(
    rf"(?i:\b{_COUNT} (?:{_WORD}){{0,3}}?{_PROGRAM}(?:e?s)\b[^.\n]{{0,60}}?\b(?:{_SAME}"
    r"|simultaneously|at the same time|concurrently))"
    rf"|(?i:\b(?:all|each|every|{_PROGRAM}e?s)\b[^.\n]{{0,60}}?\b{_SAME})"
    # Ray: the share of a GPU that a worker, trial or actor asks for
    r"|\b(?:num_gpus(?:_per_\w{1,12})?|gpus?(?:_per_trial)?)[\"']?\s?[:=]\s?(?P<share>0?\.\d{1,2})\b"
)
"""How many processes of a program share a GPU."""
_BY_NUMBER: Final = re.compile(
    rf"(?ia)\b(?:with|when|using|running|run) (?:{_WORD}){{0,2}}?(?:{_COUNT}|number of) "
    rf"(?:{_WORD})?{_PROGRAM}e?s\b"
)
"""What a sentence that tells of a failure says of the program's processes."""

_SEVERAL: Final = re.compile(
    r"(?i)\bgpus\b|\b(?:gpu|cuda)[ :]?[1-9]\b"
    r"|\b(?:other|two|three|four|[2-9]) (?:\w{1,20} ){0,2}cards\b"
    r"|\bddp\b|\brank|torchrun|nproc|multi.?gpu|[多几\d]张?卡"
)
_CHOSEN: Final = re.compile(r"(?m)(?:^|[\s`:])CUDA_VISIBLE_DEVICES=\d")
_WSL: Final = re.compile(r"(?ia)\bwsl ?2?\b|microsoft-standard")
_LOADS_DATA: Final = re.compile(r"(?i)dataloader|num_?workers")


def ledger_of(text: str) -> Ledger:
    """Return where memory is, as far as a text says."""
    head = text[:MAX_CHARS]
    gpus = list(_gpus(head))
    free = [index for _, used, index, total, _ in gpus if total is not None and used < _MIN_USED]
    said = [s.group() for s in SENTENCES.finditer(head)]
    return Ledger(
        free_gpu=free[0] if free else None,
        uses_first=re.search(USES_FIRST, head) is not None,
        held_before=re.search(rf"(?i){HELD_BEFORE}", head) is not None,
        has_others=any(_tells_of_others(s) for s in said if _GPU.search(s)),
        is_chosen=_CHOSEN.search(head) is not None,
        n_sharing=_sharing(head, said),
        has_several=_SEVERAL.search(head) is not None,
        # What a table shows says more than words.
        has_room=max(gpu[1] for gpu in gpus) < _MIN_USED if gpus else bool(_ROOM.search(head)),
        is_wsl=_WSL.search(head) is not None,
        needs_host=any(_NEEDS_HOST.search(s) and SHORTAGE.search(s) for s in said),
    )


def _tells_of_others(sentence: str) -> bool:
    """Return whether a sentence says that others use a GPU, without a negation in front of it."""
    return any(
        not _NEGATED.search(sentence[max(0, m.start() - _NEAR) : m.start()])
        for m in _OTHERS.finditer(sentence)
    )


def _sharing(head: str, said: Sequence[str]) -> int:
    """Return the most processes of the program that a text puts on one GPU; 2 is several."""
    numbers = [1]
    for m in _SHARING.finditer(head):
        share = float(m["share"] or 0.5) or 0.5
        numbers.append(_number(m["n"], int(1 / share)))
    if not _LOADS_DATA.search(head):
        told = [(found, s) for s in said if (found := _BY_NUMBER.search(s)) is not None]
        numbers.extend(_number(found["n"], 2) for found, s in told if SHORTAGE.search(s))
    return max(numbers)


def _number(said: str | None, default: int) -> int:
    n = (said or "").lower()
    return int(n) if n.isdigit() else _NUMBERS.get(n, default)


def fullest_gpu(text: str, *, has_failed: bool = False) -> OomMessage | None:
    """Return a table's fullest GPU, if the text says that memory ran out or was not released.

    ``has_failed`` says that an error which a full GPU causes is known already.
    """
    head = text[:MAX_CHARS]
    outlives = _OUTLIVES.search(head)
    if outlives is None and not has_failed and not SHORTAGE.search(head):
        return None
    found = list(_gpus(head))
    if not found:
        return None if outlives is None else _table(head, outlives)
    _share, used, index, total, row = max(found, key=lambda one: one[:2])
    if used < _MIN_USED or (total is not None and used > total):
        return None
    whole = None if total is None else total * MIB
    return _table(head, row, device_index=index, total_bytes=whole, process_bytes=used * MIB)


def _table(head: str, said: re.Match[str], **figures: int | None) -> OomMessage:
    message = OomMessage(
        kind="driver-no-figures",
        backend="cuda",
        is_device_oom=True,
        sub_kind=GPU_TABLE,
        variant=GPU_TABLE,
        line=head.count("\n", 0, said.start()) + 1,
        text=" ".join(said.group().split()),
    )
    return replace(message, **figures)
