"""What every page of ours stands on: the template environment, the sources, the strict policy."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Final

import jinja2
from markupsafe import Markup

from fragdoctor.report import escape
from fragdoctor.units import format_count, format_share, format_size, plural

MAX_SHOWN: Final = 1500
"""Characters of one text: a file may hold names of megabytes."""


def page_environment() -> jinja2.Environment:
    """Return an environment that escapes every expression and shows what cannot be seen."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fragdoctor.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": format_size, "count": format_count, "share": format_share}
    environment.globals["plural"] = plural
    return environment


def page_policy(style: str, script: str = "") -> str:
    """Return the content security policy: this style and this script, by hash, and nothing else."""
    scripts = f"'{_hash(script)}'" if script else "'none'"
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src {scripts}; "
        "img-src data:; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def page_source(name: str) -> str:
    """Return a style or script of ours: ``report/report.css``."""
    return files("fragdoctor.report").joinpath("templates", *name.split("/")).read_text("utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _visible(value: object) -> object:
    """Make what cannot be seen visible and bound what is long, in every expression."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    n_more = len(value) - MAX_SHOWN
    shown = escape.visible(value[:MAX_SHOWN])
    return f"{shown} ... ({format_count(n_more)} more characters)" if n_more > 0 else shown
