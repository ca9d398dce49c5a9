"""What all reports share: how they look, the table of views and the table of formats."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from msgspec import Struct

from fragdoctor.errors import ConfigError

MIN_WIDTH: Final = 60
MAX_WIDTH: Final = 120


class Verbosity(IntEnum):
    """How much a report says."""

    QUIET = 0
    NORMAL = 1
    FULL = 2


class RenderOptions(Struct, frozen=True):
    """How a report looks; each format uses the attributes that apply to it.

    Attributes:
        width: columns of text, kept between 60 and 120 because longer lines are hard to read.
        color: whether to use ANSI colors.
        unicode: whether to use bars, ellipses and rules beyond ASCII; off on a pipe.
        verbosity: quiet is the answer alone, full is everything.
        source_root: absolute directory of the sources; formats that point at files write paths
            below it relative to it. "" leaves paths as they are.
        link: link target for lines of a program at a terminal, with ``{path}`` and ``{line}``;
            "" for no links.
        path_map: pairs (as recorded, here): the start of a recorded path and its replacement on
            this machine, absolute or relative to ``source_root``.
    """

    width: int = 80
    color: bool = False
    unicode: bool = False
    verbosity: Verbosity = Verbosity.NORMAL
    source_root: str = ""
    path_map: tuple[tuple[str, str], ...] = ()
    link: str = ""


ReportFormat = Literal["text", "json", "markdown", "html", "github", "sarif", "junit"]
"""Formats of a diagnosis; the module with the name of a format writes it."""

DocumentFormat = Literal["text", "json", "markdown", "html"]
"""Formats that every command has."""

FORMATS: Final[tuple[str, ...]] = get_args(ReportFormat)
DOCUMENT_FORMATS: Final[tuple[str, ...]] = get_args(DocumentFormat)

_WITH_DOCUMENT: Final = "compare simulate estimate gpus models pack fleet explain prescription"

VIEWS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    dict.fromkeys(("analyze", "oom", "check", "rehearse"), FORMATS)
    | dict.fromkeys(_WITH_DOCUMENT.split(), DOCUMENT_FORMATS)
)
"""View -> its formats; the module ``views.VIEW``, or that in ``_MODULES``, fills its document."""

_WITH_SOURCES: Final = ("analyze", "oom", "rehearse")
"""Views that quote the program; the options say where its sources are."""

_WITH_SCRIPT: Final = (*_WITH_SOURCES, "compare", "fleet")
"""Views whose page has a script: it sorts tables, or lets the reader explore."""

_MODULES: Final = {"oom": "analyze", "gpus": "estimate", "models": "estimate", "fleet": "job"}


def check_format(view: str, name: str) -> None:
    """Raise an error unless a view has a format.

    Raises:
        ConfigError: the view does not have the format; the hint lists the formats that it has.
    """
    known = VIEWS[view]
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"There is no output format {name!r}.", hint=f"{hint}The formats are {', '.join(known)}."
    )


def render(view: str, name: str, result: Any, options: RenderOptions, **more: Any) -> str:
    """Return the report of a command, ending in a newline.

    ``view`` is a key of ``VIEWS``; ``more`` holds further arguments of that view.

    Raises:
        ConfigError: the view has no such format.
    """
    check_format(view, name)
    writer = importlib.import_module(f"fragdoctor.report.{name}")
    if name == "json":
        return str(writer.dumps(writer.document_of(view, result, **more)))
    if name in DOCUMENT_FORMATS:
        module = importlib.import_module(f"fragdoctor.report.views.{_MODULES.get(view, view)}")
        fill = getattr(module, f"{view}_document", module.document)
        if view in _WITH_SOURCES:
            more["options"] = options
        document = fill(result, **more)
        if name == "html" and view in _WITH_SCRIPT:
            writer = importlib.import_module("fragdoctor.report.page.page")
            return str(writer.page_of(result, document))
        return str(writer.render(document, options))
    return str(writer.render(result, options))
