"""Columns of DataFrames, for notebooks. Text is as hostile as the file that it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum, StrEnum
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fragdoctor.model.finding import Location


def table(
    rows: Iterable[tuple[Any, ...]], columns: Sequence[str], numbers: Sequence[str] = ()
) -> pd.DataFrame:
    """Return rows as a DataFrame; the columns ``numbers`` hold integers that may be missing."""
    frame = pd.DataFrame(list(rows), columns=list(columns), dtype=object)
    return frame.astype(dict.fromkeys(numbers, "Int64"))


def table_of(items: Iterable[object], texts: Sequence[str], numbers: Sequence[str]) -> pd.DataFrame:
    """Return attributes of items as a DataFrame, one row per item; ``a.b`` is the column ``b``.

    Locations and string enums become text; the columns ``numbers`` hold integers that may be
    missing.
    """
    read = attrgetter(*texts, *numbers)
    columns = [name.rpartition(".")[2] for name in (*texts, *numbers)]
    rows = (tuple(map(_cell, read(item))) for item in items)
    return table(rows, columns, columns[len(texts) :])


def _cell(value: object) -> object:
    return str(value) if isinstance(value, Location | StrEnum) else value


def members(codes: npt.NDArray[np.uint8], enum: type[IntEnum]) -> pd.Categorical[Any]:
    """Return codes as the lowercase member names of an enum that counts from 0."""
    names = pd.Index([member.name.lower() for member in enum], dtype=object)
    return pd.Categorical.from_codes(codes.astype(np.int8), categories=names)


def texts_of(ids: npt.NDArray[np.int32], texts: Sequence[str]) -> pd.Categorical[Any]:
    """Return texts by id as a categorical; equal texts become one category, -1 is missing."""
    used, compact = np.unique(ids, return_inverse=True)  # often a few of many texts
    chosen = [texts[int(i)] for i in used if i >= 0]
    codes, categories = pd.factorize(np.array(chosen, dtype=object))
    lookup = np.append(np.full(len(used) - len(chosen), -1), codes).astype(np.int32)
    found = lookup[compact.ravel()]
    return pd.Categorical.from_codes(found, categories=pd.Index(categories, dtype=object))


def nullable(values: npt.NDArray[np.int64]) -> pd.api.extensions.ExtensionArray:
    """Return integers, with negative ones marked as missing."""
    return pd.arrays.IntegerArray(values.copy(), values < 0)


def sparse(values: Mapping[int, int], rows: slice) -> pd.api.extensions.ExtensionArray:
    """Return the values of some of the rows; the others are missing."""
    wanted = range(rows.start, rows.stop)
    return pd.Series(values, dtype="UInt64").reindex(wanted).array  # type: ignore[no-any-return]
