"""Reads a question in words, ``can I fine-tune Llama 3 8B with QLoRA on a 3090?``, as options.

Words that name the model and the GPU are found first, then phrases from a table. The report lists
words as not read if they became no option and are not just ordinary English.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from fragdoctor.errors import ConfigError, InputError
from fragdoctor.estimation.measures import LORA_RANK
from fragdoctor.estimation.model_names import is_of_llama_cpp, is_series, stored_in
from fragdoctor.estimation.model_shapes import is_model_name, preset_of, presets, unknown_model
from fragdoctor.estimation.serving import UTILIZATION
from fragdoctor.estimation.training_choices import PRECISIONS, optimizer_of
from fragdoctor.model.gpus import SIZED, counted, gpu_of, known_gpu

_MOST_WORDS: Final = 40
_LONGEST: Final = 64
_MOST_IN_NAME: Final = 6


_FORMAT: Final = re.compile(r"[-_.]((?:gguf|i?q\d(?:_\w+)?)(?=[\s.]|$))", re.IGNORECASE | re.ASCII)
"""A format of llama.cpp at the end of a name."""


class Asked(Struct, frozen=True):
    """What a question means.

    Attributes:
        model: the model's name as a command takes it, or "" if only its size was stated.
        options: parameters of ``fragdoctor estimate`` and their values.
        notes: what was assumed, and which words were not read.
    """

    model: str
    options: Mapping[str, Any]
    notes: Sequence[str]


def is_question(inputs: Sequence[str]) -> bool:
    """Return whether inputs are a question in words, not files and not the name of a model."""
    text = " ".join(inputs).strip()
    if " " not in text or re.search(r"\.[a-z]{2,11}$", text.lower()):
        return False
    if any(map(os.path.exists, inputs)):
        return False
    return not (is_model_name(text) and preset_of(text))


def read_question(text: str) -> Asked:
    """Return what a question in words means.

    Raises:
        InputError: the question names no known model.
    """
    spaced = _FORMAT.sub(r" \1", re.sub(r"\+|['\u2019]s\b", " ", text)).split()
    stripped = (one[:_LONGEST].strip(",;:?!()'`\"").removesuffix(".") for one in spaced)
    words = [word for word in stripped if word][:_MOST_WORDS]
    named, others = _taken(words, _model)
    if named is None:
        named, others = _taken(words, _misspelled)
    params, stored, guess = "", "", ""
    if named is None or _is_of_another_size(named, others):
        named = None
        found, others = _taken(words, _parameters)
        params, stored = found or ("", "")
        guess = _near(words, params.lower())
        if not params:
            raise _no_model(text.split(), guess)
    # First the phrases, so that their numbers count no GPUs, but without the numbers of GPUs.
    options, text = _phrases(
        " ".join(w + _CARD * (w.isdecimal() and known_gpu(w) is not None) for w in others)
    )
    known, words = _taken(text.replace(_CARD, "").split(), _gpus)
    sized, words = _taken(words, _sizes)  # if a GPU is named too, a size only repeats it
    rest = " ".join(words)
    n, gpu = known or sized or (1, "")
    if params:
        options["params"] = params
    if stored:
        options.setdefault("dtype", stored)
    if gpu:
        options["gpu"] = [gpu]
    notes = _settle(options, n, stored_in(named or ""))
    if formats := list(filter(is_of_llama_cpp, rest.split())):
        named_so, bits = " ".join(formats), 8 if "8" in "".join(formats) else 4
        options.setdefault("dtype", f"int{bits}")
        notes.append(
            f"{named_so} is for llama.cpp, whose memory is not estimated; {bits} bits come close."
        )
    if params and guess:
        said = f"No model of that name is known; a Llama-like one of {params} is counted."
        notes.append(f"{said} {guess}".rstrip())
    unread = [w for w in rest.split() if w not in formats and w.lower() not in _SAYS_NOTHING]
    if unread:
        notes.append(f"Not read: {', '.join(unread)}.")
    return Asked(named or "", options, notes)


def _model(run: str) -> str | None:
    """Return the model that a run of words names, as written if the name says how it is stored.

    Raises:
        InputError: the words name a series of models and no size.
    """
    preset = preset_of(run)
    if preset is None and is_series(run):
        raise InputError(f"{run} is the name of several models.", hint="Add the size to the name.")
    if preset is None or " " in run.rpartition("/")[0]:  # an owner is one word
        return None
    return run if stored_in(run) else preset.name


def _misspelled(run: str) -> str | None:
    """Return the known model whose letters words misspell, or that alone begins with them."""
    said = run.lower().replace(" ", "-")
    if len(said) < _LEAST_OF_NAME:
        return None
    begun = [name for name in presets() if name.startswith(f"{said}-")]
    numbers = re.findall(r"\d+", said)  # another number is another model
    same = [name for name in presets() if re.findall(r"\d+", name) == numbers]
    near = begun if len(begun) == 1 else difflib.get_close_matches(said, same, 1, cutoff=0.9)
    return near[0] if near else None


_LEAST_OF_NAME: Final = 5


_COUNT: Final = re.compile(
    r"(\d{1,4}(?:\.\d{1,2})?[bm])(?:[-_]\S{0,95})?", re.ASCII | re.IGNORECASE
)


_SIZED_NAME: Final = re.compile(rf"(?:\S{{0,95}}[-_])?{_COUNT.pattern}", _COUNT.flags)


def _is_of_another_size(named: str, words: Sequence[str]) -> bool:
    """Return whether the name goes on with another model's size: ``phi-4 reasoner 70B``."""
    after = [*words[words.index(_GAP) + 1 :], "", ""]
    size = after[1] if after[0].lower() not in _SAYS_NOTHING else ""
    found, preset = _COUNT.fullmatch(after[0]) or _COUNT.fullmatch(size), preset_of(named)
    if found is None or preset is None:
        return False
    n = float(found[1][:-1]) * (1e9 if found[1][-1] in "bB" else 1e6)
    return not 0.75 < n / preset.n_parameters < 1.33


