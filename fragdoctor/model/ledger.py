"""The ledger of a text: where memory is, by its tables, its launch lines and its words."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

_FIRST: Final = (
    r"(?:\b(?:gpu|gup|cuda|device|rank)[ :_-]{0,2}0\b(?!; | has a)"
    r"|\b(?:0|0th|first|master|main) (?:gpu|card)\b|第一张?显?卡|主卡|0号?卡|rank ?0\s?卡?)"
)
_MORE: Final = (
    r"(?:\b(?:more|much|most|first|alone|large|larger|extra|additional|double|doubled"
    r"|twice|a lot)\b|\b\d(?:\.\d)? ?(?:x\b|times)|[两\d]倍|更[多大高]|变大|远?超|占用\d)"
)
ON_TWO_GPUS: Final = (  # a process that nvidia-smi lists on two GPUs
    r"\b(?P<on>\d{1,2}) (?:\S{1,6} ){0,2}(?P<pid>\d{2,9}) C [\s\S]{0,1500}?"
    r"\b(?!(?P=on) )\d{1,2} (?:\S{1,6} ){0,2}(?P=pid) C "
)
ON_FIRST: Final = (
    r"\bone (?:gpu|card)\b[^.\n]{0,60}\b(?:while|but|and)\b[^.\n]{0,12}\b(?:another|the other)\b"
    rf"|(?:{_FIRST}|\bone of (?:\w++ )?(?:gpus|cards)\b|一张卡)(?: ?\([^)]{{1,9}}\))?"
    rf"[^.;\n(。]{{0,60}}?{_MORE}"
    rf"|{_FIRST}[^.;\n(]{{0,60}}\b(?:by|for|in|of|from) (?:each|every|all)\b"
    r"|\b(?:more|most|highest|extra|additional|unexpected|all|every|each|only|other gpus"
    r"|process(?:es)?)\b[^.;\n(]{0,60}\b(?:on|in|to|of|onto|running|using) ?"
    rf"(?:the |physical )?{_FIRST}"
    r"|\b(?:all|each|every|workers?|process(?:es)?|ranks?)\b[^.\n]{0,60}\b(?:on|in|to|onto) "
    r"(?:the )?(?:one|same|single) (?:gpu|device|card)\b"
    rf"|{ON_TWO_GPUS}"
    r"|\b(?:unbalanced?|imbalanced?|uneven(?:ly)?)\b[^.\n]{0,40}\b(?:gpu|memory)"
    r"|\b(?:usage|consumption|load)\b[^.\n]{0,20}\b(?:unbalanced?|imbalanced?|uneven(?:ly)?)\b"
    r"|[显内]存[^。\uff0c\n]{0,8}不(?:均|平)"
    r"|\bmemory[^.\n]{0,60}n(?:o|')t average\b"
)
"""The ways in which people say that one of several GPUs, mostly the first, holds more."""
USES_FIRST: Final = (
    r"(?is:\A(?=.{0,4096}(?:\.(?:cuda|to)\([1-9]\)|\bcuda:[1-9]"
    r"|\b(?:device|gpu)s?(?:_ids?)?\s?[:=]\s?[\[\"']?[1-9]"
    r"|\b(?:specif|assign|select|choos)\w{1,4} (?:\w{1,20} ){0,4}?(?:gpu|card|device)))"
    r"(?!.{0,4096}\branks?\b).{0,4096}?"
    rf"(?:\b(?:also|still|always|too|another)\b[^.\n]{{0,60}}?{_FIRST}"
    rf"|{_FIRST}[^.\n]{{0,30}}?\b(?:too|also|as well)\b))"
)
"""What people say of a program that uses the first GPU beside the one that they chose."""

_HELD: Final = r"(?:occupied|taken|in use|used|full|占用?|차지|사용)"
_BEFORE: Final = (
    r"(?:\balready\b|\bby default\b|\bwithout (?:any|a) (?:process|program)"
    r"|\bbefore (?:i |the |any |my )?(?:start|train|run|launch)\w*+"
    r"|已经?|本来就?|默认|이미|기본적으로)"
)
HELD_BEFORE: Final = (
    rf"(?:{_BEFORE}[^.\n。]{{0,30}}?{_HELD}(?=[^.\n。]{{0,40}}(?:memory|메모리|[显内]存))"
    rf"|(?:\b(?:memory|vram)\b|메모리|[显内]存)[^.\n。]{{0,40}}?{_BEFORE} ?{_HELD})"
)
"""What people say of memory that was taken before their program took any."""


class Ledger(Struct, frozen=True):
    """Where memory is, as far as a text says.

    Attributes:
        free_gpu: a GPU that a table shows with no program on it.
        has_others: whether people say that other programs use a GPU, or that one is free.
        is_chosen: whether the shell chose the GPU, which has an effect whatever the program does.
        n_sharing: the most processes of the program that use one GPU at a time, if it is stated; 2
            stands for several.
        has_several: whether the text speaks of several GPUs.
        uses_first: whether the program uses the first GPU beside the one chosen for it.
        held_before: whether memory was taken before the program took any.
        has_room: whether the GPU was far from full by a table or by what people say.
        is_wsl: whether the program runs under WSL.
        needs_host: whether it fails only with what takes the host's memory: more DataLoader
            workers, weights that wait there.
    """

    free_gpu: int | None = None
    has_others: bool = False
    is_chosen: bool = False
    n_sharing: int = 1
    has_several: bool = False
    uses_first: bool = False
    held_before: bool = False
    has_room: bool = False
    is_wsl: bool = False
    needs_host: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether several processes of the program share the only GPU."""
        return self.n_sharing > 1 and not self.has_several
