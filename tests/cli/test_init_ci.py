"""The workflows that init-ci writes: they parse, and their shell steps run as they stand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

TRAIN = """
import sys, torch
net = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(50):
    x = torch.randn(int(sys.argv[1]) * {batch}, 512, device="cuda")
    optimizer.zero_grad()
    net(x).sum().backward()
    optimizer.step()
"""
GH = """#!/bin/sh
# Stands for GitHub: comments are files of a folder, named by their number.
echo "$@" >> "$HOME/gh.log"
[ -z "$REFUSE" ] || exit 1
case "$*" in
  *--jq*) cat "$HOME/comments" 2>/dev/null ;;
  *PATCH*) cp body.md "$HOME/renewed.md" ;;
  *) cp body.md "$HOME/new.md" ; echo 17 > "$HOME/comments" ;;
esac
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "train.py").write_text(TRAIN.format(batch=1))
    return work


def written(run: Any, *words: str, path: str = ".github/workflows/gpu-memory.yml") -> Any:
    result = run("init-ci", *words)
    assert result.code == 0, result.err
    return yaml.safe_load(Path(path).read_text())


@pytest.fixture(autouse=True)
def from_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fragdoctor.cli.init_ci.requirement", lambda: "fragdoctor==0.2.0")


@pytest.mark.parametrize(("words", "path"), [([], ".github/workflows/gpu-memory.yml"),
                                             (["--gitlab"], ".gitlab/gpu-memory.yml")])  # fmt: skip
def test_file_that_was_written_is_named(run: Any, home: Path, words: list[str], path: str) -> None:
    result = run("init-ci", *words, "train.py")

    assert (home / path).is_file()
    assert f"Wrote {path}" in result.err


def test_copy_from_a_folder_asks_what_to_install(run, home, monkeypatch) -> None:
    monkeypatch.setattr("fragdoctor.cli.init_ci.requirement", lambda: None)

    done = run("init-ci", "train.py")

    assert done.code == 2
    assert "there: --install git+https://HOST/OWNER/fragdoctor@COMMIT" in done.err
    assert not Path(".github").exists()
    assert run("init-ci", "train.py", "--install", "./wheels/fragdoctor.whl").code == 0


def test_github_rehearses_without_a_gpu(run, home) -> None:
    found = written(run, "train.py", "--fits-on", "8GiB", "--", "--lr", "it's 1e-3; $x")

    assert list(found["jobs"]) == ["rehearse"]
    assert found["permissions"] == {"contents": "read"}
    writes = {"contents": "read", "pull-requests": "write"}
    assert {n: j["permissions"] for n, j in found["jobs"].items() if "permissions" in j} == {
        "rehearse": writes
    }
    steps = {s["name"]: s["run"] for s in found["jobs"]["rehearse"]["steps"] if "run" in s}
    assert "--fits-on 8GiB" in steps["Rehearse the change"]
    assert """train.py -- --lr 'it'"'"'s 1e-3; $x'""" in steps["Rehearse the change"]
    for script in steps.values():  # expressions become variables, never text of a script
        assert "${{" not in script
        assert "@" not in script.replace("body=@body.md", "")


def test_install_follows_what_the_project_has(run, home) -> None:
    Path("requirements.txt").touch()
    Path("pyproject.toml").touch()
    found = written(run, "-m", "package.train", "--install", "fragdoctor==1.0")

    steps = found["jobs"]["rehearse"]["steps"]
    assert steps[1]["with"]["cache"] == "pip"
    assert "pip install -r requirements.txt" in steps[2]["run"]
    assert "pip install ." in steps[2]["run"]
    assert "pip install fragdoctor==1.0" in steps[2]["run"]
    assert "-m package.train" in steps[3]["run"]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("github-workflows", ()),
        ("github-workflows", ("--gpu-runner", "self-hosted,gpu")),
        ("gitlab-ci", ("--gitlab",)),
        ("gitlab-ci", ("--gitlab", "--gpu-runner", "gpu")),
    ],
)
def test_what_is_written_follows_the_schema_of_the_service(run, home, schema, words) -> None:
    pytest.importorskip("check_jsonschema")
    assert run("init-ci", "train.py", *words, "-o", "ci.yml").code == 0

    assert_valid(schema, "ci.yml")


def test_own_workflow_and_action_follow_their_schemas() -> None:
    pytest.importorskip("check_jsonschema")
    root = Path(__file__).parents[2]

    for name in ("ci.yml", "release.yml"):
        assert_valid("github-workflows", str(root / ".github/workflows" / name))
    assert_valid("github-actions", str(root / "action.yml"))


def assert_valid(schema: str, name: str) -> None:
    words = ["-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", name]
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


def zizmor(*paths: str) -> str:
    """Return what is wrong with workflows, "" where nothing is; no request is made."""
    program = Path(sys.executable).with_name("zizmor")
    if not program.is_file():
        pytest.skip("zizmor is not installed")
    words = [str(program), "--offline", "--no-progress", "--persona", "pedantic", *paths]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    return "" if ended.returncode == 0 else ended.stdout + ended.stderr


