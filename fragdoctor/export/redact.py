"""Remove private paths and names from a snapshot; its diagnosis stays the same.

Private text gets a pseudonym that is the same wherever the text occurs: paths and functions of the
user's own code and of packages, annotations, metadata, and unknown words in the settings. Public
text is listed and stays: a path of PyTorch or Python if each part of it is in ``library_words.txt``
(along with the functions of that file), a C++ name if each part is in ``_NATIVE_WORDS``, a package
if it is in ``_PACKAGES``. Sizes, addresses, times and line numbers stay as they are.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Final

import numpy as np
from msgspec.structs import replace

from fragdoctor.model.conf_keys import KEYS
from fragdoctor.model.marks import BACKWARD, NO_GRAD, PROGRAM
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import I32, Annotation, FrameTable, Snapshot
from fragdoctor.trace.stacks import (
    EVALUATION,
    LOSS,
    NATIVE,
    PACKAGE,
    STDLIB,
    TORCH,
    USER,
    classify_file,
)

ROOT: Final = "/redacted"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words that the diagnosis needs: it recognizes evaluation, losses and optimizers by name.
_OPTIMIZER: Final = re.compile(
    r"(?:^|[/\\])optim(?:izers?)?(?:[/\\]|\.py$)|optimizer", re.IGNORECASE
)
_RANGE: Final = re.compile(
    rf"^(Optimizer\.(?:step|zero_grad)#|{re.escape(NO_GRAD)})(.*)$", re.DOTALL
)
_OPTIMIZER_STEP: Final = re.compile(r"^(_?(?:single|multi)_tensor_)\w+$")
_ENGINE: Final = re.compile(r"torch::autograd::Engine::(?:thread_|evaluate_|reentrant)")

_SITE: Final = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_TORCH_FOLDER: Final = re.compile(r"(?:^|(?<=[/\\]))torch[/\\]")
_PYTHON: Final = re.compile(r"[/\\](?:lib|lib64|Lib)[/\\](python[0-9.]*)[/\\](.*)$", re.IGNORECASE)
_PSEUDONYM: Final = re.compile(r"/(?:file|module|optimizer)_\d+(?:_eval)?\.py$")
_FROZEN: Final = re.compile(r"<frozen ([\w.]+)>")
_NO_FILES: Final = ("<string>", "<stdin>", "<unknown>")
_PUBLIC_SOURCE: Final = re.compile(
    r"(?:^|[/\\])((?:c10|aten|torch[/\\]csrc)[/\\](?:[a-z0-9_]{1,20}[/\\]){0,6}(\w{1,60})\.(?:cpp|cu|h))$"
)
_PUBLIC_LIBRARY: Final = re.compile(
    r"lib(?:torch(?:_cpu|_cuda|_cuda_linalg|_hip|_python|_global_deps)?|c10(?:_cuda|_hip)?|shm"
    r"|python3?(?:\.[0-9]{1,2})?|cuda|cudart|cublas|cublasLt|cudnn|cufft|cusparse|cusolver|curand"
    r"|nccl|nvrtc|amdhip64|rccl|c|m|dl|rt|gomp|gcc_s|stdc\+\+|pthread)"
    r"(?:-[0-9a-f]{1,8})?\.so(?:\.[0-9]{1,4}){0,4}"
)
_NATIVE_WORDS: Final = _words(
    """
    at c10 cuda hip detail impl native autograd torch jit profiler python_function utils
    CUDACachingAllocator Native NativeCachingAllocator DeviceCachingAllocator PrivatePool
    CUDAAllocator CUDAAllocatorConfig MemPool CUDAGraph HIPCachingAllocator StorageImpl
    TensorImpl Storage Tensor DataPtr TensorBase Dispatcher OperatorHandle empty empty_cuda
    empty_strided_cuda empty_generic empty_strided_generic empty_memory_format empty_strided
    empty_like zeros zeros_like ones full malloc free raw_alloc allocate alloc_block
    get_free_block allocate_new recordHistory snapshot emptyCache resize_
    Engine thread_main thread_init evaluate_function reentrant_thread_init execute
    execute_with_graph_task call_function PyNode Node AccumulateGrad THPEngine_run_backward
    THPVariable_clear _PyEval_EvalFrameDefault _PyFunction_Vectorcall PyObject_Call
    PyEval_EvalCode _PyObject_MakeTpCall Py_RunMain Py_BytesMain PyObject_Vectorcall main
    _start __libc_start_main __libc_start_call_main clone start_thread pthread_create cudaMalloc
    cudaFree cudaLaunchKernel add mul div sub matmul mm bmm addmm linear conv2d convolution
    layer_norm softmax log_softmax relu gelu dropout cat stack copy_ clone to _to_copy sum mean
    operator() call redispatch boxed
    """
)
"""Parts of C++ names; a name stays if all its parts are here."""

_PACKAGES: Final = _words(
    """
    accelerate apex bitsandbytes datasets deepspeed diffusers fairscale flash_attn fsspec jax
    lightning megatron numpy optuna pandas peft pytorch_lightning ray safetensors scipy
    sentence_transformers timm tokenizers torchaudio torchmetrics torchvision transformers
    triton trl unsloth vllm xformers
    """
)
_CONF_WORDS: Final = frozenset(
    {*KEYS, "True", "False", "true", "false", "native", "cudaMallocAsync", "hipMallocAsync"}
)
_CONF_PART: Final = re.compile(r"[^,:\[\]\s]+")
_NUMBER: Final = re.compile(r"[-+]?[0-9]{1,20}(?:\.[0-9]{0,20})?|>")
_RECORDED_KEYS: Final = frozenset(
    {
        *KEYS, "max_split_size", "last_allocator_settings", "max_non_split_rounding_size",
        "max_round_threshold", "large_segment_size", "pinned_reserve_segment_size",
        "max_cached_size", "pinned_max_round_size_mb",
    }
)  # fmt: skip
_NATIVE_SUFFIX: Final = re.compile(r"\.(so|dll|pyd|dylib|cpp|cxx|cc|cuh|cu|hpp|h|c)(?:\.[0-9.]+)?$")
_KEPT_FUNCTIONS: Final = frozenset(
    {
        "", "??", "<module>", "<lambda>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>",
        "forward", "backward", "__call__", "__init__", "__enter__", "__exit__", "__iter__",
        "__next__", "__getitem__", "__setitem__", "main", "train", "step", "zero_grad",
        "_init_group",
    }
)  # fmt: skip


def redacted(snapshot: Snapshot) -> Snapshot:
    """Return a copy without private paths and names; everything else is the same."""
    return _Redaction(snapshot).run()


class Pseudonyms:
    """Gives each distinct text a number within its kind, in the order of first use."""

    def __init__(self) -> None:
        self._numbers = defaultdict[str, dict[str, int]](dict)

    def number(self, kind: str, text: str) -> int:
        """Return the number of a text, 1 for the first of its kind."""
        known = self._numbers[kind]
        return known.setdefault(text, len(known) + 1)


def redacted_file(name: str, names: Pseudonyms) -> str:
    """Return a file name of the same class (user, package, torch, ...) that reveals nothing."""
    kind = classify_file(name)
    new = {
        USER: _user_file,
        PACKAGE: _package_file,
        TORCH: _torch_file,
        STDLIB: _python_file,
        NATIVE: _native_file,
    }[kind](name, names)
    return new if classify_file(new) == kind else _user_file(name, names)


def redacted_function(name: str, file: str, names: Pseudonyms) -> str:
    """Return a function's name with private parts removed; names in public files stay.

    ``file`` is already redacted; ``names`` are the pseudonyms so far.
    """
    if name in _KEPT_FUNCTIONS or _is_public(file):
        return name
    if classify_file(file) == NATIVE:
        return _symbol(name) or f"function_{names.number('function', name)}"
    step = _OPTIMIZER_STEP.match(name)
    if step is not None:
        return f"{step[1]}function_{names.number('function', name)}"
    mark = "_eval" if EVALUATION.search(name) else "_loss" if LOSS.search(name) else ""
    return f"function_{names.number('function', name)}{mark}"


def _symbol(name: str) -> str:
    """Return a C++ name without its arguments if all its parts are known, otherwise ""."""
    if engine := _ENGINE.search(name[:1000]):
        return f"{engine.group()}main" if engine.group().endswith("thread_") else engine.group()
    name = name.partition("(")[0].partition("<")[0]
    return name if set(name.split("::")) <= _NATIVE_WORDS else ""


@cache
def _library_words() -> tuple[frozenset[str], frozenset[str]]:
    """Return the words in paths of PyTorch and of Python; see ``tools/library_words.py``."""
    text = (resources.files("fragdoctor.export") / "library_words.txt").read_text("utf-8")
    torch, python = text.split("\n\n")
    return frozenset(torch.split()), frozenset(python.split())


def _known_path(path: str, words: frozenset[str], name: str, names: Pseudonyms) -> str:
    """Return a path below a library's root; if a part is unknown, its file gets a pseudonym."""
    *folders, file = _slashes(path).split("/")
    n_known = next((i for i, f in enumerate(folders) if f not in words), len(folders))
    if n_known == len(folders) and file.endswith(".py") and file[:-3] in words:
        return "/".join([*folders, file])
    return "/".join([*folders[:n_known], f"module_{names.number('file', name)}.py"])


