"""A pytest plugin: limits on the GPU memory that a test may use.

    @pytest.mark.limit_gpu_memory("8 GiB")
    @pytest.mark.limit_gpu_fragmentation("10%")
    @pytest.mark.limit_gpu_leaks("1 MiB")
    def test_training_step(): ...

All take ``device=N``; the default is the current device. Without CUDA, such tests are skipped; with
``rehearse=True`` they need no CUDA, and run in a process of their own that has no GPU either.

This module is loaded in every pytest session: what it needs is loaded, and its hooks around tests
are set, only at the first test that uses it.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from fragdoctor.capture.gpu_limits import GpuLimits

_MARKERS: Final = {
    "limit_gpu_memory": (
        'limit_gpu_memory(size, device=None): fail when the test allocates more, "8 GiB" at a time'
    ),
    "limit_gpu_fragmentation": (
        "limit_gpu_fragmentation(size, device=None): fail when live blocks strand more free "
        'memory, "512 MiB" or "10%" of what is reserved'
    ),
    "limit_gpu_leaks": (
        'limit_gpu_leaks(size="0", device=None): fail when more is allocated after the test than '
        "before"
    ),
}
_LIMITS: Final[pytest.StashKey[GpuLimits]] = pytest.StashKey()
_HOOKS: Final = "fragdoctor-limits"
_REPORTS: Final = "FRAGDOCTOR_TEST_REPORTS"
"""The variable that names the report file of a test that is being rehearsed."""


class _Reporter:
    """Writes the reports of a test that is being rehearsed, for the session that asked for them."""

    def __init__(self, config: pytest.Config, path: str) -> None:
        self._config = config
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a report to the file."""
        import json

        hook = self._config.hook
        found = hook.pytest_report_to_serializable(config=self._config, report=report)
        with open(self._path, "a", encoding="utf-8") as file:  # noqa: PTH123
            file.write(json.dumps(found, default=str) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    for line in _MARKERS.values():
        config.addinivalue_line("markers", line)
    if path := os.environ.get(_REPORTS):
        config.pluginmanager.register(_Reporter(config, path))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Read the limits of a test; a wrong limit is found before anything runs."""
    marks = [(m.name, m.args, m.kwargs) for m in item.iter_markers() if m.name in _MARKERS]
    if not marks:
        return
    from fragdoctor.capture.gpu_limits import limits_of

    try:
        item.stash[_LIMITS] = limits_of(marks)
    except ValueError as e:
        raise pytest.UsageError(f"{item.nodeid}: {e}") from e
    plugins = item.config.pluginmanager
    if not plugins.has_plugin(_HOOKS):
        plugins.register(_Limited(), _HOOKS)


def _rehearsed(item: pytest.Item) -> list[Any]:
    """Return a test's reports from the process that rehearsed it."""
    from fragdoctor.capture.gpu_limits import why_not
    from fragdoctor.rehearsal.runner import rehearse_test

    config = item.config
    reports: list[Any] = []

    def call() -> None:
        if reason := why_not(needs_cuda=False):
            pytest.skip(reason)
        found, why = rehearse_test(_arguments(item), item.stash[_LIMITS].gpu, _REPORTS)
        if not found:
            pytest.fail(f"The test cannot be rehearsed: {why}", pytrace=False)
        for data in found:
            report = config.hook.pytest_report_from_serializable(config=config, data=data)
            if isinstance(report.longrepr, list):  # file, line and reason of a skipped test
                report.longrepr = tuple(report.longrepr)
            reports.append(report)

    outcome = pytest.CallInfo.from_call(call, when="call")
    if outcome.excinfo is not None:
        return [item.ihook.pytest_runtest_makereport(item=item, call=outcome)]
    return [r for r in reports if r.when != "teardown" or r.failed]


def _arguments(item: pytest.Item) -> list[str]:
    """Return the arguments of this session, adapted to one test and one process."""
    config = item.config
    worker: dict[str, Any] = getattr(config, "workerinput", {})  # set by pytest-xdist
    given = worker.get("mainargv", ["", *config.invocation_params.args])[1:]
    kept = [str(word) for word in given if str(word).startswith("-") or word not in config.args]
    alone = ["-n0"] if config.pluginmanager.hasplugin("xdist") else []
    test = os.fspath(config.rootpath / item.nodeid)
    return [*kept, *alone, f"--rootdir={config.rootpath}", test]


class _Limited:
    """The hooks of a session that has a test with a limit."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        """Run a test that needs no GPU in a process of its own, and report its results here."""
        if (
            _LIMITS not in item.stash
            or not item.stash[_LIMITS].is_rehearsed
            or _REPORTS in os.environ
        ):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in _rehearsed(item):
            item.ihook.pytest_runtest_logreport(report=report)
        # Fixtures that earlier tests set up and the next does not need end here, as after any test.
        end = pytest.CallInfo.from_call(
            lambda: item.session._setupstate.teardown_exact(nextitem), when="teardown"
        )
        report = item.ihook.pytest_runtest_makereport(item=item, call=end)
        item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a limited test if there is no GPU to measure on."""
        if _LIMITS in item.stash:
            from fragdoctor.capture.gpu_limits import why_not

            if reason := why_not():
                pytest.skip(reason)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Measure around the test itself; a test that fails on its own keeps its own failure."""
        limits = item.stash[_LIMITS].limits if _LIMITS in item.stash else ()
        for limit in limits:
            limit.start()
        result = yield
        broken = [sentence for limit in limits if (sentence := limit.finish())]
        if broken:
            pytest.fail("\n".join(broken), pytrace=False)
        return result
