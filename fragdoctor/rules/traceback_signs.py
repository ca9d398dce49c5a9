"""What calls in a traceback say about a failure: a table of signs.

A sign is a call of a library that is known to need memory of its own: saving, loading, gathering,
assigning. Advice that fits the call outweighs advice that fits any failure. The innermost call
that is a sign counts; if it matches several signs, the first in the table counts.
The comment in a row says which libraries, versions and files its names come from.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

from msgspec import Struct

from fragdoctor.lazy import regex
from fragdoctor.model.case import KEPT_MEMORY, TRAINING, OomMessage, TracebackFrame
from fragdoctor.model.engines import engine_of, is_of_other_program, is_told_of_nobody
from fragdoctor.model.frameworks import RUN_ONLY, VLLM_LOG, Change, frameworks_in
from fragdoctor.model.growth_words import GROWS, KEPT
from fragdoctor.model.ledger import ON_FIRST


class Place(Struct, frozen=True):
    """A condition for frames of a library that are a sign: all given attributes must match.

    Attributes:
        file: pattern to search for in the path, with ``/`` before and between its parts.
        functions: names of functions, separated by spaces.
        named: pattern to search for in the function's name.
        code: pattern to search for in the source line.
        is_last: match only the innermost frame; further out, a callee may need the memory.
    """

    file: str = ""
    functions: str = ""
    named: str = ""
    code: str = ""
    is_last: bool = False

    def matches(self, frame: TracebackFrame) -> bool:
        """Return whether a frame is at this place."""
        return (
            (not self.file or _search(self.file, "/" + frame.file.replace("\\", "/")))
            and (not self.functions or frame.function.rpartition(".")[2] in self.functions.split())
            and (not self.named or _search(self.named, frame.function))
            and (not self.code or _search(self.code, frame.code))
        )


class TracebackSign(Struct, frozen=True):
    """A call that is known to need memory of its own, and what helps there.

    Attributes:
        name: stable name.
        doing: what the program was doing, as part of a sentence: "while ...".
        is_of_model: whether its memory grows with the model (weights, state, what a server
            reserves), which no smaller batch makes smaller.
        is_of_batch: whether its memory grows with the batch; one sample alone may be too large for
            any other sign.
        title, change, why: as in ``Recommendation``.
        title_in_framework: the title if a framework's words are the change, "" if it is the same.
        places: the frames that show it.
        spelled: the same change in ``model/frameworks.py``, whose words are used for a framework
            that has none under the sign's name.
        intro: pattern to search for in the message, its line and the lines right above if no
            frame is a sign.
        in_words: pattern to search for in the same lines if no call is a sign.
        in_code: what code in the text keeps that shows it, as a name of ``QuotedCode``.
        is_training: whether it may be a training step, which keeps its activations.
        is_surrounding: whether it describes what the call was part of, which counts only if no
            place is a sign.
        can_leave_gpu: whether the call can run on the CPU, which helps whoever fills the GPU.
        kinds: the kinds one of which the message must have; empty for any.
        unless: frames that contradict it anywhere in the traceback: what runs a backward pass is
            training, whatever its caller's name.
    """

    name: str
    doing: str
    title: str
    change: str
    why: str
    is_of_model: bool = False
    is_of_batch: bool = False
    places: Sequence[Place] = ()
    spelled: Change | None = None
    title_in_framework: str = ""
    intro: str = ""
    in_words: str = ""
    in_code: str = ""
    is_training: bool = True
    is_surrounding: bool = False
    can_leave_gpu: bool = False
    kinds: Sequence[str] = ()
    unless: Sequence[Place] = ()

    def is_named_by(self, function: str) -> bool:
        """Return whether a function is one of its places, whatever its file is."""
        return any(
            function in p.functions.split() or (p.named and _search(p.named, function))
            for p in self.places
        )

    def matches(self, frame: TracebackFrame, *, is_last: bool = True) -> bool:
        """Return whether a frame is one of its places."""
        return any(p.matches(frame) and (is_last or not p.is_last) for p in self.places)


def _search(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.ASCII) is not None


def sign_of(message: OomMessage | None) -> TracebackSign | None:
    """Return what shows at which moment a program failed, or None; the strongest source decides.

    These are the frames of the traceback, what programs print, functions that a text names, and
    the words that people use.
    """
    if message is None or message.kind in ("negative", "host-ram"):
        return None
    tables = [
        [
            s
            for s in table
            if (not s.kinds or message.kind in s.kinds) and not _is_contradicted(s, message)
        ]
        for table in (_PLACES, _SURROUNDINGS, _LAST)
    ]
    # No call is known, so look for the words that people use, which are about other programs, too,
    # and about loading and saving, though the calls show a step.
    is_of_engine = engine_of(message) is not None
    is_step = is_in_backward_pass(message) or is_seen_to_grow(message)
    told = [
        s
        for signs in tables
        for s in signs
        if not (is_step and s.is_of_model and not s.is_surrounding)
    ]
    by_words = (s for s in told if s.in_words and not is_of_engine)
    by_words = (
        s
        for s in by_words
        if _search(s.in_words, message.said) or (s.name == LATE and n_steps_passed(message) > 1)
    )
    in_words = next((s for s in by_words if not _is_of_serving(s, message)), None)
    for signs in tables:
        if signs is tables[-1] and in_words is not None and in_words.is_surrounding:
            break  # that a model runs says less than that memory grows, or that the same ran before
        inner = enumerate(reversed(message.frames))
        at = (s for n, frame in inner for s in signs if s.matches(frame, is_last=not n))
        above = (s for s in signs if s.intro and _search(s.intro, message.said))
        coded = (s for s in signs if s.in_code and getattr(message.code, s.in_code))
        found = next(at, None) or next(above, None) or next(coded, None)
        if found is not None:
            return found
    named = _named_functions(message)
    by_name = (s for s in told if any(map(s.is_named_by, named)))
    return next((s for s in by_name if not _is_of_serving(s, message)), in_words)


def _is_of_serving(sign: TracebackSign, message: OomMessage) -> bool:
    """Return whether a sign is of an evaluation, but all frameworks only run models."""
    if sign.name != EVALUATION:
        return False
    found = frameworks_in((frame.file for frame in message.frames), message.said)
    return bool(found) and all(f.name in RUN_ONLY for f in found)


def _named_functions(message: OomMessage) -> list[str]:
    """Return functions that a text names (``_make_state()``)."""
    return re.findall(_FUNCTION, message.said, re.ASCII)


_FUNCTION: Final = r"(?<![\w/-])(?:\w{1,30}\.){0,3}(_{0,2}[a-z]{1,30}(?:_[a-z0-9]{1,30}){1,6})\(\)"


def is_seen_to_grow(message: OomMessage) -> bool:
    """Return whether code, or what people said, shows that memory grew from step to step."""
    return bool(message.code.kept) or _search(rf"(?i){_GROWS}", message.said)


def is_in_backward_pass(message: OomMessage) -> bool:
    """Return whether the traceback of a message shows a backward pass."""
    return any(map(_BACKWARD.matches, message.frames))


def is_in_training_step(message: OomMessage) -> bool:
    """Return whether the traceback of a message shows a step of training."""
    return any(_BACKWARD.matches(f) or _TRAINS.matches(f) for f in message.frames)


def server_start_in(functions: Collection[str]) -> TracebackSign | None:
    """Return the sign of a server's first step, before its cache, if a stack shows it."""
    sign = next(sign for sign in SIGNS if sign.name == SERVER_START)
    has_cache = any(not set(p.functions.split()).isdisjoint(functions) for p in sign.unless)
    return sign if any(map(sign.is_named_by, functions)) and not has_cache else None


def is_at_first_call(message: OomMessage) -> bool:
    """Return whether the call that failed is the program's first of CUDA, which makes a context."""
    return bool(message.frames) and any(p.matches(message.frames[-1]) for p in _FIRST_CALLS)


def n_steps_passed(message: OomMessage) -> int:
    """Return the highest step that bars and lines of a log show around a failure."""
    return max((int(n) for m in _PASSED.finditer(message.said) for n in m.groups() if n), default=0)


