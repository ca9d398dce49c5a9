"""What every report format has in common: the options, the plug point, the table of formats."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Final, Protocol, cast

from fragdoctor.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fragdoctor.model.diagnosis import Diagnosis

MIN_WIDTH: Final = 60
MAX_WIDTH: Final = 120


class Verbosity(IntEnum):
    """How much a report says."""

    QUIET = 0
    NORMAL = 1
    VERBOSE = 2


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """How a report looks; formats take what concerns them.

    Attributes:
        width: columns of text; held between 60 and 120, longer lines are hard to read.
        color: ANSI colours.
        unicode: bars, ellipses and rules beyond ASCII; off on a pipe.
        verbosity: quiet is the verdict alone, verbose is everything.
        source_root: directory of the sources (absolute); paths below it are written relative to it
            where a format points at files, "" to leave paths as they are.
    """

    width: int = 80
    color: bool = False
    unicode: bool = False
    verbosity: Verbosity = Verbosity.NORMAL
    source_root: str = ""

    @property
    def text_width(self) -> int:
        """Columns to lay out for."""
        return max(MIN_WIDTH, min(self.width, MAX_WIDTH))


class Renderer(Protocol):
    """One output format: a diagnosis in, the whole report out."""

    def __call__(self, diagnosis: Diagnosis, options: RenderOptions) -> str:
        """Return the report, ending in a newline."""
        ...


# format -> module, which is imported when it is asked for.
FORMATS: Final = MappingProxyType(
    {
        "text": "fragdoctor.report.text",
        "json": "fragdoctor.report.json",
        "markdown": "fragdoctor.report.markdown",
        "html": "fragdoctor.report.html",
        "github": "fragdoctor.report.github",
        "sarif": "fragdoctor.report.sarif",
        "junit": "fragdoctor.report.junit",
    }
)


def renderer(name: str) -> Renderer:
    """Return the renderer of a format.

    Raises:
        ConfigError: there is no such format.
    """
    return cast("Renderer", module_of(FORMATS, name, "output").render_diagnosis)


def module_of(formats: Mapping[str, str], name: str, kind: str) -> ModuleType:
    """Return the module that writes a format, loading it.

    Args:
        formats: name of a format -> name of its module.
        name: the format that was asked for.
        kind: what the formats are of, for people.

    Raises:
        ConfigError: there is no such format.
    """
    module = formats.get(name)
    if module is None:
        near = difflib.get_close_matches(name, formats, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"There is no {kind} format {name!r}.",
            hint=f"{hint}The formats are {', '.join(formats)}.",
        )
    return importlib.import_module(module)
