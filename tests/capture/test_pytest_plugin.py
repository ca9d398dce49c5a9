"""The plugin in a pytest of its own, with a torch that only counts."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.slow

TORCH = """
class _Cuda:
    available = {available}
    def __init__(self):
        self.stats = {{}}
    def is_available(self):
        return self.available
    def device(self, device):
        return self.stats.setdefault(device or 0, dict.fromkeys(
            ("allocated_bytes.all.current", "allocated_bytes.all.peak",
             "reserved_bytes.all.current", "inactive_split_bytes.all.current"), 0))
    def memory_stats(self, device=None):
        return self.device(device)
    def reset_peak_memory_stats(self, device=None):
        d = self.device(device)
        d["allocated_bytes.all.peak"] = d["allocated_bytes.all.current"]
    def synchronize(self, device=None):
        pass
    def use(self, n, device=None):
        d = self.device(device)
        d["allocated_bytes.all.current"] += n
        d["allocated_bytes.all.peak"] = max(
            d["allocated_bytes.all.peak"], d["allocated_bytes.all.current"])

cuda = _Cuda()
"""
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _no_real_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide a PyTorch that other tests of this process loaded: the inner runs bring their own."""
    for name in [n for n in sys.modules if n == "torch" or n.startswith("torch.")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def fake(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(torch=TORCH.format(available=True))
    return pytester


def run(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    # Quicker without: hypothesis would be loaded anew for each run.
    without = ("-p", "no:randomly", "-p", "no:hypothesispytest")
    return pytester.runpytest_inprocess(*without, "-ra", *args)


def one(pytester: pytest.Pytester, mark: str, body: str) -> pytest.RunResult:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    pytester.makepyfile(
        test_it=f"import pytest, torch\n@pytest.mark.{mark}\ndef test_it():\n{lines}"
    )
    return run(pytester)


def test_memory_within_the_limit_passes(fake: pytest.Pytester) -> None:
    one(fake, 'limit_gpu_memory("8 GiB")', f"torch.cuda.use({8 * GIB})").assert_outcomes(passed=1)


def test_memory_beyond_the_limit_fails_with_both_numbers(fake: pytest.Pytester) -> None:
    result = one(
        fake,
        'limit_gpu_memory("8 GiB")',
        f"torch.cuda.use({9 * GIB})\ntorch.cuda.use({-9 * GIB})",
    )

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["The test is limited to 8.00 GiB of GPU memory but used 9.00 GiB at its peak."]
    )
    result.stdout.no_fnmatch_line("*Traceback*")


def test_memory_of_another_device_does_not_count(fake: pytest.Pytester) -> None:
    body = f"torch.cuda.use({9 * GIB}, 0)"

    one(fake, 'limit_gpu_memory("8 GiB", device=1)', body).assert_outcomes(passed=1)
    result = one(fake, 'limit_gpu_memory("8 GiB", device=0)', body)

    result.stdout.fnmatch_lines(["*of GPU memory on GPU 0 but used 9.00 GiB*"])


def test_peak_before_the_test_does_not_count(fake: pytest.Pytester) -> None:
    fake.makepyfile(
        test_it=f"""
        import pytest, torch
        def test_large():
            torch.cuda.use({9 * GIB}); torch.cuda.use({-9 * GIB})
        @pytest.mark.limit_gpu_memory("8 GiB")
        def test_small():
            torch.cuda.use(1)
        """
    )

    run(fake).assert_outcomes(passed=2)


@pytest.mark.parametrize(("limit", "failed"), [("25%", 0), ("24%", 1), ("1 GiB", 0), ("0", 1)])
def test_fragmentation_is_what_live_blocks_strand(
    fake: pytest.Pytester, limit: str, failed: int
) -> None:
    result = one(
        fake,
        f'limit_gpu_fragmentation("{limit}")',
        f'd = torch.cuda.memory_stats()\nd["reserved_bytes.all.current"] = {4 * GIB}\n'
        f'd["inactive_split_bytes.all.current"] = {GIB}',
    )

    result.assert_outcomes(failed=failed, passed=1 - failed)
    if failed:
        result.stdout.fnmatch_lines(["*of stranded free GPU memory but left 1.00 GiB."])


def test_leak_is_what_stays_allocated(fake: pytest.Pytester) -> None:
    result = one(fake, "limit_gpu_leaks()", f"torch.cuda.use({GIB})")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["The test is limited to 0 B of leaked GPU memory but kept 1.00 GiB."]
    )
    one(fake, 'limit_gpu_leaks("1 GiB")', f"torch.cuda.use({GIB})").assert_outcomes(passed=1)


def test_what_dead_cycles_hold_is_no_leak(fake: pytest.Pytester) -> None:
    body = (
        "class Tensor:\n    def __init__(self): torch.cuda.use(1); self.me = self\n"
        "    def __del__(self): torch.cuda.use(-1)\nTensor()"
    )

    one(fake, "limit_gpu_leaks()", body).assert_outcomes(passed=1)


def test_failing_test_keeps_its_own_failure(fake: pytest.Pytester) -> None:
    result = one(fake, 'limit_gpu_memory("1 MiB")', f"torch.cuda.use({GIB})\nassert 0, 'mine'")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*AssertionError: mine*"])
    result.stdout.no_fnmatch_line("*is limited to*")


def test_several_limits_are_all_reported(fake: pytest.Pytester) -> None:
    fake.makepyfile(
        test_it=f"""
        import pytest, torch
        @pytest.mark.limit_gpu_memory("1 MiB")
        @pytest.mark.limit_gpu_leaks("1 MiB")
        def test_it():
            torch.cuda.use({GIB})
        """
    )

    result = run(fake)

    result.stdout.fnmatch_lines_random(["*at its peak.", "*kept 1.00 GiB."])


def test_without_cuda_the_test_is_skipped_with_the_reason(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(torch=TORCH.format(available=False))

    result = one(pytester, 'limit_gpu_memory("8 GiB")', "raise SystemError")

    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * needs CUDA, which is not available"])


def test_without_torch_the_test_is_skipped_with_the_reason(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(torch="raise ImportError('no torch')")
    pytester.makepyfile(
        test_it="import pytest\n@pytest.mark.limit_gpu_leaks\ndef test_it():\n    raise SystemError"
    )

    result = run(pytester)

    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * needs PyTorch, which is not installed"])


def test_unmarked_tests_need_no_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(torch="raise SystemError")
    pytester.makepyfile(test_it="def test_it(): pass")

    run(pytester).assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "mark",
    [
        "limit_gpu_memory",
        "limit_gpu_memory()",
        'limit_gpu_memory("much")',
        'limit_gpu_memory("5%")',
        "limit_gpu_memory(8)",
        'limit_gpu_memory("1 GiB", "cuda:0")',
        'limit_gpu_memory("1 GiB", device=True)',
        'limit_gpu_leaks("1 GiB", 0, 1)',
        'limit_gpu_memory("1 GiB", gpu=0)',
    ],
)
def test_wrong_marker_is_a_usage_error(fake: pytest.Pytester, mark: str) -> None:
    result = one(fake, mark, "pass")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*ERROR: *test_it*limit_gpu_*"])


def test_nearest_marker_counts(fake: pytest.Pytester) -> None:
    fake.makepyfile(
        test_it=f"""
        import pytest, torch
        pytestmark = pytest.mark.limit_gpu_memory("1 MiB")
        @pytest.mark.limit_gpu_memory("2 GiB")
        def test_it():
            torch.cuda.use({GIB})
        """
    )

    run(fake).assert_outcomes(passed=1)


def test_markers_are_listed(fake: pytest.Pytester) -> None:
    result = run(fake, "--markers")

    result.stdout.fnmatch_lines_random([f"@pytest.mark.limit_gpu_{x}*" for x in
                                        ("memory", "fragmentation", "leaks")])  # fmt: skip


@pytest.mark.parametrize("mark", ["", "@pytest.mark.limit_gpu_leaks"])
def test_hooks_around_tests_are_set_for_sessions_with_a_limit_only(
    fake: pytest.Pytester, mark: str
) -> None:
    fake.makepyfile(
        f"""
        import pytest, sys
        {mark}
        def test_it(pytestconfig):
            has_hooks = pytestconfig.pluginmanager.has_plugin("fragdoctor-limits")
            assert has_hooks is {bool(mark)}
            assert has_hooks is ("fragdoctor.capture.gpu_limits" in sys.modules)
        """
    )

    ended = fake.runpytest_subprocess("-p", "no:randomly", "-p", "no:hypothesispytest")

    ended.assert_outcomes(passed=1)
