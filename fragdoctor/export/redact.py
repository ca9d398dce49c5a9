"""Takes private paths and names out of a snapshot; its diagnosis stays the same.

What is private gets a pseudonym that is the same wherever it occurs: paths and functions of the
user's own code and of packages, annotations, metadata. What everybody can read stays: PyTorch's
and Python's own files below their root, and their functions. Sizes, addresses, times, line numbers
and the allocator's settings stay as they are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from fragdoctor.model.snapshot import I32, Annotation, FrameTable, Snapshot
from fragdoctor.trace.code_owners import NATIVE, PACKAGE, STDLIB, TORCH, USER, classify_file
from fragdoctor.trace.stacks import LOSS

ROOT: Final = "/redacted"

# Words of the diagnosis: evaluation, losses and optimizers are recognised by name.
_EVALUATION: Final = re.compile(
    r"eval|valid|infer|predict|test|generate|sample|score", re.IGNORECASE
)
_OPTIMIZER: Final = re.compile(
    r"(?:^|[/\\])optim(?:izers?)?(?:[/\\]|\.py$)|optimizer", re.IGNORECASE
)
_OPTIMIZER_RANGE: Final = re.compile(r"^(Optimizer\.(?:step|zero_grad)#)(.*)$", re.DOTALL)
_OPTIMIZER_STEP: Final = re.compile(r"^(?:_init_group|_?(?:single|multi)_tensor_\w+|step)$")

_SITE: Final = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_TORCH_TREE: Final = re.compile(r"(?:^|[/\\])(torch[/\\].*)$")
_PYTHON: Final = re.compile(r"[/\\](?:lib|lib64|Lib)[/\\](python[0-9.]*)[/\\](.*)$", re.IGNORECASE)
_PSEUDONYM: Final = re.compile(r"/(?:file|module|optimizer)_\d+(?:_eval)?\.py$")
_FROZEN: Final = re.compile(r"<(?:frozen [\w.]+|string|stdin|unknown)>")
_PUBLIC_SOURCE: Final = re.compile(r"(?:^|[/\\])((?:c10|aten|torch[/\\]csrc)[/\\].*)$")
_PUBLIC_SYMBOL: Final = re.compile(
    r"(?:at|c10|torch|std|THP|Py|_Py|cuda|cudnn|cublas|pybind11)(?:::|[A-Z_])"
)
_NATIVE_SUFFIX: Final = re.compile(r"\.(so|dll|pyd|dylib|cpp|cxx|cc|cuh|cu|hpp|h|c)(?:\.[0-9.]+)?$")
_KEPT_FUNCTIONS: Final = frozenset(
    {
        "", "??", "<module>", "<lambda>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>",
        "forward", "backward", "__call__", "__init__", "__enter__", "__exit__", "__iter__",
        "__next__", "__getitem__", "__setitem__", "main", "train", "step", "zero_grad",
    }
)  # fmt: skip


def redacted(snapshot: Snapshot) -> Snapshot:
    """Return a copy without private paths and names; everything else is the same."""
    return _Redaction(snapshot).run()


class Pseudonyms:
    """Gives each distinct text a number within its kind, in the order of first use."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        self._counts: dict[str, int] = {}

    def number(self, kind: str, text: str) -> int:
        """Return the number of a text, 1 for the first of its kind."""
        key = (kind, text)
        if key not in self._numbers:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._numbers[key] = self._counts[kind]
        return self._numbers[key]


def redacted_file(name: str, names: Pseudonyms) -> str:
    """Return a file name of the same class (user, package, torch, ...) that gives nothing away."""
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
    """Return a function's name with private parts removed; those of public files stay.

    Args:
        name: of the function.
        file: its file, already redacted.
        names: the pseudonyms so far.
    """
    if name in _KEPT_FUNCTIONS or _is_public(file) or _OPTIMIZER_STEP.match(name):
        return name
    if _PUBLIC_SYMBOL.match(name) and classify_file(file) == NATIVE:
        return name
    mark = "_eval" if _EVALUATION.search(name) else "_loss" if LOSS.search(name) else ""
    return f"function_{names.number('function', name)}{mark}"


