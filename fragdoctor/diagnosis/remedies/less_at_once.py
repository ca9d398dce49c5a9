"""What to make smaller if neither a trace nor a traceback says it: one order for all texts.

What the text tells decides: whether the program trains or only runs a model, what its samples are,
its batch, what is in use or was tried already, and whose options it has.
"""

from __future__ import annotations

from typing import Final

from fragdoctor.diagnosis.remedies.framework_words import (
    less_of_counted,
    words_in,
    words_together,
)
from fragdoctor.diagnosis.remedies.remedy import JudgedCase
from fragdoctor.lazy import regex
from fragdoctor.model.case import IMAGES, SEQUENCES
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.frameworks import INTERFACES, Change
from fragdoctor.model.measures import ADAPTER, BITS_4, BITS_8, HALF, OFFLOADING, STATE_8BIT
from fragdoctor.rules.told_weights import named_card_bytes, told_weights
from fragdoctor.rules.traceback_signs import CALLS_OF_LIBRARIES
from fragdoctor.trace.stacks import PACKAGE, classify_file

OF_IMAGES: Final = (
    "lower the batch size, or use smaller crops or images: half the side takes a quarter of the "
    "memory (an eighth in 3D); to predict whole images, use tiles or a sliding window with an "
    "overlap"
)
HALF_SIDES: Final = (
    "train on crops of half the side, which take a quarter of the memory (an eighth in 3D)"
)
HALVES: Final = (
    "halve the batch until a step fits, and accumulate gradients over twice as many steps each "
    "time, which keeps the effective batch"
)
ANY_BATCH: Final = (
    "lower the batch size, or make each sample smaller: shorter sequences, smaller images, fewer "
    "frames"
)
ONE_INPUT: Final = "a smaller image or tiles of it, fewer frames or points, a shorter text or audio"
NO_HELP: Final = "a smaller batch did not help"
LESS_STATE: Final = (HALF, ADAPTER, STATE_8BIT)
CHECKPOINTED: Final = (
    "turn on activation checkpointing (an option such as gradient_checkpointing), or call each "
    "block through torch.utils.checkpoint"
)
PARTS: Final = {IMAGES: " (or tiles of them)", SEQUENCES: " (and a lower max_new_tokens)"}
"""How else a model that only runs can be given less of what it runs on."""
OF_SMALL_MODELS: Final = regex(r"^fewer (?!frames)|patches")
"""Samples of models whose weights are small beside what they compute."""
ROOM: Final = (
    "give from_pretrained() a max_memory for each GPU, a few GiB below its size and the lowest for "
    "the first, or device_map='balanced_low_0': the weights are placed before anything is "
    "computed, and take what they may"
)
_PLACED: Final = regex(r"(?is)\A(?=.*\bgpus\b|.*\bmulti-?gpu).*device[ _]?map")
OFFLOADED: Final = "idle parts on the CPU (an option such as --offload or --lowvram)"
_OF_MODEL: Final = regex(r"(?i)\bmodels?\b|\binference\b|\bgenerat|\bpipeline|模型|推理")
_COMMAND: Final = regex(r"\bpython3? \S{1,80}\.py\b[^\n]{0,80}? --[a-z]")
_OWN_CODE: Final = regex(
    r"\bimport torch\b|\bdef \w{1,40}\(|\b\w{0,40}model\(|\.(?:eval|cuda|to)\("
)


LOADED_IN: Final = {
    BITS_4: "",
    BITS_8: "load the weights in 4 bits, or ",
    HALF: "load the weights in 8 or 4 bits, or ",
}
"""How weights take fewer bits, by the fewest that a text has in use."""


def speaks_of_model(case: JudgedCase) -> bool:
    """Return whether a text is about a model or its inputs, and not about any program."""
    message = case.message
    said = message is not None and _OF_MODEL.search(message.said) is not None
    return said or bool(case.told.smaller_samples)


