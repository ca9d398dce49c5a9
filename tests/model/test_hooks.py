from __future__ import annotations

import contextlib
import threading

from fragdoctor.model.hooks import report_progress, watched_by

Told = list[tuple[str, int, int]]


def test_tell_without_a_watcher_does_nothing() -> None:
    report_progress("Reading", 1, 2)


def test_tell_reaches_the_innermost_watcher_until_its_block_ends() -> None:
    outer: Told = []
    inner: Told = []

    with watched_by(lambda *told: outer.append(told)):
        report_progress("a")
        with watched_by(lambda *told: inner.append(told)):
            report_progress("b", 1, 2)
        report_progress("c")
    report_progress("d")

    assert outer == [("a", 0, 0), ("c", 0, 0)]
    assert inner == [("b", 1, 2)]


def test_watcher_is_forgotten_after_an_error() -> None:
    seen: Told = []

    with contextlib.suppress(KeyError), watched_by(lambda *told: seen.append(told)):
        raise KeyError
    report_progress("late")

    assert seen == []


def test_tell_from_another_thread_stays_silent() -> None:
    seen: Told = []

    with watched_by(lambda *told: seen.append(told)):
        other = threading.Thread(target=report_progress, args=("elsewhere",))
        other.start()
        other.join()

    assert seen == []