def _is_public(file: str) -> bool:
    """Return whether a redacted file is one of PyTorch or Python that everybody can read."""
    if file.startswith("<"):
        return file.startswith("<frozen ")
    return classify_file(file) in (TORCH, STDLIB) and not _PSEUDONYM.search(file)


def _user_file(name: str, names: Pseudonyms) -> str:
    word = "optimizer" if _OPTIMIZER.search(name) else "file"
    base = re.split(r"[/\\]", name)[-1]
    mark = "_eval" if _EVALUATION.search(base) else ""
    return f"{ROOT}/{word}_{names.number('file', name)}{mark}.py"


def _package_file(name: str, names: Pseudonyms) -> str:
    parts = re.split(r"[/\\]", _SITE.split(name)[-1])
    package = f"package_{names.number('package', parts[0])}"
    return f"{ROOT}/site-packages/{package}/{_user_file(name, names).rsplit('/', 1)[-1]}"


def _torch_file(name: str, names: Pseudonyms) -> str:
    if _SITE.search(name):
        return f"{ROOT}/site-packages/{_slashes(_SITE.split(name)[-1])}"
    tree = _TORCH_TREE.search(name)
    return f"{ROOT}/{_slashes(tree.group(1))}" if tree else _user_file(name, names)


def _python_file(name: str, names: Pseudonyms) -> str:
    if name.startswith("<"):
        return name if _FROZEN.fullmatch(name) else "<string>"
    found = _PYTHON.search(name)
    version, rest = found.groups() if found else ("python3", "")
    rest = _slashes(rest)
    if rest.split("/")[0].removesuffix(".py") not in sys.stdlib_module_names:
        rest = f"module_{names.number('file', name)}.py"
    return f"{ROOT}/lib/{version}/{rest}"


def _native_file(name: str, names: Pseudonyms) -> str:
    if name in ("", "??"):
        return name
    public = _PUBLIC_SOURCE.search(name)
    if public:
        return f"{ROOT}/{_slashes(public.group(1))}"
    suffix = _NATIVE_SUFFIX.search(name.lower())
    base = re.split(r"[/\\]", name)[-1]
    if re.match(r"lib(?:torch|c10|python|cud|cublas|nccl|c\.|stdc|pthread)", base):
        return f"{ROOT}/{base}"
    return f"{ROOT}/native_{names.number('file', name)}.{suffix.group(1) if suffix else 'so'}"


def _slashes(path: str) -> str:
    return path.replace("\\", "/")


class _Redaction:
    """One run: the new strings, and the pseudonyms given so far."""

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
            provenance=replace(s.provenance, source="redacted", unknown_keys={}, unknown_values={}),
        )

    def _frames(self) -> FrameTable:
        table, strings = self._s.frames, self._s.strings
        files: dict[int, int] = {}
        files_by_id: dict[int, str] = {}
        functions: dict[tuple[int, int], int] = {}
        filename = np.full(len(table), -1, np.int32)
        name = np.full(len(table), -1, np.int32)
        for i, (file, function) in enumerate(
            zip(table.filename.tolist(), table.name.tolist(), strict=True)
        ):
            if file >= 0:
                if file not in files:
                    new = redacted_file(strings[file], self._names)
                    files[file] = self._id(new)
                    files_by_id[files[file]] = new
                filename[i] = files[file]
            if function >= 0:
                key = (function, int(filename[i]))
                if key not in functions:
                    new_file = files_by_id.get(int(filename[i]), "")
                    functions[key] = self._id(
                        redacted_function(strings[function], new_file, self._names)
                    )
                name[i] = functions[key]
        return FrameTable(filename, table.line, name)

    def _texts(self, ids: I32, kind: str, kept: Sequence[str]) -> I32:
        """Return the ids of the pseudonyms of a column of texts."""
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
        """Return a pseudonym; PyTorch's own names of an optimizer's ranges keep their beginning."""
        ours = _OPTIMIZER_RANGE.match(name)
        if ours:
            return ours[1] + self._pseudonym(ours[2], "optimizer", ("",))
        return self._pseudonym(name, "annotation", ("",))

    def _pseudonym(self, text: str, kind: str, kept: Sequence[str]) -> str:
        return text if text in kept else f"{kind}_{self._names.number(kind, text)}"

    def _id(self, text: str) -> int:
        return self._ids.setdefault(text, len(self._ids))