def _is_public(file: str) -> bool:
    """Return whether a redacted file is a public source file of PyTorch or Python."""
    if file.startswith("<"):
        return file.startswith("<frozen ")
    return classify_file(file) in (TORCH, STDLIB) and not _PSEUDONYM.search(file)


def _user_file(name: str, names: Pseudonyms) -> str:
    word = "optimizer" if _OPTIMIZER.search(name) else "file"
    base = re.split(r"[/\\]", name)[-1]
    mark = "_eval" if EVALUATION.search(base) else ""
    return f"{ROOT}/{word}_{names.number('file', name)}{mark}.py"


def _package_file(name: str, names: Pseudonyms) -> str:
    parts = re.split(r"[/\\]", _SITE.split(name)[-1])
    known = parts[0] in _PACKAGES
    package = parts[0] if known else f"package_{names.number('package', parts[0])}"
    return f"{ROOT}/site-packages/{package}/{_user_file(name, names).rsplit('/', 1)[-1]}"


def _torch_file(name: str, names: Pseudonyms) -> str:
    words = _library_words()[0]
    if _SITE.search(name):
        root, inner = f"{ROOT}/site-packages", _SITE.split(name)[-1]
    else:
        parts = _TORCH_FOLDER.split(name)
        root, inner = ROOT, f"torch/{parts[-1]}"
    inner = _slashes(inner)
    if "/" not in inner:
        return f"{root}/torch.py"
    return f"{root}/torch/{_known_path(inner.partition('/')[2], words, name, names)}"


