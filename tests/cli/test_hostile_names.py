"""Names from a stranger's snapshot, all the way from the file to each report."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from attacks import ATTACKS, assert_all_seen
from command_line import Run

from fragdoctor.report.base import FORMATS

pytestmark = pytest.mark.slow

KEPT = {"action", "state", "segment_type", "stage"}
ANSI = re.compile(r"\x1b\[[0-9;]*m")
# The sinks are tested one attack at a time (tests/report); here all of them go the whole way.
NAMES = [
    " ".join(text.replace("\ud800", "") for text in ATTACKS),
    "\x1b[2J\x9b31m",
    "[bold red]x[/]\u202e",
]


def renamed(value: Any, name: str, key: str = "") -> Any:
    """Return a snapshot in which every free string is ``name``; keys and states stay."""
    if isinstance(value, dict):
        return {k: renamed(v, name, k) for k, v in value.items()}
    if isinstance(value, list):
        return [renamed(v, name, key) for v in value]
    if isinstance(value, str) and key not in KEPT:
        return name
    return value


@pytest.fixture(scope="module")
def recorded() -> Any:
    folder = Path(__file__).resolve().parents[2] / "sample_snapshots"
    return pickle.loads((folder / "fragmentation_oom.pickle").read_bytes())


@pytest.fixture
def hostile(request: pytest.FixtureRequest, recorded: Any, tmp_path: Path) -> str:
    name = request.param
    path = tmp_path / "snapshot \u202e\x1b[31m.pickle"
    path.write_bytes(pickle.dumps(renamed(recorded, name), protocol=4))
    return str(path)


@pytest.mark.parametrize("hostile", NAMES, indirect=True)
def test_analyze_hostile_names_stay_inert_in_every_format(hostile: str, run: Run) -> None:
    for name in FORMATS:
        done = run("analyze", hostile, "--format", name, "--verbose")

        assert (done.code, done.err) == (0, "")
        assert_all_seen(done.out.replace("\n", ""))


@pytest.mark.parametrize("hostile", NAMES[1:], indirect=True)
def test_analyze_hostile_names_in_colour_only_our_own_codes(
    hostile: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")

    done = run("analyze", hostile, "--verbose")

    assert "\x1b[" in done.out
    assert_all_seen(ANSI.sub("", done.out).replace("\n", ""))


@pytest.mark.parametrize("hostile", NAMES[1:], indirect=True)
def test_simulate_hostile_settings_stay_inert(hostile: str, run: Run) -> None:
    for fmt in ("text", "json"):
        done = run("simulate", hostile, "--conf", "expandable_segments:True", "--format", fmt)

        assert_all_seen((done.out + done.err).replace("\n", ""))


def test_errors_about_hostile_paths_stay_inert(run: Run) -> None:
    for args in (
        ("analyze", "\x1b[2J\u202e.pickle"),
        ("oom", "a/\x1b]0;x\x07.log"),
        ("simulate", "\x9bx"),
        ("explain", "\x1b[2J"),
        ("analyze", "x", "--capacity", "\x1b[2J"),
        ("\x1b[2J",),
    ):
        done = run(*args)

        assert done.code == 2
        assert_all_seen(done.err.replace("\n", ""))


@pytest.mark.parametrize("text", [*NAMES, "<script>", "\ud800", "```\n"])
def test_oom_hostile_text_around_a_message_stays_inert(text: str, run: Run) -> None:
    message = (
        f"{text}\n[rank1]: {text} torch.OutOfMemoryError: CUDA out of memory. Tried to allocate "
        f"20.00 MiB. GPU 0 has a total capacity of 3.81 GiB of which 8.00 MiB is free. {text}\n"
    )
    data = message.encode("utf-8", errors="surrogatepass")
    for fmt in FORMATS:
        done = run("oom", "-", "--format", fmt, "--verbose", stdin=data)

        assert_all_seen(done.out.replace("\n", ""))
    assert json.loads(run("oom", "-", "--format", "json", stdin=data).out)["messages"]
