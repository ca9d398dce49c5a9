"""What the cells of a notebook printed, as the text of a log."""

from __future__ import annotations

import msgspec


class _Output(msgspec.Struct):
    text: str | list[str] = ""
    traceback: list[str] = []
    ename: str = ""
    evalue: str = ""

    @property
    def raised(self) -> str:
        """The error of the cell; a traceback that was cut off or cleared lacks the message."""
        traceback = "\n".join(self.traceback)
        is_whole = self.evalue in traceback
        return traceback if is_whole else f"{traceback}\n{self.ename}: {self.evalue}"


class _Cell(msgspec.Struct):
    outputs: list[_Output] = []


class _Notebook(msgspec.Struct):
    nbformat: int
    cells: list[_Cell]


def printed_by_cells(text: str) -> str:
    """Return what a notebook's cells printed and raised, or the text itself if it is no notebook.

    An error that a cell raised is in the notebook three times, and counts once.
    """
    if '"nbformat"' not in text:
        return text
    try:
        notebook = msgspec.json.decode(text.encode(), type=_Notebook)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return text
    parts: list[str] = []
    for output in (output for cell in notebook.cells for output in cell.outputs):
        parts += ["".join(output.text), output.raised]
    return "\n".join(filter(None, parts))