def fewer_bytes(case: JudgedCase) -> str:
    """Return how weights that only run take less of the GPU, without what the text has in use."""
    is_offloaded = OFFLOADING in case.told.in_use or _is_of_own_code(case)
    if any(map(OF_SMALL_MODELS.search, case.told.smaller_samples)):
        return "run it in 16 bits (torch.autocast), or on the CPU"
    held = next((bits for bits in LOADED_IN if bits in case.told.in_use), "")
    fewer = LOADED_IN.get(held, "load the weights in 16, 8 or 4 bits, or ")
    ways = [f"{fewer}use a smaller model"]
    if not is_offloaded:
        ways.append(f"keep {OFFLOADED}")
    return "; ".join(ways)


def _is_of_own_code(case: JudgedCase) -> bool:
    """Return whether the text shows code or calls, which have no options of a program."""
    message = case.message
    if message is None or _COMMAND.search(message.said):
        return False
    return any(f.file for f in message.frames) or _OWN_CODE.search(message.said) is not None


GRADIENTS_OFF: Final = "Turn off gradients"
_OFF: Final = regex(
    rf"no_grad|inference_mode|set_grad_enabled|enable_grad|\b(?:generate|pipe(?:line)?)\("
    rf"|{CALLS_OF_LIBRARIES}"
)


def without_graph(case: JudgedCase) -> str:
    """Return how to keep no graph if the user's own code runs a model and shows no sign of that.

    The decorator of torch.no_grad() leaves a frame of its own, and a ``with`` block none.
    """
    message, r = case.message, case.failed_request
    if message is None or case.trains or case.frameworks or not _is_of_own_code(case):
        return ""
    if r is not None and r.is_alone_too_large:
        return ""
    if any(classify_file(frame.file) == PACKAGE for frame in message.frames):
        return ""  # a library that runs its models as it should
    calls = (f"{frame.function} {frame.code}" for frame in message.frames)
    if any("decorate_context" in call or _OFF.search(call) for call in (message.said, *calls)):
        return ""
    return "put torch.no_grad() around the call if it is not there (model.eval() keeps the graph)"


SMALL_SHARE: Final = 0.02
"""A model that runs makes temporaries of a layer: where one is a smaller part of what is held, the
weights hold the rest."""
_OF_WEIGHTS: Final = regex(
    r"(?i)模型(?:太|过|很)大|\bmodel (?:is |was )?(?:too|so|very) (?:big|large)\b|加载\S{0,6}模型"
    r"|\b(?:load|loading|loads) (?:\w+ ){0,3}(?:models?|weights|checkpoint)\b"
)


def is_full_of_weights(case: JudgedCase) -> bool:
    """Return whether weights fill the GPU of a model that only runs.

    The request is small beside what is held; or the text has done something about the weights, or
    speaks of their size.
    """
    r, message = case.failed_request, case.message
    if message is None or case.trains or case.cause is not Cause.CAPACITY:
        return False
    if r is not None and r.live_bytes:
        is_one = (case.told.batch_size or 1) == 1
        return is_one and r.requested_bytes < SMALL_SHARE * r.live_bytes
    is_lowered = not {BITS_8, OFFLOADING}.isdisjoint(case.told.in_use)
    return is_lowered or _OF_WEIGHTS.search(message.said) is not None


def less_to_run(case: JudgedCase) -> tuple[str, str]:
    """Return a title and the change for a model that only runs: less input, less of the model."""
    graph = without_graph(case)
    is_full = not graph and is_full_of_weights(case)
    title = "Keep less of the model on the GPU" if is_full else "Use smaller inputs"
    if graph:
        title = GRADIENTS_OFF
    in_interface = any(f.name in INTERFACES for f in case.frameworks)
    scores = (Change.ATTENTION,) if in_interface and case.asks_for_large_share else ()
    placed = case.message is not None and _PLACED.search(case.message.said)
    if placed and "max-memory" not in case.told.options:
        return "Leave room on each GPU for what is computed", f"{ROOM}; {fewer_bytes(case)}"
    all_ways = (Change.BATCH, *scores, Change.WEIGHTS)
    ways = (Change.WEIGHTS, Change.BATCH) if is_full else all_ways
    own = words_in(case, Change.EVALUATION_BATCH) or words_together(case, *ways)
    if own:
        return title, own
    less = " or ".join(f"{s}{PARTS.get(s, '')}" for s in case.told.smaller_samples) or ONE_INPUT
    weights = words_in(case, Change.WEIGHTS) or fewer_bytes(case)
    counted = less_of_counted(case)
    less = f"use {less}{counted and f': {counted}'}"
    if (case.told.batch_size or 1) > 1:
        less = f"lower {case.told.batch_option} from {case.told.batch_size}; {less}"
    else:
        less = f"{less}; process one input at a time"
    ways = (weights, less) if is_full else (graph, less, weights)
    return title, "; ".join(filter(None, ways))


