"""One source line through many runs: neighbours are matched, and the matches are chained."""

from __future__ import annotations

from collections.abc import Sequence

from fragdoctor.comparison.line_uses import LineUse
from fragdoctor.comparison.matching import match_lines
from fragdoctor.model.finding import Location


def line_tracks(
    runs: Sequence[Sequence[LineUse]], *, peak: bool
) -> list[tuple[Location | None, list[int]]]:
    """Return each line's newest place and its bytes in every run, 0 where it is not there."""
    places: list[Location | None] = []
    values: list[list[int]] = []
    current: dict[int, int] = {}  # row of the run looked at -> track

    def begin(run: int, row: int, use: LineUse) -> None:
        current[row] = len(values)
        places.append(use.place)
        values.append([0] * len(runs))
        values[-1][run] = use.bytes_at(peak=peak)

    for row, use in enumerate(runs[0]):
        begin(0, row, use)
    for run in range(1, len(runs)):
        before, current = current, {}
        for i, j in match_lines(runs[run - 1], runs[run]):
            if j is None:
                continue
            use = runs[run][j]
            if i is None or i not in before:
                begin(run, j, use)
                continue
            track = before[i]
            current[j] = track
            places[track] = use.place
            values[track][run] = use.bytes_at(peak=peak)
    return list(zip(places, values, strict=True))
