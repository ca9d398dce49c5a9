"""What an estimate takes from a configuration file of a training or serving program."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct


class Bearing(StrEnum):
    """Whether an unused entry matters for memory."""

    MATTERS = "matters"
    UNKNOWN = "unknown"  # fragdoctor does not know the entry
    NONE = "none"


class UsedEntry(Struct, frozen=True):
    """An entry of a file that became an option.

    Attributes:
        key: key in the file, with dots between nested names.
        value: value in the file, shortened.
        option: the option that it became, such as ``--batch 4``; several entries may share one.
        is_default: whether it is the program's default and not in the file.
        overridden_by: the command-line option that was used instead; "" means none.
    """

    key: str
    value: str
    option: str
    is_default: bool = False
    overridden_by: str = ""


class UnusedEntry(Struct, frozen=True):
    """An entry of a file that was not used.

    Attributes:
        reason: why it was not used if memory depends on it, and in which direction, if known.
    """

    key: str
    value: str
    bearing: Bearing
    reason: str = ""


class Recipe(Struct, frozen=True):
    """One file or command line.

    Attributes:
        source: its path, or ``--args``.
        format: kind of file, for people: ``Axolotl recipe``.
    """

    source: str
    format: str
    used: Sequence[UsedEntry] = ()
    unused: Sequence[UnusedEntry] = ()

    def unused_that(self, bearing: Bearing) -> Sequence[UnusedEntry]:
        """Return the unused entries with this bearing on memory."""
        return tuple(entry for entry in self.unused if entry.bearing is bearing)


class RecipeUse(Struct, frozen=True):
    """The files of an estimate, or its question in words (then ``files`` is empty).

    Attributes:
        command: the same question, asked with options only.
        notes: what the files leave open, one sentence each.
    """

    files: Sequence[Recipe]
    command: str
    notes: Sequence[str] = ()