def _python_file(name: str, names: Pseudonyms) -> str:
    if name.startswith("<"):
        frozen = _FROZEN.fullmatch(name)
        is_known = frozen is not None and set(frozen[1].split(".")) <= _library_words()[1]
        return name if is_known or name in _NO_FILES else "<string>"
    found = _PYTHON.search(name)
    version, rest = found.groups() if found else ("python3", "")
    return f"{ROOT}/lib/{version}/{_known_path(rest, _library_words()[1], name, names)}"


def _native_file(name: str, names: Pseudonyms) -> str:
    if name in ("", "??"):
        return name
    public = _PUBLIC_SOURCE.search(name)
    if public and public[2] in _NATIVE_WORDS | _NATIVE_FILES:
        *folders, file = _slashes(public[1]).split("/")
        return "/".join([ROOT, *(f for f in folders if f in _NATIVE_FOLDERS), file])
    suffix = _NATIVE_SUFFIX.search(name.lower())
    base = re.split(r"[/\\]", name)[-1]
    if _PUBLIC_LIBRARY.fullmatch(base):
        return f"{ROOT}/{base}"
    return f"{ROOT}/native_{names.number('file', name)}.{suffix.group(1) if suffix else 'so'}"


_NATIVE_FILES: Final = _words(
    """
    CUDAMallocAsyncAllocator CUDAAllocatorConfig AllocatorConfig engine python_engine function
    accumulate_grad memory_snapshot Module python_variable python_torch_functions_manual
    EmptyTensor TensorFactories Allocator CachingDeviceAllocator CUDAException
    """
)
_NATIVE_FOLDERS: Final = _words(
    """
    c10 aten torch csrc src ATen core cuda hip cudnn native autograd functions jit python utils
    impl util profiler
    """
)


