"""Read what a text says of its run's settings: the batch, what was tried, what a sample is.

Options, configurations, logs and people name them: ``--batch_size=6``, ``samples_per_gpu: 4``, "a
batch size of two". Advice names the option as the text does, and leaves out what is in use already.
What is only proposed ("it should be sufficient to ...") is neither in use nor tried.
"""

from __future__ import annotations

import re
from typing import Final

from fragdoctor.inputs.told_contrast import told_contrast
from fragdoctor.model.case import IMAGES, SEQUENCES, ContrastKind, ToldSettings
from fragdoctor.model.measures import measures_in, options_shown

MAX_CHARS: Final = 256 * 1024

_NAME: Final = (
    r"(?:[\w.]{1,40}[._])?(?:micro_?)?batch[-_ ]?size(?:[-_ ]per[-_ ](?:gpu|device))?"
    r"|(?:samples|imgs|images)_per_(?:gpu|batch)|(?:\w{1,20}\.){0,2}ims_per_batch"
    r"|\bbsz?(?=\s?=)|\bbatch(?= of [a-z1-9])"
    r"|num[_ ](?:samples|images)|max[-_]tokens(?=\s{0,3}\d{4})|\bbatch(?==)"
)
_OF_OTHER: Final = re.compile(r"(?i)eval|val[._-]|valid|test|infer|predict|sample_|total|global")
_FOR_OTHER: Final = re.compile(r"(?i)\b(?:eval|valid|test|infer|total|global)\w{0,8}[ -]\Z")
"""The same as a word before the option: "validation batch size"."""
_IN_WORDS: Final = {"one": 1, "two": 2, "four": 4, "eight": 8, "sixteen": 16}
_IS: Final = r"(?:of|is|was|to|down to|at|as|like|set to|already|just|only|per device)"
_BATCH: Final = re.compile(
    rf"(?i)(?<![\w.{{-])(?P<option>(?:--)?(?:{_NAME}))[*`'\"]{{0,3}}"
    rf"(?:\s{{0,3}}[:=]{{1,2}}\s{{0,3}}|,?\s{{1,3}}(?:{_IS}\s{{1,3}}){{0,2}})"
    rf"[`'\"(]{{0,2}}(?P<size>[1-9]\d{{0,3}}|{'|'.join(_IN_WORDS)})\b(?![.,]\d|[-x*])",
    re.ASCII,
)
_WORKS: Final = re.compile(
    r"(?i)[^.!?;\n]{0,40}?\b(?:works?|worked|success\w{0,10}|(?:is|runs?) (?:ok|fine|well))\b"
    r"(?<!not work)(?<!n't work)(?<!without success)(?<!no success)"
)
_RUNS_WITH: Final = re.compile(
    r"(?i)\b(?:(?:able to|can|could) (?:run|train)\b[^.!?\n]{0,40}"
    r"|(?<!not )(?<!n't )(?:works?|worked|runs|trains|fine|okay|ok) (?:\w{1,20} )?"
    r"(?:with|at|for|on|using|if|when) (?:\w{1,20} ){0,2})\Z"
)
"""What people say right after and before the settings with which their program does not fail."""
_NEAR: Final = 200
_LESS: Final = r"(?:reduc|lower|decreas|small|chang|set|tri|try|us|drop|cut|turn)\w{0,6}"
_FAILS_STILL: Final = (
    r"(?:\b(?:still|same (?:error|problem|issue|crash|result|thing)|again|to no avail|in vain"
    r"|without (?:any )?(?:success|luck)|nothing (?:changes|changed|helps|helped)"
    r"|no (?:success|effect|difference|luck))"
    r"|(?:\bnot|n't|\bno) (?:\w{1,20} )?(?:help|work|solve|fix|make|change)"
    r"|没用|没有用|无效|不行|依然|仍然|还是[报会爆]|해결이? ?안|마찬가지|改善し(?:ない|ません)"
    r"|не помог)"
)
_WORD: Final = r"\w{1,20}"
_PROPOSED: Final = re.compile(
    r"(?i)[^\n.!?#=]{0,300}\b(?:(?<!\bi )(?<!\bwe )(?:should|could|would|need to)|suffic\w{2,6}"
    r"|suggest(?:s|ions?)?|propos\w{1,4}|recommend(?:s|ed)?|prevents?|is it possible"
    r"|can (?:we|you|i)|maybe|perhaps|please|how (?:can|do|to)|try setting"
    r"|use (?:PYTORCH_|--)[\w-]{1,60})\b[^\n.!?]{0,300}"
    r"(?:\n{1,2}(?: {4}|\t|```)[^\n]{0,200}){0,10}"
)
"""What somebody proposes, with the code below it."""
_DONE: Final = re.compile(r"[^\n]{0,80}\b(?:tried|did|done|still)\b")
_TRIED: Final = re.compile(
    rf"(?i)\b{_LESS}(?:\W{{1,3}}{_WORD}){{0,4}}?\W{{1,3}}batch(?:[^\n]|\n(?!\n)){{0,90}}?"
    rf"{_FAILS_STILL}"
    r"|batch.?size[^\n。]{0,40}?(?:无论|不管|都|还是|仍|也)[^\n。]{0,12}?(?:[错报爆]|不[够足]|OOM)"
    rf"|\b(?:still (?:{_WORD} ){{0,2}}(?:when|after|if|with)|even (?:when|after|if|with)"
    rf"|no matter)\b[^.!?\n]{{0,40}}?\b(?:{_LESS}|minimal|tiny)\W{{1,3}}"
    rf"(?:{_WORD}\W{{1,3}}){{0,3}}?batch"
    # who tried it and still asks has not been helped
    rf"|\btried\b[^.!?\n]{{0,60}}\b{_LESS}\W{{1,3}}(?:{_WORD}\W{{1,3}}){{0,3}}?batch"
    rf"(?![^.!?\n]{{0,60}}\b(?:works?|worked|helps?|helped|solve[sd]?|fixe[sd])\b)"
    rf"|\bbesides? {_LESS}\W{{1,3}}(?:{_WORD}\W{{1,3}}){{0,2}}?batch"
    rf"|no executable batch size found"
    rf"|\bstill (?:{_WORD} ){{0,3}}(?:when|with|if) (?:the |a )?batch\W?size\b"
)
_N_GPUS: Final = re.compile(
    r"(?i)(?<![\d.])(?P<n>[1-9]\d{0,2}) ?"
    r"(?:[x*\u00d7张块](?![\d ])|nvidia |gpus?\b|[x*]? ?[ahv]\d00)"
    r"|(?:num_gpus|nproc[-_]per[-_]node|num_processes|\b[ahlv]\d{1,3} ?[x*\u00d7])[ =]{0,3}"
    r"(?P<of>[1-9]\d{0,2})\b"
    r"|(?:CUDA_VISIBLE_DEVICES=|localhost:)(?P<ids>\d(?:,\d){0,15})"
)
_VISIBLE: Final = re.compile(
    r"\b(?:CUDA|HIP)_VISIBLE_DEVICES[\"'\])]{0,2} ?[=,:] ?[\"'\[]{0,2}(\d{1,2}(?:, ?\d{1,2}){0,15})"
)
_SAMPLES: Final = {
    "fewer frames": r"\bvideo(?:s|\d{1,4})?\b(?! (?:memory|ram|card|adapter))|\b(?:num_)?frames\b",
    "shorter audio": r"\baudio\b|\bspeech\b|\butterances?\b|wav2vec|\btts\b|\bvoice|transcri"
    r"|diari[sz]|vocod|whisper",
    "smaller patches or crops": r"\bpatch(?:es|_size| size)\b|\bvolum(?:es|etric)\b|\bCT\b",
    "fewer residues": r"\bproteins?\b|\bresidues\b|\bamino.acids?\b"
    r"|\b\d{3,5} ?aa\b|\bfasta\b",
    "fewer points": r"\bpoint.?clouds?\b|\blidar\b",
    "fewer nodes and edges": r"\bG[CN]Ns?\b|GATs?\b|graph.(?:neural|conv)|\bedges\b|\bdgl\b"
    r"|edge_index|torch.geometric",
    IMAGES: r"\bimages?\b|\bimg(?:s|sz|_size)?\b|\bresolution\b|\bunet\b|(?<!-)segmentation"
    r"|\bpictures?\b|\bphoto|upscal|super.?resol|(?:txt|img)2img"
    # torch 2.13, torch/nn/modules/conv.py and pooling.py, torch/nn/functional.py
    r"|\bF\.(?:conv|conv_transpose|max_pool|avg_pool)[23]d\(|\bin (?:interpolate|upsample)\b",
    SEQUENCES: r"\btokens?\b|\bseq(?:uence)?[_ ]len|max_length|cutoff_len|\bLLMs?\b"
    r"|llama|\bgpt|qwen|\bbert\b|tokenizer|new.tokens|generate_text|causallm|\bchat|translat",
}
"""What a smaller sample is, by words that name one."""
_MOST_KINDS: Final = 2
_MUCH: Final = 3
"""A kind that is named less than a third as often as another is only mentioned."""
_SIZE: Final = re.compile(
    r"(?i)(?<![\w.-])((?:--)?(?:(?:max[-_]?(?:seq(?:uence)?[-_]?)?|seq(?:uence)?[-_]?)"
    r"(?:len(?:gth)?|duration)|cutoff_len"
    r"|(?:img|image|crop|patch|input)_?size|imgsz|resolution|num_frames|block_size))"
    r"['\"`]{0,2}(?:\s{0,3}[:=]\s{0,3}|\s{1,3}(?:is )?)['\"`(\[]{0,2}(\d{2,5}(?:s|px)?)\b"
)
"""An option for the size of a sample, with its value."""