_PASSED: Final = regex(
    r"(?i)(?<!\w)(?<!shards: )(?<!loading )(?!100)\d{1,3}%\|[^|%]{0,300}\| {0,4}(\d{1,9})/\d+ \[\d"
    r"|\b(?:step|iter(?:ation)?|(?<=\d, )it)\b['\"]?[ :=\[(#]{1,4}(\d{1,9})\b(?=/\d|.{0,200}?loss)"
)
"""How bars and lines of a log show steps that were taken: what all steps need does fit."""


def shows_sign(message: OomMessage, *names: str) -> bool:
    """Return whether the sign of a message has one of these names."""
    sign = sign_of(message)
    return sign is not None and sign.name in names


def is_seen_to_fail_late(message: OomMessage) -> bool:
    """Return whether people said that steps went well before the one that failed."""
    return shows_sign(message, LATE)


_FIRST_CALLS: Final = (
    # torch 1.0 to 2.13, torch/cuda/__init__.py and random.py
    Place(
        file=r"/torch/cuda/(?:__init__|random)\.py$",
        functions="_lazy_init _lazy_call set_device manual_seed manual_seed_all seed_all",
    ),
    Place(code=r"\btorch\.(?:cuda\.)?(?:manual_seed(?:_all)?|set_device)\("),
    # a tensor of a stated shape: with a context, the allocator's message would have figures
    Place(
        code=r"\btorch\.(?:cuda\.)?[A-Za-z]{4,11}\([\d\[(][\d\[\]()., ]{0,16}(?:\)\.|, ?device=)"
    ),
)
_BACKWARD: Final = Place(code=r"\.backward\(")
_TRAINS: Final = Place(named=r"(?i)train|^(?:fit|closure)$")
_LOADS_ADAPTER: Final = Place(
    functions="load_adapter load_peft_weights merge_and_unload merge_adapter "
    "_unload_and_optionally_merge merge_lora _merge_lora"
)
_PAIRS: Final = (
    r"(?:(?:dist(?:ances?)?|adj(?:acency)?|affinity|similarity)_?mat(?:rix)?"
    r"|pair(?:wise)?_?dist(?:ance)?s?|(?:compute|calc|get)\w*_dist(?:ance)?s)"
)
_UNPACKS_RESULTS: Final = Place(functions="all_gather gather", code=r"\bloads?\(")
_PASTES: Final = Place(
    functions="_do_paste_mask paste_masks_in_image get_seg_masks prep_display prep_metrics"
)


def _is_contradicted(sign: TracebackSign, message: OomMessage) -> bool:
    """Return whether a message contradicts a sign.

    If one tensor is larger than the device, its own size is the problem, not the batch of the
    surrounding code. Growth over many steps makes the last small request fail, not a large one.
    """
    is_step = not sign.is_training and is_in_backward_pass(message)
    # People who train may quote a part of their code.
    is_part = sign.name == INFERENCE and message.code.unused_graph and message.is_of_training
    is_excluded = any(p.matches(frame) for p in sign.unless for frame in message.frames)
    # A program that has run out of memory may keep it only because of that.
    is_after = sign.name == KEPT_IN_USE and message.sub_kind != KEPT_MEMORY
    if is_step or is_part or is_excluded or is_after:
        return True
    is_by_words = sign.name == INFERENCE or (sign.name == LOADING_WEIGHTS and not message.frames)
    if is_by_words and is_of_other_program(message) and not is_told_of_nobody(message):
        return True  # it has options of its own
    named = "|".join(name for place in sign.unless for name in place.functions.split())
    if named and _search(rf"\b(?:{named})\b", message.said):
        return True  # found in lines that no longer have the form of a traceback
    share = (message.requested_bytes or 0) / (message.total_bytes or float("inf"))
    if sign.name == LOADING_WEIGHTS and share > 1 and not any(f.file for f in message.frames):
        return True  # weights come one tensor at a time
    is_of_history = sign.name in (GROWTH, LATE)
    if is_of_history and share > LARGE_SHARE:
        return True
    is_beyond = share > 1
    return is_beyond and sign.is_surrounding and sign.is_of_batch


_INFERS: Final = "(?:infer|predict|generate|sample|detect|upscale|transcribe|render)"
"""Names of programs that only run a model."""

_RUNS_MODEL: Final = r"\bupscal|super.?resol|\btranscrib|\binference\b|推理"
"""What a program does that only runs a model; people who train one may speak of it, too."""

_FAILS: Final = (
    r"(?:\b(?:errors?|fail\w*|crash\w*|oom\w*|out of (?:\w+ )?(?:memory|vram)"
    r"|issues?|problems?|run(?:s|ning)? out|ran out|explod\w+|overflow\w*|occur\w*|stops"
    r"|aris\w+|happens?|spikes?|goes wrong)\b|失败|报错|溢出|爆)"
)
"""What people say of a failure."""

_CLAUSE: Final = r"(?:(?!\b(?:but|however|whereas|although|while)\b)[^.!?;]){0,160}?"


def _in_clause(words: str) -> str:
    """Return a pattern for words in the clause that tells of the failure, before or after it."""
    return rf"(?:{_FAILS}{_CLAUSE}{words}|{words}{_CLAUSE}{_FAILS})"


_MERGES: Final = (
    r"\b(?:merg(?:e|ing) (?:[a-z]{1,12} ){0,3}(?:q?lora|adapters?)|(?:lora|adapter) merg(?:e|ing))"
)
_QUANTIZES: Final = r"(?:\bquantizing|\b(?:when|during|in|to) quantiz(?:e|ation))\b"
_SAVES: Final = r"(?:\bsav(?:e|es|ed|ing)(?:\b|_(?:checkpoint|model|pretrained|state)))"
_TESTS: Final = (
    r"(?:(?<![\w./-])|(?<=trainer\.))(?<!cross[ -])(?:eval(?:uat(?:e|es|ed|ing|ions?))?"
    r"|val(?:idat(?:e|es|ing|ions?))?"
    r"|(?:to|in|at|after|during|while|when|the|running) test(?:ing)?"
    r"|tests? (?:step|phase|stage|time|loop|epoch)"
    r"|(?:in|at|during|while|when|the|saving) predict(?:ing|ions?)|评估|验证|测试)"
    r"(?:\(\))?(?![\w/(=-]|\.\w| (?:(?:is|was|works?|runs|went|goes) (?:\w+ )?"
    r"(?:ok|okay|fine|well|normal)|different|various|batch size))"
)
_RAN: Final = rf"\b(?:python3?|ran|run|running) (?:\S*[/\\])?(?:\w*_)?{_INFERS}\w*\.py\b"

_ONLY_RUNS: Final = (
    rf"^(?!.*{TRAINING}).*(?:{_RUNS_MODEL}|\bgenerat(?:e|es|ed|ing|ion)(?:\b|_)|\bprompts?\b|\bchat"
    r"|\.predict\(|请求|提问|对话|问答|部署|推論|추론|\b(?:each|every|per) (?:\w+ )?request"
    r"|\bgradio\b|\bfastapi\b|\brest api\b|\bsynthe[st]|\bvocod|\btranscrip|\bdiari[sz]"
    r"|\b(?:txt|img)2img|\btext2text|\bhi-?res|\bweb ?ui\b|\bdemo\b|\btranslator"
    r"|Mask\w{0,40}Generator\()"
)
"""Words for what a trained model is used for, which count only in texts without those above."""


def only_runs(message: OomMessage) -> bool:
    """Return whether the words around a failure are about running a model, and not training it."""
    return _search(f"(?is){_ONLY_RUNS}", message.said)


def is_seen_to_run(message: OomMessage) -> bool:
    """Return whether a text or its traceback shows that a model runs and is not trained."""
    sign = sign_of(message)
    return only_runs(message) or (sign is not None and not sign.is_training)


