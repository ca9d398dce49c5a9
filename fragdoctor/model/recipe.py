"""What a configuration file of a training or serving program says, as an estimate takes it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct


class Bearing(StrEnum):
    """What an entry that was not used has to do with memory."""

    MATTERS = "matters"
    UNKNOWN = "unknown"  # the entry is not known here
    NONE = "none"


class UsedEntry(Struct, frozen=True):
    """An entry of a file that became an option.

    Attributes:
        key: as the file has it, dots between nested names.
        value: as the file has it, shortened.
        option: what it became, as ``--batch 4``; several entries may share one.
        is_default: not in the file: what the program takes without it.
        overridden_by: the option of the command line that was used instead; "" = none.
    """

    key: str
    value: str
    option: str
    is_default: bool = False
    overridden_by: str = ""


class UnusedEntry(Struct, frozen=True):
    """An entry of a file that became nothing.

    Attributes:
        reason: why not, and which way it would move the figure if that is known.
    """

    key: str
    value: str
    bearing: Bearing
    reason: str = ""


class Recipe(Struct, frozen=True):
    """One file or command line.

    Attributes:
        source: its path, or ``--args``.
        format: what it is, for people: ``Axolotl recipe``.
    """

    source: str
    format: str
    used: Sequence[UsedEntry] = ()
    unused: Sequence[UnusedEntry] = ()

    def unused_that(self, bearing: Bearing) -> Sequence[UnusedEntry]:
        """Return the entries that became nothing and have this to do with memory."""
        return tuple(entry for entry in self.unused if entry.bearing is bearing)


class RecipeUse(Struct, frozen=True):
    """The files, or the question in words (then ``files`` is empty), of an estimate.

    Attributes:
        command: the same question, asked with options alone.
        notes: what the files leave open, one sentence each.
    """

    files: Sequence[Recipe]
    command: str
    notes: Sequence[str] = ()