def test_zizmor_finds_nothing_in_what_is_written(run, home) -> None:
    for name in ("requirements.txt", "pyproject.toml"):
        Path(name).touch()
    written(run, "train.py")
    plain = Path(".github/workflows/plain.yml")
    Path(".github/workflows/gpu-memory.yml").rename(plain)
    written(run, "train.py", "--gpu-runner", "self-hosted,gpu")

    assert zizmor(".github/workflows") == ""


def test_zizmor_finds_nothing_in_own_workflows_and_the_action() -> None:
    root = Path(__file__).parents[2]

    assert zizmor(str(root / ".github/workflows"), str(root / "action.yml")) == ""


def steps_of(found: Any) -> list[dict[str, Any]]:
    return [s for job in found["jobs"].values() for s in job["steps"] if "uses" in s]


def test_actions_are_pinned_and_no_checkout_keeps_credentials(run, home) -> None:
    root = Path(__file__).parents[2]
    ours = [
        yaml.safe_load((root / ".github/workflows" / name).read_text())
        for name in ("ci.yml", "release.yml")
    ]
    action = yaml.safe_load((root / "action.yml").read_text())["runs"]["steps"]
    generated = written(run, "train.py", "--gpu-runner", "self-hosted,gpu")
    steps = [step for found in (*ours, generated) for step in steps_of(found)]
    steps += [s for s in action if "uses" in s]

    assert len(steps) > 10
    for step in steps:
        assert re.fullmatch(r"(actions|pypa)/[a-z-]+@[0-9a-f]{40}", step["uses"])
        if "checkout" in step["uses"]:
            assert step["with"]["persist-credentials"] is False


def test_code_of_forks_does_not_run_on_own_machines(run, home) -> None:
    jobs = written(run, "train.py", "--gpu-runner", "self-hosted,gpu")["jobs"]
    path = ".gitlab/gpu-memory.yml"
    gitlab = written(run, "train.py", "--gpu-runner", "gpu", "--gitlab", path=path)

    is_own = "github.event.pull_request.head.repo.full_name == github.repository"
    assert [name for name, job in jobs.items() if "ubuntu-latest" not in job["runs-on"]] == [
        "record"
    ]
    assert jobs["record"]["if"] == is_own
    assert "needs.record.result != 'skipped'" in jobs["check"]["if"]
    for name in ("gpu-memory-record", "gpu-memory-check"):  # one that is needed must be there too
        (rule,) = gitlab[name]["rules"]
        assert "&& $CI_MERGE_REQUEST_SOURCE_PROJECT_ID == $CI_PROJECT_ID" in rule["if"]


@pytest.mark.parametrize("where", [(), ("--gitlab",)])
def test_gpu_jobs_record_and_check_with_paths_mapped(run, home, where) -> None:
    path = ".gitlab/gpu-memory.yml" if where else ".github/workflows/gpu-memory.yml"
    found = written(run, "train.py", "--gpu-runner", "self-hosted, gpu", *where, path=path)
    jobs = found if where else found["jobs"]
    text = Path(path).read_text()

    names = [name.rpartition("-")[2] for name in jobs]
    assert names == (["rehearsal"] if where else ["rehearse"]) + ["record", "check"]
    record = jobs["gpu-memory-record"] if where else jobs["record"]
    assert record["tags" if where else "runs-on"] == ["self-hosted", "gpu"]
    assert "fragdoctor run -o recordings -- train.py" in text
    assert "--path-map" in text


def test_nothing_is_overwritten_unasked(run, home) -> None:
    written(run, "train.py", "--fits-on", "8GiB")
    path = Path(".github/workflows/gpu-memory.yml")
    before = path.read_text()

    refused = run("init-ci", "train.py", "--fits-on", "9GiB")

    assert refused.code == 2
    assert "exists" in refused.err
    assert path.read_text() == before
    written(run, "train.py", "--fits-on", "9GiB", "--force")
    assert "9GiB" in path.read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["missing.py"], "missing.py does not exist"),
        (["train.py", "--", "a\nb: c"], "cannot be used in a workflow"),
        (["train.py", "--", "${{ secrets.X }}"], "cannot be used in a workflow"),
        (["train.py", "--gpu-runner", "a]: b"], "not a list of labels"),
        (["train.py", "--fits-on", "big"], "big"),
    ],
)
def test_what_cannot_stand_in_a_workflow_is_refused(run, home, words, sentence) -> None:
    result = run("init-ci", *words)

    assert result.code == 2
    assert sentence in result.err
    assert not Path(".github").exists()


