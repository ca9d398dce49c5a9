"""``fragdoctor.record``: a bundle of one block or function, at its failure or at its end."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, ParamSpec, Self, TypeVar, cast

from fragdoctor.errors import ConfigError
from fragdoctor.recording.history_recorder import Recorder
from fragdoctor.recording.record_options import DEFAULT_MAX_ENTRIES, Options


def need_cuda(what: str) -> Any:
    """Return torch with a usable GPU.

    Args:
        what: what is asked for, as the subject of the sentence.

    Raises:
        ConfigError: if PyTorch is not installed, is built without CUDA, or finds no GPU.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as e:
        raise ConfigError(
            f"{what} needs PyTorch, which is not installed.", hint="pip install torch"
        ) from e
    if not (torch.version.cuda or getattr(torch.version, "hip", None)):
        raise ConfigError(
            f"{what} needs CUDA; PyTorch {torch.__version__} is built without it.",
            hint="Install a CUDA build: https://pytorch.org/get-started",
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{what} needs a GPU, and PyTorch finds none.",
            hint="Check nvidia-smi and CUDA_VISIBLE_DEVICES.",
        )
    return torch


P = ParamSpec("P")
R = TypeVar("R")

STACKS: Final = ("python", "all")


class record:  # noqa: N801 - used as a verb: with fragdoctor.record(): ...
    """Record a block or a function; write a bundle at an out-of-memory error and at its end.

        with fragdoctor.record("bundles/step") as recording:
            train_step()
        print(recording.bundles)

        @fragdoctor.record(at_end=False)
        def train(): ...

    The error is passed on unchanged. If the history is already being recorded (by an outer block,
    by ``fragdoctor run``, by the program itself), it is left running with its own settings. With
    nested blocks, the inner one writes the bundle of a failure.

    Args:
        path: the bundle: a directory to create; an existing one is not touched, a number is added
            instead. Default: ``fragdoctor-record-TIME``. Ranks get a prefix.
        max_entries: events kept per GPU.
        stacks: ``python``, or ``all`` to include C++ frames.
        module_paths: note the running module of the model with each allocation (PyTorch 2.10+).
        census: find the names under which the program holds memory: at most half a second per
            bundle, and rarely at the end of an optimizer's step.
        sources: include the source around the lines that allocate in the bundle.
        at_end: also write a bundle at the end of the block, unless a failure that has one ended it.
        quiet: do not name the bundles on standard error.

    Raises:
        ConfigError: if a value is wrong; on entering, if PyTorch or CUDA is missing.
    """

    def __init__(  # noqa: PLR0913 - one keyword an option
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        max_entries: int = DEFAULT_MAX_ENTRIES,
        stacks: str = "python",
        module_paths: bool = False,
        census: bool = True,
        sources: bool = True,
        at_end: bool = True,
        quiet: bool = False,
    ) -> None:
        if callable(path):
            raise ConfigError("record needs parentheses.", hint="Write: @fragdoctor.record()")
        if stacks not in STACKS:
            raise ConfigError(f"stacks is {stacks!r}.", hint='Choose "python" or "all".')
        if isinstance(max_entries, bool) or not isinstance(max_entries, int) or max_entries < 1:
            raise ConfigError(f"max_entries is {max_entries!r}.", hint="Give a number of events.")
        self._path = path
        self._how: dict[str, Any] = {
            "max_entries": max_entries,
            "stacks": stacks,
            "module_paths": module_paths,
            "census": census,
            "sources": sources,
        }
        self._at_end = at_end
        self._quiet = quiet
        self._recorder: Recorder | None = None

    @property
    def bundles(self) -> tuple[Path, ...]:
        """The bundles written so far."""
        return tuple(Path(b) for b in self._recorder.bundles) if self._recorder is not None else ()

    def __enter__(self) -> Self:
        if self._recorder is not None and self._recorder.is_on:
            raise ConfigError(
                "This record() is already in use.", hint="Make one for each block: record(...)"
            )
        torch = need_cuda("Recording")
        torch.cuda.init()
        place = Path(self._path or f"fragdoctor-record-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
        options = Options(str(place.parent), **self._how)
        self._recorder = Recorder(options, torch, name=place.name)
        self._recorder.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        recorder = self._recorder
        if recorder is not None:
            recorder.on_block_end(error, at_end=self._at_end)
            for bundle in () if self._quiet else recorder.bundles:
                print(f"fragdoctor: recorded in {bundle}", file=sys.stderr)
            for problem in () if self._quiet else recorder.problems:
                print(f"fragdoctor: not recorded: {problem}", file=sys.stderr)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that is recorded at each call, as a block of its own."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"record() cannot wrap the generator {function.__name__}.",
                hint="Use it as a block: with fragdoctor.record(): ...",
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def recorded_later(*args: P.args, **kwargs: P.kwargs) -> Any:
                with self._another():
                    return await function(*args, **kwargs)

            return cast("Callable[P, R]", recorded_later)

        @functools.wraps(function)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._another():
                return function(*args, **kwargs)

        return recorded

    def _another(self) -> record:
        return record(self._path, **self._how, at_end=self._at_end, quiet=self._quiet)
