"""What the command line does by itself: the implied command, formats by name, completion."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Run

from fragdoctor.diagnosis import bench


def test_file_alone_is_analyzed(run: Run, samples: Path) -> None:
    sample = str(samples / "fragmentation_oom.pickle")

    assert run(sample, "-q") == run("analyze", sample, "-q")


def test_file_without_options_needs_no_parser_of_options(
    run: Run, samples: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # where no file sets options
    for name in [name for name in os.environ if name.startswith("FRAGDOCTOR_")]:
        monkeypatch.delenv(name)
    sample, missing = str(samples / "fragmentation_oom.pickle"), str(tmp_path / "none.pickle")
    parsed = [run("analyze", "--no-config", name) for name in (sample, missing)]
    monkeypatch.setattr("fragdoctor.cli.commands.group_of", None)

    assert [run(sample), run(missing)] == parsed
    assert run("analyze", sample) == parsed[0]


@pytest.mark.parametrize("where", ["environment", "file"])
def test_file_without_options_has_those_that_are_set_elsewhere(
    run: Run, samples: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    monkeypatch.chdir(tmp_path)
    sample = str(samples / "fragmentation_oom.pickle")
    plain, quiet = run(sample), run(sample, "--quiet")
    if where == "environment":
        monkeypatch.setenv("FRAGDOCTOR_QUIET", "1")
    else:
        (tmp_path / "fragdoctor.toml").write_text("quiet = true\n")

    assert run(sample) == quiet != plain


def test_options_may_stand_before_a_file_alone(run: Run, samples: Path) -> None:
    sample = str(samples / "fragmentation_oom.pickle")

    assert run("-q", sample) == run("analyze", sample, "-q")


def test_pasted_message_alone_is_diagnosed(run: Run, samples: Path) -> None:
    message = (samples / "fragmentation_oom.txt").read_text()

    assert run(message) == run("oom", message)
    assert run("CUDA out of memory").code == run("oom", "CUDA out of memory").code


def test_question_alone_is_answered(run: Run) -> None:
    question = "how much memory does llama 3 8b need?"

    assert run(question) == run("estimate", question)


@pytest.mark.parametrize(
    "words",
    [
        ("will Qwen3 8B LoRA fit on my 4090",),
        ("will", "Qwen3", "8B", "LoRA", "fit", "on", "my", "4090"),
        ("will Llama 3 8B run out of memory on a 3090?",),
    ],
)
def test_question_needs_neither_its_mark_nor_quotes(run: Run, words: tuple[str, ...]) -> None:
    assert run(*words) == run("estimate", " ".join(words))


@pytest.mark.parametrize("rest", ["", "/blob/main/config.json", "?library=transformers"])
def test_page_of_a_model_is_the_model(run: Run, rest: str) -> None:
    page = f"https://huggingface.co/Qwen/Qwen3-8B{rest}"

    assert run("estimate", page, "-q") == run("estimate", "Qwen/Qwen3-8B", "-q")


def test_link_to_nowhere_is_not_what_was_meant(run: Run, tmp_path: Path) -> None:
    link = tmp_path / "snapshot.pickle"
    link.symlink_to(tmp_path / "gone.pickle")

    assert "Check the path." in run(str(link)).err


def test_link_to_nowhere_is_no_command(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "latest").symlink_to(tmp_path / "gone")
    monkeypatch.chdir(tmp_path)

    assert run("latest").err.startswith("Error: latest does not exist.")


def test_two_snapshots_that_name_no_rank_may_be_two_runs(run: Run, samples: Path) -> None:
    names = [str(samples / f"{name}_oom.pickle") for name in ("capacity", "memory_limit")]

    assert "for two runs: fragdoctor compare" in run(*names).err


def test_name_of_several_words_that_nobody_quoted_is_a_file(
    run: Run, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my oom.txt").write_bytes((samples / "capacity_oom.txt").read_bytes())
    monkeypatch.chdir(tmp_path)

    assert run("my", "oom.txt", "--full") == run("my oom.txt", "--full")
    (tmp_path / "my").touch()
    assert run("my", "oom.txt").code == 2


def test_name_of_several_words_is_a_file(run: Run) -> None:
    assert "the old run of monday.pickle does not exist" in run("the old run of monday.pickle").err


@pytest.mark.parametrize(("words", "same"), [(("help", "pack"), ("pack", "--help"))])
def test_help_is_what_it_is_elsewhere(
    run: Run, words: tuple[str, ...], same: tuple[str, ...]
) -> None:
    assert run(*words) == run(*same)


@pytest.mark.parametrize("word", ["version", "-V"])
def test_version_may_be_asked_for_in_other_ways(word: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fragdoctor", word], capture_output=True, text=True, check=True
    )

    assert done.stdout.startswith("fragdoctor ")


def test_program_is_sent_to_the_commands_that_run_it(run: Run, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("try:\n    step()\nexcept RuntimeError:\n    print('CUDA out of memory')\n")

    for words in ((str(program),), ("oom", str(program))):
        done = run(*words)
        assert done.code == 2
        assert f"fragdoctor rehearse {program}" in done.err


def test_edits_made_one_at_a_time_give_the_same(
    run: Run, samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("analyze", str(samples / "fragmentation_oom.pickle"), "--format", "json")
    side_by_side = run(*words)
    monkeypatch.setattr(bench, "MAX_CONCURRENT_OPERATIONS", 0)

    assert side_by_side == run(*words)


def test_garbage_of_a_process_that_goes_on_is_still_looked_for(run: Run) -> None:
    before = gc.get_freeze_count()

    run("explain", "FD101")

    assert gc.get_freeze_count() <= before


def test_standard_input_alone_is_analyzed(run: Run, samples: Path) -> None:
    data = (samples / "fragmentation_oom.txt").read_bytes()

    assert run("-", stdin=data) == run("analyze", "-", stdin=data)


def test_missing_file_alone_is_no_unknown_command(run: Run) -> None:
    done = run("nowhere.pickle")

    assert (2, True) == (done.code, done.err.startswith("Error: nowhere.pickle does not exist."))


@pytest.mark.parametrize("name", ["leak_oom.pickle", "capacity_oom.pikle"])
def test_missing_file_names_the_one_that_was_meant(run: Run, samples: Path, name: str) -> None:
    meant = "leak_oom.pickle.gz" if name.startswith("leak") else "capacity_oom.pickle"

    done = run("analyze", str(samples / name))

    assert done.code == 2
    assert f"Did you mean {samples / meant}?" in done.err


def test_misspelt_command_is_no_file(run: Run) -> None:
    done = run("anlyze")

    assert 2 == done.code
    assert "Did you mean 'analyze'?" in done.err


@pytest.mark.parametrize(
    ("name", "form", "start"),
    [
        ("r.html", "html", "<!DOCTYPE html>"),
        ("r.json", "json", "{"),
        ("r.md", "markdown", "#"),
        ("r.sarif", "sarif", "{"),
        ("r.xml", "junit", "<?xml"),
        ("r.txt", "text", "Out of memory"),
        ("report", "text", "Out of memory"),
    ],
)
def test_name_of_the_report_implies_its_format(
    name: str, form: str, start: str, run: Run, samples: Path, tmp_path: Path
) -> None:
    target = tmp_path / name

    done = run("analyze", str(samples / "fragmentation_oom.pickle"), "-o", str(target))

    assert (0, "", f"Wrote {target} ({form})\n") == (done.code, done.out, done.err)
    assert target.read_text(encoding="utf-8").startswith(start)


@pytest.mark.parametrize(
    ("command", "name"), [("analyze", "r.pdf"), ("analyze", "r.csv"), ("pack", "r.sarif")]
)
def test_name_of_a_format_that_the_command_lacks_is_refused(
    command: str, name: str, run: Run, samples: Path, tmp_path: Path
) -> None:
    target = tmp_path / name

    done = run(command, str(samples / "fragmentation_oom.pickle"), "-o", str(target))

    assert done.code == 2
    assert f"fragdoctor {command} writes no {target.suffix} files." in done.err
    assert not target.exists()


def test_help_lists_options_in_groups_and_no_default_of_what_is_unset(run: Run) -> None:
    text = run("analyze", "--help").out

    headings = [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == [
        "Arguments:",
        "Options:",
        "Input:",
        "Several ranks:",
        "Gate:",
        "Output:",
        "General:",
    ]
    assert text.index("Output:") < text.index("--output FILE") < text.index("General:")
    assert "default: 0" not in run("view", "--help").out


def test_format_that_is_given_counts_more_than_the_name(
    run: Run, samples: Path, tmp_path: Path
) -> None:
    target, sample = tmp_path / "r.html", str(samples / "fragmentation_oom.pickle")

    run("analyze", sample, "-o", str(target), "--format", "json")

    assert target.read_text(encoding="utf-8").startswith("{")


def test_quiet_prints_nothing_beside_a_file_that_is_whole(
    run: Run, samples: Path, tmp_path: Path
) -> None:
    sample = str(samples / "fragmentation_oom.pickle")
    quiet, usual = tmp_path / "quiet.txt", tmp_path / "usual.txt"

    done = run("analyze", sample, "-q", "-o", str(quiet))
    run("analyze", sample, "-o", str(usual))

    assert (done.out, done.err) == ("", "")
    assert quiet.read_text() == usual.read_text()


@pytest.mark.parametrize(
    ("name", "start"), [("t.json", "{"), ("t.speedscope.json", "{"), ("t.csv", "device,")]
)
def test_export_takes_the_format_from_the_name(
    name: str, start: str, run: Run, samples: Path, tmp_path: Path
) -> None:
    target = tmp_path / name

    done = run("export", str(samples / "empty.pickle"), "-o", str(target))

    assert 0 == done.code
    assert target.read_text(encoding="utf-8").startswith(start)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("fragdoctor an", "analyze"), ("fragdoctor analyze --format h", "html")],
)
def test_shell_completes_commands_and_values(typed: str, offered: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fragdoctor"],
        env={
            **os.environ,
            "_FRAGDOCTOR_COMPLETE": "complete_bash",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(len(typed.split()) - 1),
        },
        capture_output=True,
        text=True,
        check=False,
    )

    assert ([offered], "") == (done.stdout.split(), done.stderr)


def test_folder_of_sources_without_dependencies_says_what_to_run(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]

    done = subprocess.run(
        [sys.executable, "-S", "-m", "fragdoctor", "analyze", "x.pickle"],
        cwd=root,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert 2 == done.returncode
    assert f"-m pip install {root}\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words", [("analyze", "x.pickle", "--vram"), ("rehearse", "x.py", "--qlora")]
)
def test_what_an_estimate_is_told_is_no_advice_elsewhere(run: Run, words: tuple[str, ...]) -> None:
    outcome = run(*words)

    assert outcome.code == 2
    assert "--gpu 24GiB" not in outcome.err
    assert "--lora 16" not in outcome.err
