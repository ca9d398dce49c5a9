"""What a wording is, and how one is found in squeezed text (see ``inputs/log_streams.py``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from decimal import Decimal
from typing import Any, Final, TypeAlias

from fragdoctor.frozen import frozen
from fragdoctor.inputs.log_streams import LogStream
from fragdoctor.model.case import OomMessage

SIZE: Final = (
    r"(?:\d[\d,]{0,30}(?:\.\d{1,12})?(?:bytes?|[kmgtpe]i?bytes?|[kmgtpe]i?b|[kmgt](?![a-z])))"
)
COUNT: Final = r"(?:\d[\d,]{0,30})"
_PARTS: Final = re.compile(r"(\d[\d,]{0,30}(?:\.\d{1,12})?)([a-z]{0,8})", re.ASCII)
_POWERS: Final = {"": 0, "b": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6}
_SOURCE: Final = re.compile(
    r"(?:(?:raise[\w.]{1,60}|print|str|warn|fail|match|startswith|find|search|format)\("
    r"|\.(?:warn|warning|error|info|debug|exception|critical|count|write)\("
    r"|==|!=|\bin|if|elif|or|and|not|return|,|\[|\+)[frbu]{0,2}[\"'`]{1,3}[^\"'`]{0,80}$",
    re.ASCII,
)

Fields: TypeAlias = dict[str, Any]


Refine: TypeAlias = Callable[[Fields, re.Match[str], LogStream], Fields | None]


def printed_bytes(text: str) -> int:
    """Return the bytes of a squeezed, lower-case size: printed decimal times unit, rounded.

    Units are powers of 1024 whatever their spelling; a bare number means bytes.
    """
    match = _PARTS.match(text)
    if match is None:
        msg = f"{text!r} is not a size"
        raise ValueError(msg)
    unit = match.group(2)
    power = 0 if unit.startswith("byte") else _POWERS[unit[:1]]
    return int((Decimal(match.group(1).replace(",", "")) * 1024**power).to_integral_value())


def value_of(name: str, text: str) -> int:
    """Return a named group as the number that the field of that name holds."""
    return printed_bytes(text) if name.endswith("_bytes") else int(text.replace(",", ""))


@frozen
class Hit:
    """A message found at ``start:end`` of a stream's squeezed text.

    Attributes:
        group: hits of the same group that follow each other closely are one failure.
        is_whole: False for a fragment without its beginning.
        is_marker: belongs into the list of markers rather than of messages.
    """

    start: int
    end: int
    message: OomMessage
    group: str = ""
    is_whole: bool = True
    is_marker: bool = False


@frozen
class Wording:
    """One wording of one message.

    Attributes:
        variant: stable name.
        kind, backend, is_device_oom, sub_kind, hint, is_warning: as in ``OomMessage``.
        literal: squeezed lower-case text that every instance holds.
        pattern: matches around the literal; groups named like the fields of ``OomMessage``
            become these fields.
        back: how many characters before the literal the pattern may begin.
        group: see ``Hit``.
        is_marker: see ``Hit``.
        refine: last changes to the fields; None rejects the match.
        may_be_prose: the words also occur in advice and in comments; then the wording counts
            only where the line says that something failed.
    """

    variant: str
    kind: str
    backend: str
    literal: str
    pattern: re.Pattern[str]
    back: int = 0
    is_device_oom: bool = True
    sub_kind: str = ""
    hint: str = ""
    is_warning: bool = False
    group: str = ""
    is_marker: bool = False
    versions: tuple[str, str] = ("", "")
    refine: Refine | None = None
    may_be_prose: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def hits(self, stream: LogStream) -> Iterator[Hit]:
        """Yield the places where this wording stands."""
        text, position = stream.squeezed, 0
        while (found := text.find(self.literal, position)) >= 0:
            position = found + len(self.literal)
            match = self._match_around(text, found)
            if match is None or is_source(stream, match.start()):
                continue
            if self.may_be_prose and not reads_as_failure(stream, match):
                continue
            message = self._message(match, stream)
            if message is not None:
                yield Hit(match.start(), match.end(), message, self.group, is_marker=self.is_marker)
                position = max(position, match.end())

    def _match_around(self, text: str, found: int) -> re.Match[str] | None:
        end = found + len(self.literal)
        for start in range(max(0, found - self.back), found + 1):
            match = self.pattern.match(text, start, found + 1500)
            if match and match.end() >= end:
                return match
        return None

    def _message(self, match: re.Match[str], stream: LogStream) -> OomMessage | None:
        fields: Fields = dict(self.fixed)
        fields |= {k: value_of(k, v) for k, v in match.groupdict().items() if v and k[0] != "_"}
        fields.setdefault("backend", self.backend)
        fields.setdefault("sub_kind", self.sub_kind)
        fields.setdefault("kind", self.kind)
        fields.setdefault("is_device_oom", self.is_device_oom)
        if self.refine is not None:
            refined = self.refine(fields, match, stream)
            if refined is None:
                return None
            fields = refined
        return located(
            OomMessage(
                variant=self.variant,
                version_low=self.versions[0],
                version_high=self.versions[1],
                free_allocated_hint=self.hint,
                **{"is_warning": self.is_warning, **fields},
            ),
            stream,
            match.start(),
            match.end(),
        )


def host_wording(  # noqa: PLR0913 - a row of a table
    variant: str,
    sub_kind: str,
    literal: str,
    pattern: str,
    back: int = 0,
    *,
    group: str = "",
    may_be_prose: bool = False,
    refine: Refine | None = None,
) -> Wording:
    """Return a wording about the host's memory; the pattern may use the short form."""
    return Wording(
        variant,
        "host-ram",
        "cpu",
        literal,
        compile_squeezed(pattern),
        back=back,
        is_device_oom=False,
        sub_kind=sub_kind,
        group=group,
        may_be_prose=may_be_prose,
        refine=refine,
    )


