"""What goes wrong inside the user's own code, as one sentence with the line it happened on."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from fragdoctor.errors import ConfigError, FragdoctorError
from fragdoctor.rehearse.tracing.request_log import shown

PACKAGE: Final = str(Path(__file__).parents[2])
TORCH: Final = str(Path(torch.__file__).parent)
STDLIB: Final = sysconfig.get_path("stdlib")
LONGEST: Final = 300


@contextmanager
def told_in_one_sentence(spec: str) -> Iterator[None]:
    """Turn whatever the user's code raises into a sentence.

    Raises:
        ConfigError: with the innermost line of the user's code; the cause is kept for --verbose.
    """
    try:
        yield
    except FragdoctorError:
        raise
    except (ImportError, SyntaxError) as err:
        where = _line_of_syntax(err) or innermost_line(err)
        at = f" at {where}" if where else ""
        raise ConfigError(
            f"{spec} failed{at}: {type(err).__name__}: {_first_line(err)}",
            hint="The module must import in this environment: install what it needs here.",
        ) from err
    except SystemExit as err:
        where = innermost_line(err)
        raise ConfigError(
            f"{spec} ended the program{f' at {where}' if where else ''}: SystemExit: {err}",
            hint="Give a factory that builds the model and returns it, not a whole program.",
        ) from err
    except Exception as err:  # the user's code may raise anything
        where = innermost_line(err)
        at = f" at {where}" if where else ""
        if isinstance(err, NotImplementedError):
            raise ConfigError(
                f"{spec}: an operation{at} cannot run on fake tensors: {_first_line(err)}",
                hint="Register a fake kernel with PyTorch's register_fake, or use plain PyTorch "
                "operations in the traced model.",
            ) from err
        raise ConfigError(
            f"{spec} failed{at}: {type(err).__name__}: {_first_line(err)}",
            hint="Your code was run on fake CUDA tensors; does the same step run on a GPU? "
            "--verbose shows the traceback.",
        ) from err


def _line_of_syntax(error: BaseException) -> str:
    """Return where a SyntaxError is; its traceback ends in the importer."""
    if not isinstance(error, SyntaxError) or not error.filename:
        return ""
    return f"{shown(error.filename)}:{error.lineno}"


def innermost_line(error: BaseException) -> str:
    """Return ``file:line in function`` of the innermost frame of the user's code, or ""."""
    found = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith((PACKAGE, TORCH, "<")) or _is_stdlib(frame.filename):
            continue
        found = f"{shown(frame.filename)}:{frame.lineno} in {frame.name}"
    return found


def _is_stdlib(filename: str) -> bool:
    return filename.startswith(STDLIB) and "site-packages" not in filename


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0][:LONGEST]