def _parameters(word: str) -> tuple[str, str] | None:
    """Return the parameter count that a word states, and how such a model is stored, or ""."""
    found = _SIZED_NAME.fullmatch(word)
    return (found[1].upper(), stored_in(word)) if found else None


def _taken(words: list[str], find: Callable[[str], Any]) -> tuple[Any, list[str]]:
    """Return what the longest run that means something means, and the words with a gap there."""
    for start, end in _runs(words):
        run = words[start:end]
        if _GAP not in run and (found := find(" ".join(run))) is not None:
            return found, [*words[:start], _GAP, *words[end:]]
    return None, words


def _runs(words: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each run of words, the longest runs first."""
    for length in range(min(_MOST_IN_NAME, len(words)), 0, -1):
        for start in range(len(words) + 1 - length):
            yield start, start + length


_CARD: Final = "!"  # ends a number that names a GPU, so that no phrase takes its number
_GAP: Final = ";"  # replaces words that were taken out, so that no phrase matches across them


def _gpus(run: str) -> tuple[int, str] | None:
    """Return how many GPUs a run of words means, and their name for ``--gpu``."""
    n, one = counted(run)
    found = known_gpu(one)
    return (n, found.name) if found else None


def _sizes(run: str) -> tuple[int, str] | None:
    """Return how many GPUs of one size a run of words means, and that size."""
    n, one = counted(run)
    return (n, gpu_of(one).name.replace(" ", "")) if SIZED.fullmatch(one.lower()) else None


def _says(pattern: str, **options: Any) -> tuple[re.Pattern[str], Mapping[str, Any]]:
    """Return a phrase and the options that it stands for; ``int`` is the number in the phrase."""
    return re.compile(rf"(?<!\S)(?:{pattern})(?!\S)", re.IGNORECASE | re.ASCII), options


def _number(match: re.Match[str]) -> int:
    """Return the number in a phrase; ``k`` stands for 1,024."""
    text = next(group for group in match.groups() if group).lower()
    return int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)


_N: Final = r"([1-9]\d{0,6}k?)"
_IS: Final = r"(?: of| is| =|=|:)? ?"
_QUANTIZED: Final = r"(?:[ -]quanti[sz]\w{1,8})?"
_PHRASES: Final = (
    _says(rf"(?:lora )?(?:rank|r)(?:{_IS}){_N}", lora=int),
    _says(rf"(?:micro )?(?:batch(?:[ _-]?size)?|bs|bsz){_IS}{_N}", batch=int),
    _says(
        rf"(?:-{{0,2}}max[ _-])?(?:model[ _-])?(?:seq(?:uence)?(?:[ _-]?len(?:gth)?)?|len(?:gth)?"
        rf"|ctx|tokens|context(?:[ _-](?:len(?:gth)?|window|size))?){_IS}{_N}",
        seq=int,
    ),
    _says(rf"accumulation{_IS}{_N}", grad_accumulation=int),
    _says(rf"(?:tensor[ -]parallel(?:ism)?|tp){_IS}{_N}", n_gpus=int),
    _says(
        rf"{_N} ?-?(?:tokens?|ctx|seq(?:uence)?s?|context(?: (?:len(?:gth)?|window))?)"
        rf"|{_N} (?:sequence |context )(?:len(?:gth)?|window)",
        seq=int,
    ),
    _says(rf"{_N} (?:accumulation|accumulated) steps", grad_accumulation=int),
    _says(rf"{_N} ?x? ?(?:gpus|(?:graphics )?cards)", n_gpus=int),
    _says(
        r"8[ -]?bit (?:adamw?|optimi[sz]er)|(?:adamw?|optimi[sz]er)[ -]?8[ -]?bit",
        optimizer="adamw-8bit", trains=True,
    ),
    _says("qlora", lora=LORA_RANK, dtype="int4"),
    _says("dora", lora=LORA_RANK, dora=True),
    _says("lora|peft|adapters?", lora=LORA_RANK),
    _says("awq", dtype="awq"),
    _says("gptq", dtype="gptq"),
    _says(rf"4[ -]?bits?{_QUANTIZED}|int4|nf4|bnb", dtype="int4"),
    _says(rf"8[ -]?bits?{_QUANTIZED}|int8", dtype="int8"),
    _says("fp8", dtype="fp8-weights"),
    _says(r"(?:deepspeed )?zero[ -]?(?:stage )?([0-3])", zero=int, dtype="deepspeed-bf16"),
    _says("deepspeed", dtype="deepspeed-bf16"),
    _says("amp|mixed[ -]precision|autocast", dtype="amp-bf16"),
    _says("bf16|bfloat16", dtype="bf16"),
    _says("fp16|float16|half(?: precision)?", dtype="fp16"),
    _says("fp32|float32|full precision", dtype="fp32"),
    _says("(?:gradient |activation )?checkpointing", checkpointing="full"),
    _says(r"flash(?:[ -]?att(?:entio)?n)?(?:[ -]?[23])?", attention="flash"),
    _says("fsdp", fsdp=True),
    _says(r"(?:text |sequence )?classif\w{1,9}", logits="none"),
    _says("how many", plan=True),
    _says("vllm", inference=True, gpu_memory_utilization=UTILIZATION),
    _says(
        r"run(?:ning|s)?|serv(?:e|es|ing)|inferences?|infer|inferencing|generat(?:e|es|ing|ion)"
        r"|host(?:ing)?|deploy(?:ing)?|load(?:ing)?|chat",
        inference=True,
    ),
    _says("grpo|rloo|ppo|rlhf|dpo|orpo|kto", trains=True, has_more=True),
    _says(
        r"(?:full )?(?:pre-?|re)?train(?:ing|ed)?|(?:full )?fine[ -]?tu\w{1,6}|(?:full )?s?ft"
        r"|from scratch",
        trains=True,
    ),
)  # fmt: skip
"""The first phrase of the table that matches sets an option; a later one does not change it.
A number belongs to the word before it, if that takes one."""

_SAYS_NOTHING: Final = frozenset(
    f"{_GAP} "
    "a an and any are at batch be big by can card cards could do does doing enough fit fits "
    "for from full fully get give go gpu gpus graphics have how i if in is it just large like "
    "machine make many max me memory mine model much my need needed needs nvidia of on one "
    "only or please possible ram require required requires setup should single size some take "
    "takes tell than that the their there this to train trying use used using video vram want "
    "was we what whats when which will with without work works would you your".split()
)  # fmt: skip


def _phrases(text: str) -> tuple[dict[str, Any], str]:
    """Return what phrases mean, and the text without them."""
    options: dict[str, Any] = {}
    for pattern, meant in _PHRASES:
        for match in pattern.finditer(text):
            for name, value in meant.items():
                options.setdefault(name, _number(match) if value is int else value)
        text = pattern.sub(_GAP, text)
    for word in text.split():
        try:
            options.setdefault("optimizer", optimizer_of(word).name)
        except ConfigError:
            continue
        text = text.replace(word, _GAP, 1)
    return options, text


def _settle(options: dict[str, Any], n_named: int, stored: str) -> list[str]:
    """Fill in what the options of a question leave open, and return what was assumed.

    ``stored`` is the precision that the model's name states.
    """
    n_gpus = max(n_named, options.pop("n_gpus", 1))
    trains = options.pop("trains", False) or not options.keys().isdisjoint(_OF_TRAINING)
    is_said = trains or "inference" in options
    has_more = options.pop("has_more", False)
    options["inference"] = not trains
    if trains or "gpu" not in options:
        options.pop("gpu_memory_utilization", None)
    if n_gpus > 1 or "gpu" not in options:
        options.pop("plan", None)
    if trains and "params" in options:
        options.setdefault("dtype", "bf16")  # as models of such sizes are published
    if trains and options.get("dtype", stored) in _FROZEN:
        options.setdefault("lora", LORA_RANK)
        # As in PEFT's prepare_model_for_kbit_training.
        options.setdefault("checkpointing", "full")
    if n_gpus > 1 and trains:
        options["world_size"] = n_gpus
        if not options.get("fsdp"):
            options.setdefault("zero", 3)
    elif n_gpus > 1:
        options["tensor_parallel"] = n_gpus
    said = 'Training or running was not mentioned, so running is counted; say "train" for training.'
    more = (
        "Its pairs, reference model and generation are not counted, only training on single texts."
    )
    return [more] * has_more if is_said else [said]


_OF_TRAINING: Final = frozenset(
    ("lora", "optimizer", "checkpointing", "fsdp", "zero", "grad_accumulation")
)
_FROZEN: Final = frozenset(
    name for name, precision in PRECISIONS.items() if not precision.trains_base
)
"""Precisions whose weights cannot be trained, only adapters next to them."""


def _near(words: Sequence[str], size: str) -> str:
    """Return a sentence on known models of a size with names like the words, or ""."""
    names = [name for name in presets() if not size or size in name.split("-")]
    runs = (" ".join(words[start:end]).lower() for start, end in _runs(words))
    near = [name for run in runs for name in difflib.get_close_matches(run, names, cutoff=0.7)]
    return f"Similar are {', '.join(dict.fromkeys(near[:3]))}. " if near else ""


def _no_model(words: Sequence[str], guess: str) -> InputError:
    """Return the error for words that name no known model."""
    for word in words:
        if is_of_llama_cpp(word) or re.fullmatch(r"[\w.-]+/[\w.-]*[-\d][\w.-]*", word):
            return unknown_model(word)
    return InputError(
        "Those words name no local file and no known model.",
        hint=f"{guess}Check the path, or see: fragdoctor estimate --list-models. A message goes to "
        "fragdoctor oom.",
    )