def less_of_batch(case: JudgedCase) -> tuple[str, str]:
    """Return a title and the change, by what the text says of a batch.

    The text's own option is named with its value, unless a framework's words name it.
    """
    told = case.told
    if told.batch_cannot_shrink:
        return _less_of_one(case, "the batch is already one" if told.batch_size == 1 else NO_HELP)
    if _names_big_model(case):
        return less_to_run(case)
    less = "" if case.runs_only else " or ".join(told.smaller_samples)
    is_sized = told.batch_size is not None
    if counted := less and less_of_counted(case):
        if not is_sized:
            return f"Use {less} at a time", counted
        return f"Use {less}, or lower {told.batch_option} from {told.batch_size}", counted
    change = ANY_BATCH
    if not words_in(case, Change.BATCH):
        if less == IMAGES:
            change = OF_IMAGES
        elif case.trains and (less or is_sized):
            change = HALVES
    batch = (
        f"Lower {told.batch_option} from {told.batch_size}, or use"
        if is_sized
        else "Use a smaller batch or"
    )
    return f"{batch} {less or 'smaller inputs'}", change


def _names_big_model(case: JudgedCase) -> bool:
    """Return whether a text is about the weights of a model that runs."""
    r, message = case.failed_request, case.message
    is_of_batch = case.trains or bool(words_in(case, Change.BATCH))
    is_bare = r is None or r.live_bytes is None
    if not is_bare:  # whoever names the card speaks of what a model needs of it
        is_bare = speaks_of_model(case) and named_card_bytes(message.said if message else "") != 0
    return is_bare and not is_of_batch and is_full_of_weights(case)


def _less_of_one(case: JudgedCase, since: str) -> tuple[str, str]:
    """Return title and change for a batch that cannot shrink, without what is in use already."""
    samples = ", ".join(case.told.smaller_samples) or ONE_INPUT
    if counted := less_of_counted(case):
        samples = f"{samples}: {counted}"
    if not case.trains:
        weights = words_in(case, Change.WEIGHTS) or fewer_bytes(case)
        graph = without_graph(case)
        title = GRADIENTS_OFF if graph else f"Use less for one sample: {since}"
        return title, f"{graph and f'{graph}; '}use {samples}; then {weights}"
    # What is trained from scratch has no adapter.
    is_tuned = bool(told_weights(case.message) or case.frameworks or SEQUENCES in samples)
    left = ", ".join(
        way
        for way in LESS_STATE
        if way not in case.told.in_use and (is_tuned or way is not ADAPTER)
    )
    state = (
        words_in(case, Change.OFFLOAD_STATE, Change.WEIGHTS) or left or "keep less of it on the GPU"
    )
    less = f"shrink weights and state: {state}"
    change = f"use {samples}; then {less}"
    if case.is_checkpointed:
        return f"Use less for one sample: {since}", change
    words = words_in(case, Change.CHECKPOINT)
    if IMAGES in case.told.smaller_samples and not words:  # a crop takes no change of the model
        title = f"Use smaller crops or images: {since}"
        return title, f"{HALF_SIDES}; then {CHECKPOINTED}; then {less}"
    if case.asks_for_large_share:
        return f"Use less for one sample: {since}", change
    return f"Turn on activation checkpointing: {since}", f"{words or CHECKPOINTED}; also {change}"