def located(message: OomMessage, stream: LogStream, start: int, end: int) -> OomMessage:
    """Return a message with its line, rank and text."""
    return replace(
        message,
        line=stream.line_at(start),
        rank=stream.rank_at(start),
        intro=stream.intro(start),
        text=stream.text(start, end),
    )


def is_source(stream: LogStream, position: int) -> bool:
    """Return whether a position is inside a string of program text (``raise X("...``)."""
    return bool(_SOURCE.search(stream.before(position, 120)))


_FAILED: Final = re.compile(
    r"(?:error|exception|exception:|failed|failure|fatal|critical|terminate[dr]?|what\(\)|e"
    r"|occurred|caught|cause|reason|message|warn|oom)[:>\])('\"`-]{1,6}[:('\"`]{0,4}$"
)
_RAISED: Final = re.compile(
    r"(?:error|exception):|(?:unableto|couldnot|cannot|can'?t|failedto)[\w.'\"-]{1,60}:$"
    r"|\.(?:py|h|hpp|cc|cpp|cu|cuh|rs|c)[:(]\d{1,6}[:\])]{1,2}$",
    re.ASCII,
)
_ADVICE: Final = re.compile(
    r"(?:errors|can|could|is|are|when|if|while|may|might|usually|often|means|happens|because|due"
    r"|issues?|problems?|error(?:s|can|is|when|if|on|in|while|during)|exceptions?|situations?"
    r"|messages?|killer|protection|handling|handler|retry|reduce|lower|decrease|increase|try|use"
    r"|set|see|check|make|you|this|that|then|please|how|why|what)"
)
_EXPLAINED: Final = re.compile(
    r"(?:if|when|whenever|once|where|that)(?:you|your|it|there|the|one|we|i)(?:r|get|see|hit|run|$)"
    r"|(?:you|we|it|i)(?:may|might|can|could|will)|(?:may|might)(?:get|see|raise|throw|cause)"
    r"|suchas|e\.g\.|forexample|encounter|(?:to)(?:avoid|prevent|fix|solve|handle)|howto"
    r"|(?:if|when)yousee|common(?:errors?|issues?)"
)


def reads_as_failure(stream: LogStream, match: re.Match[str]) -> bool:
    """Return whether a short wording stands where a program reports, not where people explain.

    It does after ``...Error:`` and the like, or alone at the start of a line; never after words
    such as "if you see".
    """
    before = stream.before(match.start(), 80)
    if _EXPLAINED.search(before):
        return False
    # also quoted, and further on in the sentence of another exception
    if _FAILED.search(before) or _RAISED.search(before):
        return True
    if before.strip("\"'`([{>*-:"):
        return False
    return not explains(stream, match)


def explains(stream: LogStream, match: re.Match[str]) -> bool:
    """Return whether words are part of advice or of a talk about failures."""
    after = stream.after(match.end(), 40).lstrip(".'\"`*:,;-")
    return bool(_EXPLAINED.search(stream.before(match.start(), 80)) or _ADVICE.match(after))


def compile_squeezed(pattern: str) -> re.Pattern[str]:
    """Return a pattern for squeezed text; ``SIZE`` and ``COUNT`` in it stand for numbers."""
    named = re.sub(
        r"(?<!P)<(\w+)>", lambda m: f"(?P<{m.group(1)}>{_group_body(m.group(1))})", pattern
    )
    return re.compile(named.replace("SIZE", SIZE).replace("COUNT", COUNT), re.ASCII)


def _group_body(name: str) -> str:
    if name.endswith("_bytes"):
        return SIZE
    return r"\d{1,4}" if name == "device_index" else COUNT


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