KEPT_BY_REQUESTS: Final = (
    "put torch.inference_mode() around each call of the model, and keep none of its results on the "
    "GPU (in lists, caches or global variables); limit the length of an input, and call "
    "torch.cuda.empty_cache() after a long one, whose memory PyTorch keeps"
)
"""What to do about memory that grows in a program that trains nothing."""


_EVALUATES: Final = (
    rf"(?:{_in_clause(_TESTS)}|\btry\w* to (?:test|evaluate|validate)\b"
    r"|\btrain\w* (?:is|was|works|runs|goes|went) (?:ok|okay|fine|well|normal\w*|success\w*"
    r"|no problem)\b[^\n]{0,20}\s{0,3}[^\n]{0,20}\b(?:test|eval|valid|infer|predict)\w*"
    r"|\b(?:infer|test|eval|predict)\w*\b[^\n]{0,160}\benough fo ?r (?:the )?train)"
)
"""The ways in which people say that an evaluation or a test failed, and not the training."""

_SERIES: Final = r"\b(?:iterations|epochs|batches|episodes)\b"
"""What is done again and again: what each of them does not give back adds up."""

_GROWS: Final = (
    rf"(?:{GROWS}|(?s:\A(?=.*{_SERIES}).*{KEPT})|\bleak(?:s|ing|age)?\b|\bwithout .{{0,3}}item\("
    r"|\bretain_graph(?: ?= ?|[^\w\n]?参数[^\n]{0,12})True"
    r"|\baccumulat(?:es?|ed|ing) (?:in|on|over)\b"
    r"|\b(?:training|validation|test)_epoch_end\(self, ?outputs)"  # Lightning before 2
)
"""The signs that something is kept from step to step, beside the words."""

_GATHERS: Final = (
    r"\b(?:append|aggregat|concatenat|accumulat|gather|collect)\w{0,4} (?:\w+ ){0,4}?"
    r"(?:predictions|logits|outputs|results)\b"
)
"""What an evaluation does that keeps the results of all batches."""

_LONG: Final = (
    r"(?:epochs?|rounds?|hours?|minutes|days?|sentences|generations?|runs?|requests?|images|videos?"
    r"|files?|episodes?|agents?|trials?|folds?|prompts?)\b"
)
_STEPS: Final = r"(?:iterations?|iters?|steps?|batch(?:es)?|samples)\b"
_MANY: Final = (
    r"(?:\d[\d,.~\u2013-]{0,7}k?|one|two|three|several|some|many|multiple"
    r"|(?:tens|hundreds|thousands) of|an?(?: (?:few|couple of))?"
    r"|(?:the )?(?:first|1st|second|previous))"
)
_LATER: Final = r"(?:second|third|fourth|fifth|last|[2-9](?:nd|rd|th)|[1-9]\d{1,5}(?:st|nd|rd|th))"
_MANY_STEPS: Final = r"(?:\d{3,7}|\d{1,3}[,.]\d{3}|\d{1,3}k|several|many|hundreds of|thousands of)"
_LATE_IN: Final = (
    rf"(?:\bafter (?:[a-z]{{2,9}} ){{0,3}}?~?(?:{_MANY} (?:\w+ ){{0,2}}?{_LONG}"
    rf"|{_MANY_STEPS}\+? (?:\w+ ){{0,2}}?{_STEPS})"
    rf"|\b(?:at|in|on|of|until|till|reach(?:es|ed)?|by|for) (?:the |my )?{_LATER} (?:\w+ )?{_LONG}"
    r"|\b(?:at|around|near|reach(?:es|ed)?|until) (?:\w+ )?"
    r"(?:epoch ?\d{1,5}|(?:iteration|step|image|frame|file) ?\d{3,7})"
    rf"|\breach(?:es|ed)? \d{{3,7}} {_STEPS}|\bin the middle of (?:the )?(?:train|epoch|run)"
    r"|\bafter 1/\d|\bhalfway\b"
    r"|\b(?:after|for) (?:a while|some time|a (?:long )?time)\b)"
)
_AT_START: Final = (
    r"\b(?:at|from|right at) the (?:very )?(?:start|beginning)\b|\bcan(?:'t|not) start\b"
)
_LATE: Final = (
    rf"(?is)\A(?!.*{_AT_START}).*(?:{_in_clause(_LATE_IN)}"
    rf"|\b(?:first|1st|one) (?:training )?{_LONG}(?: \w+){{0,3}}? (?:fine|ok|normal\w*|success\w*)"
    rf"|\bsuccessful {_STEPS}|前几[轮个]|第[二三四五六七八九十2-9]\d{{0,4}}\s?[轮个]"
    r"|(?:轮|epoch|エポック|에폭) ?(?:快?[完结]|[之以]?后|後|후)|[一段]会儿?[就后]"
    r"|一段时间[之以]?后|しばらく|после \w{1,12} эпох|途中で|도중에?)"
)
"""The ways in which people say that the first steps fit, and a later one failed."""

_TIMES: Final = r"(?:again|twice|a second time|(?:multiple|several|many) times|more than once)"
_RAN_BEFORE: Final = (
    r"(?is:\A(?=.*(?:\bjupyter|\bnotebooks?\b|\bcolab\b|\bkaggle\b|\bcells?\b|\bipy(?:thon|kernel)))"
    r"(?!.*\bre(?:start|set)\w*\b[^.\n]{0,80}\b(?:still|same|no luck|(?:not|n't|no) (?:\w+ )?help))"
    rf".*(?:\bre[- ]?r[au]n(?:s|ning)?\b|\b(?:r[au]n|execut)\w* (?:\w+ ){{0,4}}?{_TIMES}\b"
    r"|\b(?:second|2nd|next) (?:try|time|run|attempt)\b|\bonly (?:works|runs) once\b"
    r"|\b(?:until|unless|without|have to|need to|must) (?:\w+ )?restart(?:ing)? (?:\w+ ){0,2}"
    r"(?:kernel|runtime|notebook|session)\b))"
)
"""The ways in which people say that a notebook had run the same before."""

_TRIALS: Final = (
    r"\b(?:(?:after|across|between|over) (?:\S+ ){0,4}?|(?:number of|many|several|n ?= ?\d+) )"
    r"(?:trials|folds|hyper-?param\w{0,8} (?:search|tuning|optimi[sz]ation)|sweep)\b"
)
_OF_TRIALS: Final = rf"(?i:{_in_clause(_TRIALS)}|\baccumulat\w{{1,4}} {_TRIALS})"
"""The ways in which people say that one trial of several failed."""

FIRST_GPU: Final = "first-gpu"
LOADING_WEIGHTS: Final = "loading-weights"
VAE: Final = "vae-decode"
SERVER_START: Final = "server-start"
SERVER_STEP: Final = "server-step"
ATTENTION_SCORES: Final = "attention-scores"
INFERENCE: Final = "inference"
GENERATION: Final = "generation"
LOSS: Final = "loss-of-vocabulary"
CALLS_OF_LIBRARIES: Final = r"\.(?:infer|inference|predict|upscale|transcribe|enhance|generate)\("
"""Methods by which libraries run their models, which keep no graph there."""

GROWTH: Final = "growth"
METRIC_STATE: Final = "metric-state"
KEPT_PREDICTIONS: Final = "kept-predictions"
ADDS_UP: Final = (GROWTH, METRIC_STATE, KEPT_PREDICTIONS)
"""Signs of memory that each step adds to."""
RAN_BEFORE: Final = "ran-before"
KEPT_IN_USE: Final = "kept-in-use"
EVALUATION: Final = "evaluation"
LATE: Final = "later-step"
LARGE_SHARE: Final = 0.25
"""A request of more than this share of the device fails by its own size, whatever grew before."""


def _extended(name: str) -> str:
    cat = r"\b(?:torch\.)?(?:cat|concat)\(\s*[\[(]\s*(?P=name)\b"
    return rf"(?<![\w.])(?P<name>{name})\s*=.{{0,80}}{cat}"


