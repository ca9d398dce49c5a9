"""Configuration files from strangers: what they hold is read, what they attack with is refused."""

from __future__ import annotations

import builtins
import json
import time
from pathlib import Path

import pytest

from fragdoctor.errors import ConfigError, FragdoctorError, InputError, LimitExceeded
from fragdoctor.errors import RefusedSnapshot as Refused
from fragdoctor.estimation.recipes.documents import MAX_BYTES, MAX_DEPTH, parse_yaml, read_entries


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "batch: 4\nmodel:\n  name: x\n"),
        ("a.toml", 'batch = 4\n[model]\nname = "x"\n'),
        ("a.json", '{"batch": 4, "model": {"name": "x"}}'),
    ],
)
def test_the_three_notations_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    entries = read_entries(written(tmp_path, name, text))

    assert {"batch": 4, "model": {"name": "x"}} == entries


def test_anchors_and_merged_mappings_are_read() -> None:
    text = "base: &base\n  batch: 4\nrun:\n  <<: *base\n  seq: 8\n"

    assert {"batch": 4, "seq": 8} == parse_yaml(text, "a.yaml")["run"]


@pytest.mark.parametrize(
    ("name", "text", "error", "said"),
    [
        # Each line ten times the one before: nine lines, a billion values.
        (
            "bomb.yaml",
            "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(
                f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]\n"
                for i in range(8)
            ),
            LimitExceeded,
            "larger than any genuine",
        ),
        ("code.yaml", "a: !!python/object/apply:os.system ['true']\n", Refused, "plain values"),
        ("own.yaml", "a: !mine {b: 1}\n", Refused, "plain values"),
        ("cycle.yaml", "a: &a [*a]\n", Refused, "contains itself"),
        ("deep.yaml", "a: " + "[" * 3000 + "]" * 3000, LimitExceeded, "nested deeper"),
        ("deep.json", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", LimitExceeded, "deeper"),
        ("deep.toml", "a = " + "[" * 5000 + "]" * 5000, LimitExceeded, "deeper"),
        ("number.yaml", "a: " + "9" * 5000, InputError, "not YAML"),
        ("date.yaml", "a: 2024-13-45\n", InputError, "not YAML"),
        ("list.yaml", "- a\n- b\n", InputError, "does not map names to values"),
        ("empty.yaml", "", InputError, "does not map names to values"),
        ("broken.yaml", "a: [1\nb: 2\n", InputError, "not YAML"),
        ("broken.toml", "a = \n", InputError, "not TOML"),
        ("broken.json", "{", InputError, "not JSON"),
        ("key.yaml", "? [a, b]\n: 1\n", Refused, "plain values"),
    ],
)
def test_hostile_or_broken_text_is_one_sentence(
    tmp_path: Path, name: str, text: str, error: type[FragdoctorError], said: str
) -> None:
    started = time.monotonic()

    with pytest.raises(error) as caught:
        read_entries(written(tmp_path, name, text))

    assert said in caught.value.message
    assert "\n" not in caught.value.message
    assert time.monotonic() - started < 20


def test_depth_is_counted_to_its_last_level(tmp_path: Path) -> None:
    def nested(levels: int) -> str:
        return json.dumps({"a": json.loads("[" * levels + "]" * levels)})

    assert read_entries(written(tmp_path, "a.json", nested(MAX_DEPTH - 1)))
    with pytest.raises(LimitExceeded):
        read_entries(written(tmp_path, "b.json", nested(MAX_DEPTH + 1)))


def test_file_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "a.yaml", "a: 1\n" + "#" * MAX_BYTES)

    with pytest.raises(LimitExceeded):
        read_entries(path)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"a: \xff\xfe")

    with pytest.raises(InputError, match="UTF-8"):
        read_entries(path)


def test_without_pyyaml_the_install_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def without_yaml(name: str, *rest: object, **more: object) -> object:
        if name == "yaml":
            raise ImportError(name)
        return load(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_yaml)

    with pytest.raises(ConfigError) as caught:
        parse_yaml("a: 1", "sft.yaml")

    assert "pip install 'fragdoctor[yaml]'" in caught.value.hint


@pytest.mark.parametrize("name", ["a.yaml", "a.toml"])
def test_number_beyond_any_configuration_is_refused(tmp_path: Path, name: str) -> None:
    text = "a: 0x" + "F" * 9000 if name.endswith("yaml") else "a = 0x" + "F" * 9000

    with pytest.raises(LimitExceeded, match="number"):
        read_entries(written(tmp_path, name, text))
