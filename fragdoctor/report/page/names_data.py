"""The names of the blocks on the page: modules of the model, and owners where recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fragdoctor.analysis.modules import MAX_DEPTH, MAX_MODULES, ModulePaths
from fragdoctor.analysis.owners import named_blocks
from fragdoctor.model.arrays import largest_groups
from fragdoctor.model.census import Census
from fragdoctor.model.snapshot import I64
from fragdoctor.report import escape
from fragdoctor.report.document import plain
from fragdoctor.report.page.blob import Sink
from fragdoctor.report.views.owners import owner_text
from fragdoctor.trace.trace import Trace

_MAX_TEXT: Final = 120
_FURTHER: Final = "further names"


def names_data(
    trace: Trace, censuses: Sequence[Census], rows: I64, sink: Sink
) -> dict[str, Any]:  # fmt: skip
    """Return the JSON part with the names of some rows of ``Lives``: ``module`` and ``owner``.

    Each has ``paths``, lists of the parts of a name from the outermost, and ``of``, for each row
    its 1-based place in ``paths``, or 0 if it has no name. A kind that was not recorded is missing.
    """
    sizes = trace.lives.size_bytes[rows]
    found: dict[str, Any] = {}
    modules = ModulePaths.of(trace)
    if modules.paths:
        texts = {at: path.split(".", MAX_DEPTH) for at, path in enumerate(modules.paths)}
        found["module"] = _encode(modules.of_row[rows].astype(np.int64), sizes, texts, sink)
    named = named_blocks(trace, censuses)
    if named is not None:
        owners = {at: [plain(owner_text(owner))] for at, owner in enumerate(named.owners)}
        found["owner"] = _encode(named.of_row[rows].astype(np.int64), sizes, owners, sink)
    return found


def _encode(
    place: I64, sizes: npt.NDArray[np.int64], texts: dict[int, list[str]], sink: Sink
) -> dict[str, Any]:  # fmt: skip
    most = largest_groups(place[place >= 0], sizes[place >= 0]).group
    shown = [int(at) for at in most[:MAX_MODULES]]
    number = np.full(max(texts, default=-1) + 2, 0, np.int64)  # the last entry is for no name
    number[most[MAX_MODULES:]] = len(shown) + 1
    number[shown] = np.arange(1, len(shown) + 1)
    paths = [[_shown(part) for part in texts[at]] for at in shown]
    if len(most) > len(shown):
        paths.append([_FURTHER])
    return {"paths": paths, "of": sink.blob.add(number[place])}


def _shown(text: str) -> str:
    return escape.visible(escape.shorten_left(text, _MAX_TEXT)) or "(no name)"
