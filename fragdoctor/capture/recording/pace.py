"""How many bundles a program that fails again and again may leave."""

from __future__ import annotations


class Pace:
    """Allows the first few at once, then at most one in an interval, up to a number in all.

    Args:
        keep_first: allowed without waiting.
        interval_s: seconds between the ones after these.
        keep_most: allowed in all: a program that fails for days must not fill the disk.
    """

    def __init__(self, keep_first: int, interval_s: float, keep_most: int) -> None:
        self._left = keep_first
        self._left_in_all = keep_most
        self._interval_s = interval_s
        self._last: float | None = None

    def allows(self, now_s: float) -> bool:
        """Return whether one more is allowed at this time (monotonic seconds), and count it."""
        if self._left_in_all <= 0:
            return False
        if self._left > 0:
            self._left -= 1
        elif self._last is not None and now_s - self._last < self._interval_s:
            return False
        self._last = now_s
        self._left_in_all -= 1
        return True