SIGNS: Final[tuple[TracebackSign, ...]] = (
    # ---- saving ----
    TracebackSign(
        name="gathered-save",
        doing="while the whole model was gathered on the GPU to save it",
        is_of_model=True,
        can_leave_gpu=True,
        title="Save the shards, or gather them on the CPU of rank 0",
        change="use FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, "
        "FullStateDictConfig(offload_to_cpu=True, rank0_only=True)) around state_dict(); since "
        "PyTorch 2.3, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
        "cpu_offload=True)); in accelerate, set fsdp_state_dict_type: SHARDED_STATE_DICT",
        why="The whole state holds every weight of the model on each GPU at once, "
        "where training holds a share of them.",
        # torch 1.12 to 2.15, torch/distributed/fsdp; deepspeed 0.9 to 0.19.6, runtime/engine.py
        places=(
            Place(
                file=r"/torch/distributed/fsdp/(?:_state_dict_utils|_unshard_param_utils)\.py$"
                r"|/torch/distributed/checkpoint/state_dict\.py$|/fsdp/_fsdp_state\.py$"
            ),
            Place(
                file=r"/torch/distributed/fsdp/",
                functions="state_dict full_optim_state_dict optim_state_dict "
                "_optim_state_dict_impl _full_pre_state_dict_hook "
                "_full_post_state_dict_hook",
            ),
            Place(
                file=r"/deepspeed/",
                functions="_zero3_consolidated_16bit_state_dict save_16bit_model save_fp16_model",
            ),
            # fairscale 0.4, optim/oss.py; torch 1.8 to 2.13, distributed/optim
            Place(functions="consolidate_state_dict"),
        ),
        in_words=rf"(?is)\A(?=.*(?:\bfsdp\b|\bzero[- ]?(?:stage[- ]?)?3)).*{_in_clause(_SAVES)}",
        intro=r"/fsdp/(?:_state_dict_utils|fully_sharded_data_parallel)\.py"
        r"|Failed to clone\(\) tensor with name",
    ),
    TracebackSign(
        name="saved-state",
        doing="while a checkpoint was saved",
        is_of_model=True,
        title="Save less, or leave room for saving",
        change="if you train an adapter, save only that (PEFT's model.save_pretrained()); free the "
        "gradients first (optimizer.zero_grad(), torch.cuda.empty_cache()); upgrade bitsandbytes, "
        "which now saves its 8-bit weights as they are",
        why="Layers that convert their weights for a checkpoint copy them on the GPU, on top of "
        "everything that training holds.",
        # torch 1.0 to 2.13, torch/nn/modules/module.py; bitsandbytes 0.37 to 0.48, nn/modules.py
        places=(
            Place(functions="_save_to_state_dict state_dict"),
            Place(
                file=r"/transformers/trainer\.py$", functions="_save save_model _save_checkpoint"
            ),
        ),
    ),
    # ---- loading ----
    TracebackSign(
        name="merged-adapter",
        doing="while an adapter was loaded into a model or merged with it",
        is_of_model=True,
        is_training=False,
        can_leave_gpu=True,
        title="Load the adapter on the CPU, and merge it there",
        change="load the model with device_map='cpu' and the adapter with "
        "PeftModel.from_pretrained(..., torch_device='cpu'); merge_and_unload() and "
        "save_pretrained() need no GPU; a notebook that trained it still holds that model until "
        "its kernel restarts",
        why="An adapter's file is read onto the GPU next to the weights, and merging needs them in "
        "16 or 32 bits.",
        # peft 0.3 to 0.18, peft_model.py and tuners/lora/model.py
        places=(_LOADS_ADAPTER,),
        in_words=rf"(?i){_in_clause(_MERGES)}|合并[^\n]{{0,20}}(?:显存|OOM|memory)"
        r"|\b(?:save_pretrained_merged|merge_and_unload)\(",
    ),
    TracebackSign(
        name="loaded-checkpoint",
        doing="while a checkpoint was loaded onto the GPU",
        is_of_model=True,
        can_leave_gpu=True,
        title="Load the checkpoint on the CPU, and free it after loading",
        change="use state = torch.load(path, map_location='cpu'), with mmap=True since 2.1; then "
        "model.load_state_dict(state), which copies it into the model that is already on the GPU; "
        "then del state",
        in_words=r"(?i)\b(?:resum|restor|load)(?:e|ed|es|ing|s)? (?:(?:training|the|an?|from"
        r"|my|saved|last|previous|existing|old|latest|model|fsdp) ){0,4}checkpoint(?! shards)"
        r"|\bresum(?:e|ed|ing)\b(?![_=])",
        why="Without map_location, each tensor goes to the device it was saved from: next to the "
        "weights that it is copied into, and for every rank to the same GPU.",
        # torch 1.0 to 2.15, torch/serialization.py, nn/modules/module.py and optim/optimizer.py
        unless=(
            Place(code=r"map_location\s?=\s?(?:torch\.device\()?['\"]cpu"),
            _LOADS_ADAPTER,
            _UNPACKS_RESULTS,
        ),
        places=(
            Place(
                file=r"/torch/(?:serialization|storage)\.py$",
                functions="load _load _legacy_load persistent_load load_tensor "
                "restore_location default_restore_location _cuda_deserialize "
                "_deserialize",
            ),
            Place(
                file=r"/torch/(?:nn/modules/module|optim/optimizer)\.py$",
                functions="load_state_dict _load_from_state_dict "
                "_process_value_according_to_param_policy",
            ),
        ),
    ),
    TracebackSign(
        name="moved-before-offload",
        doing="while all of a pipeline was moved to the GPU, before its offloading began",
        is_of_model=True,
        can_leave_gpu=True,
        title="Leave out the move to the GPU: offloading does it, a part at a time",
        change="remove .to('cuda') or .to(device) from the pipeline; if it still does not fit, "
        "call enable_sequential_cpu_offload() in place of enable_model_cpu_offload()",
        why="The offloading moves each part when it runs; a pipeline that was moved before is on "
        "the GPU as a whole.",
        # diffusers 0.39, pipelines/pipeline_utils.py: enable_model_cpu_offload
        in_words=r"(?s)\.(?:cuda\(\)|to\((?:device|['\"]cuda[:\d]*['\"])\)).{0,600}"
        r"\.enable_\w{0,12}_?cpu_offload\(",
    ),
    TracebackSign(
        name="quantizing",
        doing="while weights were being quantized",
        is_of_model=True,
        is_training=False,
        can_leave_gpu=True,
        title="Quantize with the weights on the CPU, one layer at a time",
        change="load the model on the CPU (device_map='cpu', or a max_memory that keeps most of it "
        "there), and let the quantizer move one layer at a time; calibrate with fewer and shorter "
        "samples; or use a checkpoint that is quantized already",
        why="Quantizing starts from the whole weights in 16 or 32 bits, four or eight times the "
        "size of the result in 4.",
        in_words=rf"(?i){_in_clause(_QUANTIZES)}|\bto quantize (?:an?|the) [\w-]{{2,30}}"
        r"|\.quantize\([a-z]",
    ),
    TracebackSign(
        name=LOADING_WEIGHTS,
        doing="while a model's weights were being moved to the GPU",
        is_of_model=True,
        unless=(_LOADS_ADAPTER,),
        title="Load smaller weights",
        change="convert the weights with model.to(torch.bfloat16) or load them in 4 bits before "
        "they go to the GPU; use a smaller model; or keep some layers on another GPU or on the CPU",
        spelled=Change.WEIGHTS,
        why="Only weights were being requested: what is missing is room for the model itself, "
        "which no batch size changes.",
        in_words=r"\bfrom_pretrained\([^()]{0,300}\)\.(?:to|cuda|half)\("
        r"(?!.{0,600}\b(?:generate|chat|train|fit|forward|backward|step)\()"
        r"|(?i:(?:\b(?:try|trying|tried|fail\w{0,3}|unable|can(?:no|')t)(?: to)? load\b"
        rf"|{_in_clause('(?:when|while) loading')}"
        r"|\b(?:mov|transferr|load|sent|put)\w{0,3} [^.!?]{0,40}\bbefore (?:being |it is )?"
        r"(?:convert|cast|quantiz)\w+)"
        r"(?!.{0,40}(?:data|image|checkpoint|batch|sample|video|file)))",
        intro=r"Node Type:\W{0,8}\w*Load(?:er|\b)|\bERROR lora\b|Patching LoRAs"
        r"|modules are dispatched on the CPU",
        # torch 2.13, torch/nn/modules/module.py; transformers 4.30 to 5.0, modeling_utils.py;
        # accelerate 1.10, utils/modeling.py; ComfyUI 0.3, comfy/model_patcher.py and execution.py;
        # vllm 0.11, model_executor/model_loader; sglang 0.4, model_executor/model_runner.py
        places=(
            Place(
                file=r"/torch/nn/modules/module\.py$",
                functions="_apply convert to cuda half float bfloat16 to_empty",
            ),
            Place(file=r"/torch/nn/modules/\w+\.py$", functions="__init__ reset_parameters"),
            Place(
                functions="__init__",
                code=r"[Ww]eight|\bParameter\(|\bnn\.\w+\(|(?:Layer|Block|Attention|MLP|Encoder"
                r"|Decoder|Transformer)\(",
            ),
            Place(
                named=r"^_?(?:fast_)?load_(?:\w{1,40}_)?(?:model|pipeline|transformer|weight)s?$"
            ),
            Place(code=r"\b(?:load_model|from_pretrained)\("),
            Place(
                file=r"/(?:vllm|sglang)/",
                functions="load_model initialize_model _initialize_model load_weights "
                "create_weights",
            ),
            # a traceback that was cut above torch's own frames
            Place(
                code=r"\b(?:model|module|net|pipe)\w*\.(?:to|cuda)\(|\bensure_model_loaded\("
                r"|\b(?:weight|param)\w*\b.{0,60}\.(?:to|cuda)\("
                r"|= ?\w*Trainer\(|\bt\.to\(device, dtype if "
                r"|\bself\._apply\((?:convert|lambda t: t\.)",
                is_last=True,
            ),
            Place(
                file=r"/(?:comfy|modules)/model_(?:management|patcher)\.py$",
                functions="load_models_gpu model_load model_use_more_vram partially_load load "
                "patch_model patch_weight_to_device cast_to cast_to_device",
            ),
            Place(
                file=r"/transformers/(?:modeling_utils|core_model_loading|quantizers/\w+)\.py$"
                r"|/accelerate/utils/modeling\.py$|/safetensors/torch\.py$"
            ),
        ),
    ),
    # ---- serving ----
    TracebackSign(
        name="graph-capture",
        doing="while CUDA graphs were captured",
        is_of_model=True,
        title="Leave more memory for CUDA graphs, or capture fewer",
        change="capture fewer or smaller graphs, or none; in a server, give its KV cache a smaller "
        "share of the card",
        why="Each graph keeps the memory of its pool as long as it exists, on top of everything "
        "that was there before: weights, state, a server's KV cache.",
        # torch 2.13, torch/cuda/graphs.py; transformer_engine 2.8, pytorch/graph.py; megatron-core
        # 0.14, transformer/cuda_graphs.py; sglang 0.4, model_executor/cuda_graph_runner.py; vllm
        # 0.11, v1/worker/gpu_model_runner.py
        places=(
            Place(functions="make_graphed_callables create_cudagraphs capture_begin"),
            Place(
                file=r"/(?:sglang|vllm)/",
                functions="init_cuda_graphs init_device_graphs capture_one_batch_size "
                "capture_model _capture_cudagraphs "
                "init_forward_metadata_capture_cuda_graph",
            ),
        ),
        intro=r"[Cc]apture cuda graph failed|Capturing (?:the model for CUDA |cuda)graphs",
    ),
    TracebackSign(
        name=SERVER_START,
        doing="at start-up, before the server had set its KV cache aside",
        is_of_model=True,
        title="Make the server's first step smaller, or store the weights in fewer bytes",
        change="allow fewer and shorter requests at a time; use quantized weights, or spread them "
        "over more GPUs",
        why="Weights come first, then a step of the largest allowed size, and only what both leave "
        "is set aside for the cache: a smaller share for the cache changes nothing yet.",
        # vllm 0.3 to 0.25, worker/worker.py and v1/worker/gpu_worker.py; text-generation-inference
        # 1.0 to 3.3, server.py: Warmup
        places=(
            Place(
                functions="profile_run determine_num_available_blocks determine_available_memory "
                "_dummy_run warmup Warmup",
                file=r"/(?:vllm|sglang|text_generation_server)/",
            ),
            Place(file=r"/vllm/", code=r"\bEngineCore(?:Proc)?\("),
        ),
        # what takes the cache, or runs beside it
        unless=(
            Place(
                functions="initialize_kv_cache allocate_kv_cache _allocate_kv_cache "
                "_allocate_kv_cache_tensors initialize_from_config compile_or_warm_up_model"
            ),
        ),
        intro=r"EngineCore failed to start|[Ss]tarting profile run|\[profiling\.py:\d"
        r"|(?s:checkpoint shards: 100% Completed(?!.*(?:blocks:|KV cache)))"
        r"|Unable to warmup|Method Warmup",
    ),
    TracebackSign(
        name=SERVER_STEP,
        doing="while the server set its KV cache aside or ran a step",
        is_of_model=True,
        is_surrounding=True,
        title="Leave more GPU memory outside the server's KV cache",
        change="give the cache a smaller share of the card, and run smaller steps",
        spelled=Change.BATCH,
        why="The server fills the card with KV cache up to its limit; whatever a step needs beyond "
        "what was measured at start-up has to come out of the rest.",
        # vllm 0.6 to 0.25, config/cache.py, worker and v1/worker; sglang 0.4 to 0.5.20, srt and
        # docs/advanced_features/server_arguments.md
        places=(
            Place(
                file=r"/(?:vllm|sglang)/(?:.*/)?(?:worker|executor|model_executor|managers|layers|lora"
                r"|v1)/"
            ),
            Place(file=r"/text_generation_server/"),
        ),
        intro=r"text_generation(?:_|\.errors)|\bVllmWorker|\bEngineCore"
        r"|\bWorker(?:_TP\d| pid=)|\bRayWorkerWrapper"
        rf"|{VLLM_LOG}",
    ),
    # ---- evaluation ----
    TracebackSign(
        name=METRIC_STATE,
        doing="while a metric stored its inputs",
        can_leave_gpu=True,
        title="Keep the metric's state small, or on the CPU",
        change="call metric.reset() after each epoch; give curves and areas under them "
        "thresholds=200, which keeps their state at a fixed size; set compute_on_cpu=True, or move "
        "the metric and its inputs to the CPU; for a single batch, use torchmetrics.functional",
        why="A metric that needs all predictions at once keeps them and their targets until it is "
        "reset.",
        # torchmetrics 0.8 to 1.8, metric.py
        places=(Place(file=r"/torchmetrics/"),),
        in_words=rf"(?is)\A(?=.*torch ?metrics?\b)(?=.*{_GROWS})",
    ),
    TracebackSign(
        name=KEPT_PREDICTIONS,
        doing="in an evaluation whose results pile up on the GPU",
        is_training=False,
        can_leave_gpu=True,
        title="Move the results of each evaluated batch off the GPU",
        change="put torch.no_grad() around the loop (model.eval() alone keeps the graph), and "
        "store only what the metrics need, with .item() or .cpu()",
        spelled=Change.GATHER,
        why="What each batch leaves behind adds up, whatever the batch size. Trainer keeps every "
        "batch's logits on the GPU until the evaluation ends, and joins them with a copy.",
        in_words=rf"(?is)\A(?=.*{_EVALUATES})"
        rf"(?=.*(?:{_GROWS}|\bafter (?:\w+ )?\d+ (?:images|samples|batches)\b"
        rf"|{_GATHERS}|\bcompute_metrics\b))|\A(?=.*\b(?:eval|valid)\w*).*{_GATHERS}"
        rf"|{_TESTS}{_CLAUSE}{GROWS}|{GROWS}{_CLAUSE}{_TESTS}",
        # transformers 3.1 to 4.57, trainer.py and trainer_pt_utils.py
        places=(
            Place(
                file=r"/transformers/trainer_pt_utils\.py$|/accelerate/(?:accelerator"
                r"|utils/operations)\.py$",
                functions="nested_concat torch_pad_and_concatenate nested_gather "
                "distributed_concat pad_across_processes gather_for_metrics gather",
            ),
            Place(
                functions="evaluation_loop prediction_loop",
                code=r"nested_concat|torch\.cat|preds_host|\.add\(",
            ),
        ),
    ),
    TracebackSign(
        name="gathered-results",
        doing="while each process gathered the results of all the others on its GPU",
        is_training=False,
        can_leave_gpu=True,
        title="Gather the results on the CPU",
        change="call .cpu() on what is gathered, and gather it through a gloo group "
        "(torch.distributed.new_group(backend='gloo')), or with gather_object() on one process; "
        "keep fewer and smaller results",
        why="NCCL sends an object as bytes through the GPU's memory, and each process gets those "
        "of all others at the length of the longest; tensors in it come back to the GPU.",
        # torch 1.7 to 2.13, torch/distributed/distributed_c10d.py; DETR and maskrcnn-benchmark
        # have an all_gather() of their own
        places=(
            Place(functions="all_gather_object gather_object _tensor_to_object"),
            Place(code=r"\ball_gather_object\("),
            _UNPACKS_RESULTS,
        ),
        unless=(Place(named=r"state_dict"),),
    ),
    # ---- boxes and masks of detectors ----
    TracebackSign(
        name="box-assignment",
        doing="while a detector compared all boxes of an image with all anchors",
        can_leave_gpu=True,
        title="Match boxes on the CPU where an image has many",
        change="set gpu_assign_thr=100 in MMDetection's MaxIoUAssigner (train_cfg: "
        "rpn.assigner.gpu_assign_thr); in other detectors drop or split images with hundreds of "
        "boxes, or use smaller crops",
        why="The matrix of overlaps has a row for each true box and a column for each "
        "anchor: one crowded image makes it huge, whatever the batch size.",
        # mmdet 2.0 to 3.3, core/bbox/assigners and models/task_modules/assigners; detectron2 0.6,
        # structures/boxes.py; torchvision 0.23, ops/boxes.py
        places=(
            Place(
                file=r"/assigners/|iou2d_calculator\.py$|/detectron2/structures/(?:rotated_)?boxes\.py$"
                r"|/torchvision/ops/boxes\.py$|/utils/tal\.py$"
            ),
            Place(functions="bbox_overlaps pairwise_iou box_iou box_iou_rotated"),
        ),
    ),
    TracebackSign(
        name="pasted-masks",
        doing="while the masks of all objects were drawn at the size of the image",
        is_training=False,
        can_leave_gpu=True,
        title="Draw the masks on the CPU, or fewer of them",
        change="move masks and boxes to the CPU before they are drawn (.to('cpu')), or leave them "
        "at their own size (rescale=False in MMDetection); keep fewer objects (a higher score "
        "threshold, a lower max_per_img or TEST.DETECTIONS_PER_IMAGE); use a smaller image, or "
        "tiles of it",
        why="Each object gets a mask as large as the original image, in 32 bits, with a grid of "
        "the same size beside it, whatever size the network worked at.",
        # detectron2 0.6, layers/mask_ops.py; mmdet 2.0 to 3.3, roi_heads/mask_heads; torchvision
        # 0.23, models/detection/roi_heads.py; yolact, layers/output_utils.py
        places=(_PASTES,),
        intro=rf"\b(?:{_PASTES.functions.replace(' ', '|')})\b",
    ),
    # ---- all pairs ----
    TracebackSign(
        name="all-pairs",
        doing="while something was computed for all pairs at once",
        title="Compute the pairs a part at a time, or only those that count",
        change="loop over a few thousand rows at a time and keep only the result (min, topk); for "
        "distances use torch.cdist, which never stores the differences of vectors; for a graph use "
        "its edges (edge_index, a sparse matrix) or sampled neighbors instead of a dense matrix; "
        "use fewer points or nodes",
        why="A matrix of all pairs grows with the square of their number, at any batch size.",
        # torch 2.13, torch/functional.py; torch_geometric 2.0 to 2.6, utils/_to_dense_adj.py
        places=(
            Place(functions="cdist pdist pairwise_distance to_dense_adj"),
            Place(named=rf"(?i){_PAIRS}"),
            Place(code=rf"(?i)\b(?:cdist|pdist|to_dense_adj)\(|{_PAIRS}\w*\s?="),
        ),
        intro=r"\bcdist\(|\bto_dense_adj\b",
        in_words=rf"(?i){_PAIRS}\b",
    ),
    # ---- several GPUs ----
    TracebackSign(
        name=FIRST_GPU,
        doing="where the outputs or weights of several GPUs come together",
        is_of_batch=True,
        title="Run one process per GPU, and keep the others off the first GPU",
        change="in each process, call torch.cuda.set_device(local_rank) before anything goes to "
        "'cuda', and use torch.load(..., map_location='cpu'); replace DataParallel, which gathers "
        "all outputs on the first GPU, with torchrun --nproc_per_node=N and "
        "DistributedDataParallel (or compute the loss inside forward(), so that only a number is "
        "gathered)",
        why="The GPU that also holds what the others computed or loaded fills up first.",
        # torch 1.0 to 2.15, torch/nn/parallel and torch/serialization.py
        places=(
            Place(
                file=r"/torch/nn/parallel/(?:scatter_gather|_functions|comm)\.py$|/torch/cuda/comm\.py$",
                functions="gather gather_map forward",
                code=r"gather",
            ),
        ),
        in_words=r"(?is)\A(?=.*(?:train|parallel|torchrun|\bddp|\brank|\bworkers?\b|processes|训练"
        rf"|\b(?:gpus|cards|others)\b|[多张]卡|分布式)).*(?:{ON_FIRST})",
    ),
    # ---- optimizers ----
    TracebackSign(
        name="optimizer-state",
        doing="while the optimizer created its state or took a step",
        is_of_model=True,
        title="Keep less optimizer state on the GPU",
        change="use an 8-bit optimizer (bitsandbytes.optim.AdamW8bit, or optim='adamw_8bit' of "
        "Trainer) or Adafactor; shard it over more GPUs (ZeRO, FSDP) or offload it to the CPU; "
        "train a LoRA adapter instead of all the weights; with PyTorch's own optimizers, set "
        "fused=True, which needs no temporaries",
        why="Adam keeps two numbers for each weight from the first step on, and mixed precision "
        "keeps a copy in 32 bits. The batch's activations are gone by then, so a smaller batch "
        "changes nothing.",
        # torch 2.13, torch/optim; deepspeed 0.9 to 0.19.6, runtime/zero and engine.py; colossalai
        # 0.2 to 0.4, zero/low_level; apex, amp/_process_optimizer.py; bitsandbytes 0.39 to 0.48,
        # csrc/pythonInterface.cpp: cget_managed_ptr of paged state; apex, optimizers; transformers
        # 4.20 to 4.57, optimization.py: Adafactor; bitsandbytes, optim
        intro=r"[Oo]ut of memory at line \d+ in file \S*pythonInterface",
        # Lightning runs the whole step inside optimizer.step(closure)
        unless=(Place(code=r"\bclosure\("),),
        places=(
            Place(
                file=r"/deepspeed/",
                functions="initialize_optimizer_states _setup_for_real_optimizer "
                "_create_fp32_partitions _configure_zero_optimizer _optimizer_step step "
                "_take_model_step",
            ),
            Place(
                file=r"/torch/optim/(?:adam|adamw|_multi_tensor|sgd|rmsprop|adagrad|radam|nadam)\.py$"
            ),
            Place(file=r"/bitsandbytes/optim/|/apex/optimizers/|/transformers/optimization\.py$"),
            # A wrapper of a step may get a closure, which runs the model.
            Place(
                file=r"/torch/optim/(?:optimizer|lr_scheduler)\.py$|/accelerate/optimizer\.py$"
                r"|/amp/grad_scaler\.py$",
                is_last=True,
            ),
            Place(code=r"\boptim(?:izer)?\.step\(|\bexp_avg_sq\b", is_last=True),
            # the optimizer's own copy of the weights in 32 bits
            Place(
                file=r"/(?:deepspeed|colossalai|apex|megatron)/",
                code=r"\b(?:fp32|master|single_partition)\w*(?:\[[^\]]*\])?(?:\.append\(| ?= ?)"
                r".{0,80}(?:\.float\(|float32)",
            ),
        ),
    ),
    # ---- images ----
    TracebackSign(
        name=VAE,
        doing="while a VAE turned latents into pixels or pixels into latents",
        title="Run the VAE in tiles, or on fewer pixels at once",
        change="turn tiling on, or halve the tiles if it is already on; process one image at a "
        "time (vae_batch_size 1 where latents are cached before training), at a lower resolution "
        "or with fewer frames; put torch.no_grad() around a loop of your own",
        why="The decoder works at full resolution: its peak grows with the pixels of "
        "the image or the frames of the video, after the denoiser has fit.",
        # diffusers 0.35, models/autoencoders; ComfyUI 0.3, comfy/sd.py and nodes.py
        places=(
            Place(file=r"/diffusers/models/autoencoders/|/comfy/ldm/.*(?:vae|autoencoder)"),
            Place(
                code=r"\bvae\.(?:decode|encode)\(|first_stage_model\.(?:decode|encode)\(|decode_tiled"
            ),
        ),
        intro=r"when regular VAE (?:de|en)coding|\[Tiled VAE\]"
        r"|(?:VAE|(?i:\bvae|Video)) ?(?:[Dd]e|[Ee]n)cod",
    ),
    TracebackSign(
        name="sampled-grid",
        doing="while features were sampled at points of a grid",
        title="Sample in chunks of points",
        change="split the grid along its points and join the results; process fewer rays, views or "
        "points per chunk (chunk_size, n_rays or num_points of the model); under autocast, "
        "grid_sample runs in 32 bits",
        why="grid_sample returns channels x points values and keeps the grid and its input for the "
        "backward pass: the number of points decides.",
        # torch 2.13, torch/nn/functional.py
        places=(
            Place(functions="grid_sample"),
            Place(code=r"\bgrid_sampler?\("),
        ),
        # drawing masks calls grid_sample too
        unless=(_PASTES,),
    ),
    # ---- a volume in windows ----
    TracebackSign(
        name="sliding-window",
        doing="while MONAI was stitching the windows of a whole volume together on the GPU",
        is_training=False,
        can_leave_gpu=True,
        title="Stitch the windows together on the CPU",
        change="use sliding_window_inference(..., sw_device='cuda', device='cpu'), and keep the "
        "volume itself on the CPU; lower sw_batch_size",
        why="The output has the size of the whole volume times the number of classes, in 32 bits, "
        "with a map of counts next to it; the network only ever sees one window.",
        # monai 0.2 to 1.5, inferers/utils.py and inferer.py
        places=(Place(file=r"/monai/inferers/", is_last=True),),
        in_words=r"(?is)\bsliding_window_inference\b|\bsw_batch|\bmonai\b.*\bsliding.window",
        intro=r"sliding_window_inference\s+(?:count_map|output_image)|(?:count_map|output_image\w*)"
        r"(?:\.append\(| ?= ?)torch\.zeros\(",
    ),
    # ---- generating and attention ----
    TracebackSign(
        name=ATTENTION_SCORES,
        doing="while attention computed the scores of all pairs of tokens",
        title="Use attention that never stores the scores",
        change="use torch.nn.functional.scaled_dot_product_attention in 16 bits and without a "
        "dense mask, or flash-attn, xformers or SageAttention if PyTorch has no fused kernel for "
        "this GPU; shorten the sequence",
        spelled=Change.ATTENTION,
        why="The matrix has batch x heads x length x length entries: half the length takes a "
        "quarter of the memory.",
        # transformers 4.20 to 4.57, models/*/modeling_*.py; diffusers 0.39,
        # models/attention_processor.py; megatron-core 0.5 to 0.14,
        # transformer/dot_product_attention.py
        places=(
            Place(
                code=r"scaled_dot_product_attention\([^)]*mask|key_states\.transpose|softmax\(\s*(?:attn|attention)_(?:weights|scores)"
                r"|(?:attn|attention)_(?:weights|scores|probs)\s?=|\bmatmul_result\s?=|(?:\bq\w*|\))\s?@\s?k\w*\.transpose|baddbmm\("
                r"|einsum\(\s*f?['\"][^'\"]*i d\s?,[^'\"]*j d\s?->[^'\"]*i j['\"]"
                r"|einsum\(\s*f?['\"](\w*)(\w)(\w)\s?,\s?\1(\w)\3\s?->\s?\1\2\4['\"]"
                r"|einsum\(\s*['\"][^'\"]{0,20}i j\s?,[^'\"]{0,20}j d\s?->[^'\"]{0,20}i d['\"]"
            ),
        ),
    ),
    TracebackSign(
        name="growing-concatenation",
        doing="while a tensor was extended by torch.cat",
        title="Collect the pieces on the CPU, and concatenate once",
        change="call parts.append(x.detach().cpu()) in the loop (.cpu() alone keeps the graph), "
        "and torch.cat(parts) once after it",
        why="Extending a tensor copies all of it each time: the old and the new one exist "
        "together, and everything it holds stays on the GPU.",
        # torch 2.13: cat returns a new tensor. What a layer joins in a variable of its own, such as
        # a skip connection of a U-Net, ends with its call.
        places=(Place(code=_extended(r"[A-Za-z_][\w.]*")),),
        unless=(Place(named=r"forward", code=_extended(r"[A-Za-z_]\w*")),),
    ),
    TracebackSign(
        name=LOSS,
        doing="while computing logits over the whole vocabulary or their loss",
        is_of_batch=True,
        title="Compute the loss in chunks, or fused",
        change="score a few hundred tokens at a time, or use a fused loss "
        "(liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss, cut_cross_entropy), which "
        "never materializes all the logits",
        spelled=Change.LOSS,
        why="The logits have batch x length x vocabulary entries, in 32 bits for the loss, and "
        "their gradient takes as much again.",
        # torch 2.13, torch/nn/functional.py; trl 0.21; transformers 4.57, loss; transformers 4.20
        # to 4.57, models/*/modeling_*.py
        places=(
            Place(
                functions="cross_entropy log_softmax selective_log_softmax "
                "_compute_distributed_log_softmax ForCausalLMLoss "
                "fixed_cross_entropy entropy_from_logits get_batch_logps "
                "_get_per_token_logps"
            ),
            Place(
                code=r"logits\.(?:float|exp|log_softmax|softmax|clone)\(|log_?softmax\(|\blm_head\("
                r"|cross_entropy\("
            ),
        ),
        unless=(Place(file=r"/transformers/generation/"),),  # which asks for no loss
    ),
    TracebackSign(
        name=GENERATION,
        doing="while text was generated",
        is_training=False,
        is_surrounding=True,
        title="Generate with a shorter context, or a smaller cache",
        change="shorten the prompt, max_new_tokens or the length that a cache is made for "
        "(max_seq_len), lower num_beams or num_return_sequences; "
        "set cache_implementation='offloaded' or 'quantized'; drop contrastive search "
        "(penalty_alpha), which keeps the hidden states of top_k candidates; load the weights in "
        "8 or 4 bits",
        why="The cache of keys and values grows with every token of the prompt and the answer, for "
        "each beam and sequence.",
        # transformers 4.20 to 4.57, generation/utils.py and cache_utils.py
        places=(
            Place(file=r"/transformers/(?:generation/|cache_utils\.py$)"),
            # a cache that is made for the whole context at once
            Place(
                code=r"\bcache = \w*Cache\w*\(|\bkey_(?:states|cache)\w* = torch\.(?:zeros|empty)\("
            ),
        ),
    ),
    TracebackSign(
        name=EVALUATION,
        doing="while an evaluation ran",
        is_of_batch=True,
        is_training=False,
        is_surrounding=True,
        title="Evaluate without gradients, and in smaller batches",
        title_in_framework="Evaluate in smaller batches, and keep less of their output",
        change="put torch.no_grad() around the loop of the evaluation (model.eval() alone keeps "
        "the graph); use a smaller batch there, and images or sequences no larger than in "
        "training (resize, crop, tiles); keep results with .item() or .cpu()",
        spelled=Change.EVALUATION_BATCH,
        why="Training fits but the evaluation does not: its batch is different, and it keeps what "
        "it returns.",
        in_code="evaluated_graph",
        # transformers 4.57, trainer.py; lightning 2.5, loops/evaluation_loop.py
        in_words=rf"(?i){_EVALUATES}",
        # progress bars of catalyst and Lightning; code of PyTorch 0.3, which kept no graph there
        intro=r"\b[Rr]unning (?:validation|evaluation)\b|Train\w{0,10}Validat"
        r"|(?:\(valid(?:ation)?\)|\bValidat(?:ing|ion(?: DataLoader \d+)?)):\s{1,6}\d{1,3}%"
        r"|volatile was removed and now has no effect",
        places=(
            Place(
                functions="evaluation_loop prediction_loop prediction_step evaluate "
                "_evaluation_step validation_step _run_sanity_check validate test test_epoch"
            ),
            Place(file=r"(?:^|/)evaluation/"),
            Place(
                code=r"(?:(?<![\w.])|\bself\.)(?:(?:val|eval)_\w+|(?:validat|evaluat)(?:e|ion)"
                r"(?:_\w+)?)\("
            ),
            # The user's own functions named so: val_one_epoch, run_validation, test_model.
            Place(
                named=r"^(?!.*train)(?:.*_)?(?:val|valid|validate|validation|eval|evaluate"
                r"|evaluation)(?:_|$)"
            ),
        ),
    ),
    TracebackSign(
        name=RAN_BEFORE,
        doing="after an earlier run in the same process",
        is_of_model=True,
        is_surrounding=True,
        title="Free what the earlier run left before the next one starts",
        change="at the end of each run or trial, del model, optimizer and every output, then call "
        "gc.collect() and torch.cuda.empty_cache(); or run each in its own process (in a notebook, "
        "restart the kernel); after an error, its traceback keeps all variables of the failed cell "
        "alive until another cell fails (1/0)",
        why="The variables of the earlier run, or the traceback of its error, still hold its "
        "tensors while the next run makes its own.",
        # ipython 8, core/interactiveshell.py: showtraceback() sets sys.last_traceback
        in_words=rf"{_RAN_BEFORE}|{_OF_TRIALS}",
    ),
    TracebackSign(
        name=GROWTH,
        doing="in a run whose memory kept growing",
        is_of_batch=True,
        is_surrounding=True,
        title="Keep numbers from step to step, not tensors with their graph",
        change="sum and store loss.item(), not loss; store outputs with .detach().cpu(); put "
        "torch.no_grad() around inference and metrics; detach states between sequences; then cap "
        "what differs from batch to batch: lengths, boxes, nodes",
        why="Whatever a step leaves behind adds up, at any batch size: a stored loss holds the "
        "whole graph of its step.",
        # torch 2.13, docs/source/notes/faq.rst
        in_words=rf"(?i){_GROWS}",
        in_code="kept",
    ),
    TracebackSign(
        name=KEPT_IN_USE,
        doing="beside memory that was not given back after its use",
        is_of_model=True,
        is_surrounding=True,
        title="Free what is no longer needed before the next thing is loaded",
        change="del every name that holds it (model, pipeline, outputs), then call gc.collect() "
        "and torch.cuda.empty_cache(); in an application, use its command that unloads models, or "
        "restart it; run what must leave nothing behind in a process of its own",
        why="Memory stays taken as long as a name refers to it, and PyTorch's cache keeps what is "
        "free for the same process.",
        in_words=rf"(?i){KEPT}",
    ),
    TracebackSign(
        name="spilled",
        doing="after Windows' driver had moved part of the GPU's memory to the host",
        is_of_batch=True,
        is_surrounding=True,
        title="Stay within the GPU's own memory",
        change="use a smaller batch, input or model, until nvidia-smi stays a few hundred MiB "
        "below the card's size; to get an error instead of a slow run, open NVIDIA Control Panel, "
        "Manage 3D settings, and set CUDA - Sysmem Fallback Policy to Prefer No Sysmem Fallback",
        why="What does not fit goes to the host's memory over the bus, at a fraction of the speed.",
        # NVIDIA's driver for Windows since 536.40; support answer 5490
        in_words=r"[Ss]hared GPU memory|[Ss]ysmem [Ff]allback",
    ),
    TracebackSign(
        name=LATE,
        doing="after steps that fit",
        is_of_batch=True,
        is_surrounding=True,
        title="Find out what is different about the step that failed",
        change="if a validation or a test runs in between, use torch.no_grad() and a smaller batch "
        "there; if something is kept from step to step, keep loss.item() and .detach().cpu() "
        "instead of tensors; if the samples differ, sort them or cap their lengths, sizes, boxes "
        "or nodes",
        why="The first steps fit, so the usual batch does, too: the later one is larger, evaluates "
        "or saves, or adds to what the earlier ones left behind.",
        # torch 2.13, docs/source/notes/faq.rst
        in_words=_LATE,
    ),
    # ---- libraries beside PyTorch ----
    TracebackSign(
        name="ctranslate2",
        doing="in CTranslate2, which faster-whisper and WhisperX run on",
        is_training=False,
        is_surrounding=True,
        title="Transcribe in smaller batches, or with smaller weights",
        change="lower batch_size and beam_size; set compute_type='int8_float16' or 'int8'; use a "
        "smaller or distilled model; between the steps of a pipeline, del the model and call "
        "gc.collect() and torch.cuda.empty_cache(), because CTranslate2 takes its memory from the "
        "driver",
        why="It takes its memory from the driver: what PyTorch keeps in its cache for the other "
        "models of the pipeline is not available to it.",
        # ctranslate2 3 and 4, src/cuda; faster-whisper 1.1, transcribe.py; whisperx 3, README
        intro=r"(?i)(?:CUDA|HIP) failed with error out of memory",
    ),
    TracebackSign(
        name=INFERENCE,
        doing="during inference",
        is_training=False,
        is_surrounding=True,
        unless=(_TRAINS,),
        kinds=("pytorch-caching-allocator", "driver-no-figures"),
        spelled=Change.BATCH,
        title="Use smaller inputs",
        change="use a smaller or shorter input, and fewer at a time",
        why="Nothing is trained here, so the memory goes to the weights and to what one layer "
        "makes, which grows with the input.",
        # torch 1.2 to 2.13, autograd/grad_mode.py and utils/_contextlib.py
        places=(
            Place(
                file=r"/torch/(?:autograd/grad_mode|utils/_contextlib)\.py$",
                functions="decorate_context",
            ),
            Place(file=rf"(?:^|/)(?:\w*_)?{_INFERS}(?!r|\w{{0,20}}util)\w*\.py$"),
            Place(functions="infer inference predict upscale transcribe enhance generate detect"),
            Place(code=CALLS_OF_LIBRARIES),
        ),
        in_code="unused_graph",
        intro=r"\bvideo \d{1,6}/\d{1,6} \(frame \d",
        in_words=rf"(?is){_RAN}|{_in_clause(f'(?:{_RUNS_MODEL})')}|{_ONLY_RUNS}",
    ),
)

_PLACES: Final = tuple(sign for sign in SIGNS if not sign.is_surrounding)
_SURROUNDINGS: Final = tuple(s for s in SIGNS if s.is_surrounding and s.name != INFERENCE)
_LAST: Final = tuple(sign for sign in SIGNS if sign.name == INFERENCE)