def told_settings(text: str) -> ToldSettings:
    """Return what a text says of its run's settings."""
    head, flags = text[:MAX_CHARS], re.IGNORECASE | re.ASCII
    done = _PROPOSED.sub(lambda m: m[0] if _DONE.match(head, m.end()) else "", head)
    named = [
        m
        for m in _BATCH.finditer(head)
        if not _OF_OTHER.search(m["option"])
        and not _FOR_OTHER.search(head, max(0, m.start() - _NEAR), m.start())
    ]
    failing = [
        m
        for m in named
        if not _WORKS.match(head, m.end())
        and not _RUNS_WITH.search(head, max(0, m.start() - _NEAR), m.start())
    ]
    least = min((_number(m["size"]) for m in failing), default=None)
    contrast = told_contrast(head, done)
    options = [m["option"] for m in named if "_" in m["option"] or "-" in m["option"]]
    size = _SIZE.search(head)
    visible = _VISIBLE.search(head)
    # If no sentence names a sample, names of files, functions and scripts may.
    for told in (head, head.replace("_", " ")):
        named_as = {less: len(re.findall(words, told, flags)) for less, words in _SAMPLES.items()}
        if any(named_as.values()):
            break
    most = max(named_as.values())
    gpus = [int(m["n"] or m["of"] or m["ids"].count(",") + 1) for m in _N_GPUS.finditer(head)]
    kinds = [less for less, n in named_as.items() if n and _MUCH * n >= most]
    return ToldSettings(
        batch_option=" ".join((options or [m["option"] for m in named] or [""])[0].split()),
        batch_size=least,
        is_smaller_batch_tried=_TRIED.search(head) is not None,
        contrast=contrast,
        in_use=tuple(sorted(measures_in(done))),
        options=options_shown(done),
        smaller_samples=(f"a lower {size[1]} than {size[2]}",)
        if size is not None
        else (f"fewer {contrast.fails}",)
        if contrast.kind is ContrastKind.COUNTED
        else tuple(kinds)
        if len(kinds) <= _MOST_KINDS
        else (),
        n_gpus=max(gpus, default=1),
        visible_gpus=visible[1].replace(" ", "") if visible else "",
    )


def _number(size: str) -> int:
    return _IN_WORDS.get(size.lower()) or int(size)