def _slashes(path: str) -> str:
    return path.replace("\\", "/")


class _Redaction:
    """One redaction: the new strings, and the pseudonyms given so far."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._s = snapshot
        self._names = Pseudonyms()
        self._ids: dict[str, int] = {}

    def run(self) -> Snapshot:
        s = self._s
        frames = self._frames()
        events = replace(
            s.events,
            compile_context=self._texts(s.events.compile_context, "context", ("N/A", "")),
            user_metadata=self._texts(s.events.user_metadata, "metadata", ("",)),
        )
        return replace(
            s,
            strings=tuple(self._ids),
            frames=frames,
            events=events,
            annotations=self._annotations(),
            host_segments=(),
            host_events=None,
            settings=self._settings(),
            provenance=replace(s.provenance, source="redacted", unknown_keys={}, unknown_values={}),
        )

    def _settings(self) -> AllocatorSettings:
        """Return the settings without keys and words that PyTorch does not know."""
        settings = self._s.settings
        return settings.changed(
            conf=_CONF_PART.sub(self._conf_word, settings.conf),
            other={k: v for k, v in settings.other.items() if k in _RECORDED_KEYS},
        )

    def _conf_word(self, match: re.Match[str]) -> str:
        word = match.group()
        if word in _CONF_WORDS or _NUMBER.fullmatch(word):
            return word
        return f"unknown_{self._names.number('setting', word)}"

    def _frames(self) -> FrameTable:
        table, strings = self._s.frames, self._s.strings

        @cache
        def file_of(file: int) -> str:
            return "" if file < 0 else redacted_file(strings[file], self._names)

        @cache
        def function_of(function: int, file: str) -> str:
            return redacted_function(strings[function], file, self._names)

        filename = np.full(len(table), -1, np.int32)
        name = np.full(len(table), -1, np.int32)
        pairs = zip(table.filename.tolist(), table.name.tolist(), strict=True)
        for i, (file, function) in enumerate(pairs):
            new = file_of(file)
            if file >= 0:
                filename[i] = self._id(new)
            if function >= 0:
                name[i] = self._id(function_of(function, new))
        return FrameTable(filename, table.line, name)

    def _texts(self, ids: I32, kind: str, kept: Sequence[str]) -> I32:
        """Return the ids of the pseudonyms for a column of texts."""
        used, position = np.unique(ids, return_inverse=True)
        new = np.full(len(used), -1, np.int32)
        for i, string in enumerate(used.tolist()):
            if string >= 0:
                new[i] = self._id(self._pseudonym(self._s.strings[string], kind, kept))
        result: I32 = new[position.reshape(-1)]
        return result

    def _annotations(self) -> tuple[Annotation, ...]:
        return tuple(
            replace(
                a,
                name=self._annotation(a.name),
                stage=a.stage if a.stage in ("START", "END") else "",
            )
            for a in self._s.annotations
        )

    def _annotation(self, name: str) -> str:
        """Return a pseudonym; PyTorch's names and ours keep their prefix."""
        known = _RANGE.match(name)
        if known:
            kind = "model" if known[1] == NO_GRAD else "optimizer"
            return known[1] + self._pseudonym(known[2], kind, ("",))
        return self._pseudonym(name, "annotation", ("", BACKWARD, PROGRAM))

    def _pseudonym(self, text: str, kind: str, kept: Sequence[str]) -> str:
        return text if text in kept else f"{kind}_{self._names.number(kind, text)}"

    def _id(self, text: str) -> int:
        return self._ids.setdefault(text, len(self._ids))