def git(place: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(
        ["git", *identity, *words], cwd=place, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def pull_request(tmp_path: Path, home: Path) -> dict[str, str]:
    """Return the environment of a pull request that makes the batch four times as large."""
    pytest.importorskip("torch")
    if shutil.which("git") is None or shutil.which("bash") is None:
        pytest.skip("the steps need git and bash")
    git(home, "init", "-q", "-b", "main")
    git(home, "add", "train.py")
    git(home, "commit", "-q", "-m", "before")
    base = git(home, "rev-parse", "HEAD")
    git(tmp_path, "clone", "-q", "--bare", str(home), "origin")
    git(home, "remote", "add", "origin", f"file://{tmp_path / 'origin'}")
    (home / "train.py").write_text(TRAIN.format(batch=4))
    git(home, "commit", "-q", "-a", "-m", "after")
    tools = tmp_path / "tools"
    tools.mkdir()
    scripts = {
        "gh": GH,
        "fragdoctor": f'#!/bin/sh\nexec {sys.executable} -m fragdoctor "$@"\n',
        "python": f'#!/bin/sh\n[ "$2" = pip ] || exec {sys.executable} "$@"\n',
    }
    for name, script in scripts.items():
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FRAGDOCTOR_", "GITHUB_"))}
    return kept | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "GITHUB_WORKSPACE": str(home),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "GITHUB_REPOSITORY": "owner/name",
        "PULL_REQUEST": "5",
        "CI_PROJECT_DIR": str(home),
        "CI_MERGE_REQUEST_DIFF_BASE_SHA": base,
    }


def shell(script: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-e", "-c", script], env=variables, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_github_steps_run_and_leave_one_comment(run, pull_request, home, tmp_path) -> None:
    found = written(run, "train.py", "--fits-on", "1GiB", "--", "64")
    steps = found["jobs"]["rehearse"]["steps"]
    scripts = [s["run"] for s in steps if "run" in s]
    (before,) = (s["with"] for s in steps if "path" in s.get("with", {}) and "ref" in s["with"])
    assert before["ref"] == "${{ github.event.pull_request.base.sha }}"
    git(home, "clone", "-q", f"{tmp_path / 'origin'}", before["path"])  # as the action would
    git(home / before["path"], "checkout", "-q", pull_request["CI_MERGE_REQUEST_DIFF_BASE_SHA"])

    for script in scripts:
        done = shell(script, pull_request)
        assert done.returncode == 0, done.stderr
    comment = (tmp_path / "new.md").read_text()
    assert comment.startswith("<!-- fragdoctor -->\n## GPU memory, before and after")
    assert "before.pickle" in comment
    assert "The rehearsal of the change" in comment
    assert (tmp_path / "summary.md").read_text() == comment

    again = shell(scripts[-1], pull_request)
    refused = shell(scripts[-1], {**pull_request, "REFUSE": "1"})

    assert again.returncode == refused.returncode == 0
    assert (tmp_path / "renewed.md").read_text() == comment
    assert "could not be written" in refused.stdout


@pytest.mark.slow
def test_change_that_no_longer_fits_is_commented_with_what_was_tried(
    run, pull_request, home
) -> None:
    found = written(run, "train.py", "--fits-on", "8MiB", "--", "64")
    scripts = {s["name"]: s["run"] for s in found["jobs"]["rehearse"]["steps"] if "run" in s}

    rehearsed = shell(scripts["Rehearse the change"], pull_request)
    compared = shell(scripts["Compare"], pull_request)

    assert rehearsed.returncode == 1
    assert compared.returncode == 0, compared.stderr
    comment = (home / "comment.md").read_text()
    assert "Does not fit in 8.00 MiB" in comment
    assert "expandable segments" in comment


@pytest.mark.slow
def test_gitlab_script_names_a_cure_where_the_change_does_not_fit(run, pull_request, home) -> None:
    path = ".gitlab/gpu-memory.yml"
    found = written(run, "train.py", "--fits-on", "64MiB", "--gitlab", "--", "9999", path=path)
    job = found["gpu-memory-rehearsal"]

    done = [shell(line, pull_request) for line in job["script"]]

    assert [d.returncode for d in done] == [0, 0, 1]
    assert "Does not fit in 64.00 MiB" in done[2].stdout
    comment = (home / "comment.md").read_text()
    assert "before.pickle" in comment
    assert "Does not fit in 64.00 MiB (needs" in comment  # what was tried
    assert (home / job["artifacts"]["reports"]["junit"]).is_file()


def test_check_of_a_recording_runs_as_written(run, home, tmp_path) -> None:
    from builders import BASE, MIB, alloc, block, pickled, segment, segment_alloc, snapshot

    found = written(run, "train.py", "--gpu-runner", "gpu")
    (home / "recordings").mkdir()
    events = [segment_alloc(BASE, 20 * MIB), alloc(BASE, 20 * MIB)]
    content = snapshot(segment(BASE, block(20 * MIB, "active_allocated")), events=events)
    (home / "recordings/a.pickle").write_bytes(pickled(content))
    (step,) = (s for s in found["jobs"]["check"]["steps"] if s.get("name") == "Check")
    command = step["run"].partition("fragdoctor check")[2].replace("\\\n", " ")
    words = command.replace('"', "").replace("$RECORDED", "/builds").split()
    words = [w.replace("$GITHUB_STEP_SUMMARY", str(tmp_path / "s.md")) for w in words]

    result = run("check", *words)

    assert result.code == 0, result.err
    assert (tmp_path / "s.md").read_text().startswith("## GPU memory check passed")
