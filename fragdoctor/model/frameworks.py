"""How each framework spells a change that saves memory.

The table in ``frameworks.txt`` serves the advice for recordings, messages and rehearsals. A
framework is recognized by its own files in stacks. Option names are those of the version in its
``source``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final


class Change(StrEnum):
    """A change that frameworks have a name for."""

    BATCH = "batch"
    ACCUMULATE = "accumulate"
    EVALUATION_BATCH = "evaluation-batch"
    CHECKPOINT = "checkpoint"
    BF16 = "bf16"
    BF16_PARAMETERS = "bf16-parameters"
    FUSED = "fused"
    STATE_8BIT = "state-8bit"
    OFFLOAD_STATE = "offload-state"
    LOSS = "loss"
    GATHER = "gather"
    ATTENTION = "attention"
    WEIGHTS = "weights"
    SHARE = "share"
    COPIES = "copies"
    HOST_MEMORY = "host-memory"
    FSDP = "fsdp"
    ZERO = "zero"
    TENSOR_PARALLEL = "tensor-parallel"


HAVE_FUSED: Final = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers of ``torch.optim`` with ``fused=True`` (torch 2.13); their files have these names."""

HAVE_FOREACH: Final = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
)
"""Optimizers with ``foreach``, which makes lists of temporaries, but without ``fused`` (2.13)."""


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework and how it spells changes.

    Attributes:
        name: name as people write it.
        key: name in a rehearsal's traits, "" if a rehearsal does not recognize the framework.
        files: pattern to search for in the paths of frames, with ``/`` between their parts.
        logs: pattern to search for in the lines of a log and in what people write: the framework's
            name, lines and options.
        words: the words for each change, and for calls that only this framework makes or makes in
            its own way, by the names of their signs. In ``ACCUMULATE``, ``{n}`` micro-batches of
            size ``{batch}`` make a step; in ``TENSOR_PARALLEL``, ``{n}`` is the number of GPUs.
    """

    name: str
    words: Mapping[str, str]
    source: str
    files: str
    key: str = ""
    logs: str = ""

    def is_named(self, said: str) -> bool:
        """Return whether a text names it; a Latin word ends where another script begins."""
        return bool(said and self.logs) and re.search(self.logs, said, re.ASCII) is not None


PATTERNS: Final = ("files", "logs")
"""Keys of a table whose texts are regular expressions."""


def read_table(file: str) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yield the entries of a table in this folder, each with the lines of its texts by their keys.

    A name stands at the left edge, a key is indented by two blanks, and further lines by four.
    """
    texts: dict[str, list[str]] = {}
    name = key = ""
    lines = Path(__file__).with_name(file).read_text("utf-8").splitlines()
    for line in [*(line for line in lines if line and not line.startswith("#")), ""]:
        if line.startswith("    "):
            texts[key].append(line[4:])
        elif line.startswith("  "):
            key, _, text = line[2:].partition(": ")
            texts[key] = [text]
        else:
            if name:
                yield name, texts
            name, texts = line, {}


VLLM_LOG: Final = r"\b(?:INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[?\w{1,40}\.py:\d"
"""How each line of vLLM's log begins (logging_utils/formatter.py), whichever file wrote it."""


def _frameworks() -> Iterator[Framework]:
    for name, lines in read_table("frameworks.txt"):
        texts = {key: ("" if key in PATTERNS else " ").join(lines[key]) for key in lines}
        texts["logs"] = texts.get("logs", "").replace("VLLM_LOG", VLLM_LOG)
        own = {key: texts.pop(key) for key in ("source", "files", "key", "logs") if key in texts}
        yield Framework(name, texts, **own)


FRAMEWORKS: Final = tuple(_frameworks())


SERVERS: Final = ("vLLM", "SGLang", "TGI")
"""Frameworks that set memory aside themselves, by their own options."""

INTERFACES: Final = ("ComfyUI", "Stable Diffusion web UI", "text-generation-webui")
"""Frameworks in which people run models, and some train them by extensions."""

OWN_LOOPS: Final = (
    "verl",
    "TRL",
    "Trainer",
    "Megatron",
    "Ultralytics",
    "sd-scripts",
    "AI Toolkit",
    "Splatfacto",
    "Gaussian splatting",
    "Detectron2",
    "OpenMMLab",
    "ESPnet",
    "nnU-Net",
)
"""Frameworks that run the training loop themselves, and keep no losses with their graph."""

RUN_ONLY: Final = (
    *SERVERS,
    *INTERFACES,
    "Segment Anything",
    "Real-ESRGAN",
)
"""Frameworks that only run trained models: without another framework, nothing keeps activations."""


def frameworks_in(paths: Iterable[str], said: str = "") -> tuple[Framework, ...]:
    """Return the frameworks seen in paths of frames or in a log, in the order of the table.

    If there are several servers, only the one that called the others counts. ``paths`` are
    outermost first.
    """
    distinct = dict.fromkeys(path[:1000].replace("\\", "/") for path in paths)
    found = [
        f
        for f in FRAMEWORKS
        if any(re.search(f.files, path) for path in distinct) or f.is_named(said)
    ]
    servers = [f for f in found if f.name in SERVERS]
    for path in distinct if len(servers) > 1 else ():
        runs = next((f for f in servers if re.search(f.files, path)), None)
        if runs is not None:  # SGLang calls vLLM's layers; its own frames come first
            return tuple(f for f in found if f is runs or f not in servers)
    return tuple(found)


def words_for(frameworks: Iterable[Framework], *changes: str | None) -> tuple[str, str] | None:
    """Return (framework, words) for the first change that a framework has, or None."""
    known = tuple(frameworks)
    found = ((f.name, f.words[c]) for c in changes if c for f in known if c in f.words)
    return next(found, None)


def words_of(key: str, change: Change) -> str:
    """Return the words of a framework by the key that a rehearsal found, or ""."""
    return next((f.words.get(change, "") for f in FRAMEWORKS if key and f.key == key), "")
