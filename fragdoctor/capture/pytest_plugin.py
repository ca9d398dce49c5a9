"""A pytest plugin: limits on the GPU memory that a test may use.

    @pytest.mark.limit_gpu_memory("8 GiB")
    @pytest.mark.limit_gpu_fragmentation("10%")
    @pytest.mark.limit_gpu_leaks("1 MiB")
    def test_training_step(): ...

All take ``device=N``; the current device counts without. Without CUDA such tests are skipped.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

import pytest

from fragdoctor.capture.gpu_limits import MARKERS, Limit, limits_of, why_not

_LIMITS: Final = pytest.StashKey[list[Limit]]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the markers known."""
    for line in MARKERS.values():
        config.addinivalue_line("markers", line)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Read the limits of a test; a wrong one is found before anything runs."""
    marks = [(m.name, m.args, m.kwargs) for m in item.iter_markers() if m.name in MARKERS]
    if not marks:
        return
    try:
        item.stash[_LIMITS] = limits_of(marks)
    except ValueError as e:
        raise pytest.UsageError(f"{item.nodeid}: {e}") from e


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a limited test where there is no GPU to measure on."""
    if _LIMITS in item.stash and (reason := why_not()):
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Measure around the test itself; a test that fails by itself keeps its own failure."""
    limits = item.stash.get(_LIMITS, [])
    for limit in limits:
        limit.start()
    result = yield
    broken = [sentence for limit in limits if (sentence := limit.finish())]
    if broken:
        pytest.fail("\n".join(broken), pytrace=False)
    return result
