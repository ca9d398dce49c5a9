"""The tools of coding agents, called by the package's own client in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from builders import BASE, MIB, alloc, block, oom, pickled, segment, segment_alloc, snapshot

from fragdoctor.cli.mcp import ToolServerOptions, server
from fragdoctor.errors import ConfigError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    pytest.importorskip("mcp.server", reason="the extra mcp is not installed")
    home = tmp_path / "project"
    home.mkdir()
    frames = [{"filename": "/home/me/secret.py", "line": 7, "name": "my_model"}]
    events = [
        segment_alloc(BASE, 20 * MIB),
        {**alloc(BASE, 20 * MIB), "frames": frames},
        oom(64 * MIB, 1 * MIB),
    ]
    content = snapshot(
        segment(BASE, block(20 * MIB, "active_allocated", frames=frames)), events=events
    )
    (home / "a.pickle").write_bytes(pickled(content))
    (home / "train.py").write_text(
        "import sys, torch\ntorch.ones(int(sys.argv[1]) << 20, device='cuda')\n"
    )
    (tmp_path / "outside.pickle").write_bytes(pickled(content))
    return home


def call(root: Path, tool: str, options: dict[str, Any] | None = None, **given: Any) -> Any:
    async def once() -> Any:
        from mcp import Client

        made = server(ToolServerOptions(root=root, **(options or {})))
        async with Client(made) as client:
            return await client.call_tool(tool, given)

    return asyncio.run(once())


def text(result: Any) -> str:
    return "".join(part.text for part in result.content)


def test_tools_are_listed_with_what_they_take(root: Path) -> None:
    async def listed(**options: Any) -> dict[str, Any]:
        from mcp import Client

        async with Client(server(ToolServerOptions(root=root, **options))) as client:
            return {tool.name: tool for tool in (await client.list_tools()).tools}

    found = asyncio.run(listed())

    assert list(found) == ["analyze", "simulate"]
    assert set(asyncio.run(listed(allow_rehearse=True))) == {"analyze", "simulate", "rehearse"}
    assert found["analyze"].description.startswith("Diagnose GPU out-of-memory")
    assert set(found["analyze"].input_schema["properties"]) == {"paths", "capacity", "full"}


@pytest.mark.slow
def test_analyze_and_simulate_answer_with_the_report(root: Path) -> None:
    analyzed = call(root, "analyze", paths=["a.pickle"])
    simulated = call(root, "simulate", path="a.pickle", confs=["expandable_segments:True"],
                     capacity="100MiB")  # fmt: skip

    assert not analyzed.is_error
    assert "secret.py:7" in text(analyzed)
    assert "expandable" in text(simulated)


@pytest.mark.slow
def test_redacted_answers_have_no_names_of_the_users(root: Path) -> None:
    analyzed = call(root, "analyze", {"redact": True}, paths=["a.pickle"], full=True)
    (root / "log.txt").write_text("CUDA out of memory, said my_model\n")
    refused = call(root, "analyze", {"redact": True}, paths=["log.txt"])

    assert not analyzed.is_error
    assert "20.00 MiB" in text(analyzed)
    for word in ("secret", "my_model", "home/me"):
        assert word not in text(analyzed)
        assert word not in text(refused)
    assert refused.is_error


@pytest.mark.parametrize(
    "path", ["../outside.pickle", "/etc/passwd", "https://example.org/a.pickle", "link.pickle"]
)
def test_files_outside_of_the_root_are_refused(root: Path, path: str) -> None:
    (root / "link.pickle").symlink_to(root.parent / "outside.pickle")

    result = call(root, "analyze", paths=[path])

    assert result.is_error
    assert "is not below" in text(result)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [*("links/*.pickle", "links", "links/**", "**", "*/l*.pickle"),
     *("linked", "link*d", "l*d/*.pickle", "linked/*.pickle", ".")],
)  # fmt: skip
def test_links_do_not_lead_out_of_the_root(root: Path, path: str) -> None:
    (root / "a.pickle").unlink()
    (root / "links").mkdir()
    outside = root.parent / "elsewhere"
    outside.mkdir()
    (root.parent / "outside.pickle").rename(outside / "private.pickle")
    (root / "links/link.pickle").symlink_to(outside / "private.pickle")
    (root / "linked").symlink_to(outside)

    for redact in (False, True):
        result = call(root, "analyze", {"redact": redact}, paths=[path])

        assert result.is_error
        for word in ("20.00 MiB", "secret.py", "private"):
            assert word not in text(result)


@pytest.mark.parametrize("name", ["x" * 100_000, "a\0b", "../" + "y" * 3000])
def test_refusals_repeat_no_more_than_the_start_of_a_name(root: Path, name: str) -> None:
    result = call(root, "analyze", paths=[name])

    assert result.is_error
    assert "is not below" in text(result)
    assert len(text(result)) < 300 + len(str(root))


def test_number_of_paths_is_bounded(root: Path) -> None:
    assert "more than 1000 paths" in text(call(root, "analyze", paths=["a.pickle"] * 1001))


@pytest.mark.slow
def test_values_are_never_options_and_errors_are_sentences(root: Path) -> None:
    missing = call(root, "analyze", paths=["--help"])
    wrong = call(root, "simulate", path="a.pickle", capacity="--help")

    assert missing.is_error
    assert "does not exist" in text(missing)
    assert wrong.is_error
    assert "Traceback" not in text(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("redact", [False, True])
def test_rehearse_says_whether_it_fits(root: Path, redact: bool) -> None:
    pytest.importorskip("torch")
    options = {"allow_rehearse": True, "redact": redact}

    result = call(root, "rehearse", options, script="train.py", args=["64"], capacity="100MiB")

    assert not result.is_error, text(result)
    assert ("fits: False" if redact else "Does not fit in 100.00 MiB") in text(result)
    assert ("train.py" in text(result)) is not redact


def test_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [n for n in sys.modules if n == "mcp" or n.startswith("mcp.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.setitem(sys.modules, "mcp.server", None)

    with pytest.raises(ConfigError, match="needs the package mcp"):
        server(ToolServerOptions())
