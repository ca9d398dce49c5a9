from __future__ import annotations

import io

import pytest

from fragdoctor import ConfigError, watch
from fragdoctor.capture.watch import Figures, exposition, steady_growth


def lines(file: io.StringIO) -> list[list[str]]:
    return [line.split() for line in file.getvalue().splitlines()]


def test_watch_of_a_loader_prints_a_line_a_step_and_what_grows(fake_torch) -> None:
    file = io.StringIO()

    for _ in watch(range(5), file=file):
        fake_torch.alloc(3)

    head, *rows, summary = file.getvalue().splitlines()
    assert ["step", "allocated", "peak", "reserved", "stranded", "retries"] == head.split()
    assert ["1", "3.00", "MiB", "3.00", "MiB", "3.00", "MiB", "0", "B", "0"] == rows[0].split()
    assert 5 == len(rows)
    assert {len(head)} == {len(row) for row in rows}
    assert "5 steps: allocated memory grows by 3.00 MiB a step after step 2." == summary


def test_watch_block_prints_every_nth_step_and_the_first(fake_torch) -> None:
    file = io.StringIO()

    with watch(every=4, file=file) as steps:
        for _ in range(9):
            figures = steps.step()

    assert ["1", "4", "8"] == [line[0] for line in lines(file)[1:-1]]
    assert 0 == figures.allocated
    assert "9 steps: allocated memory does not grow" in file.getvalue()


def test_watch_that_is_left_early_ends_with_its_summary(fake_torch) -> None:
    file = io.StringIO()

    items = iter(watch([1, 2, 3], file=file))
    next(items)
    items.close()

    assert "0 steps: too few" in file.getvalue()


def test_watch_under_expandable_segments_counts_no_stranded(fake_torch, monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments: True")
    file = io.StringIO()

    with watch(file=file) as steps:
        assert steps.step().stranded is None

    assert "-" == lines(file)[1][-2]


def test_watch_has_the_length_of_what_it_watches(fake_torch) -> None:
    assert 3 == len(watch([1, 2, 3]))
    with pytest.raises(TypeError):
        len(watch(iter([1])))


def test_watch_of_nothing_cannot_be_iterated(fake_torch) -> None:
    with pytest.raises(ConfigError, match="nothing to iterate"):
        list(watch())


@pytest.mark.parametrize("every", [0, -1, True, 1.5])
def test_watch_with_a_wrong_pace_is_refused(fake_torch, every) -> None:
    with pytest.raises(ConfigError):
        watch(every=every)


def test_watch_without_a_gpu_is_one_sentence(fake_torch) -> None:
    fake_torch.cuda.is_available = lambda: False

    with pytest.raises(ConfigError, match="Watching needs a GPU"):
        watch()


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        ([5, 9, 9, 9, 9], 0.0),
        ([5, 9, 12, 15, 18], 3.0),
        ([5, 9, 12, 8, 13, 7], 0.0),
        ([5, 9, 8, 7], 0.0),
        ([5, 9, 12], None),
        ([5, 9, 8, 9, 10, 11], 1.0),
        ([5, *range(9, 409), *[408] * 600], 0.0),  # filled up
        ([5, *range(9, 1009)], 1.0),
    ],
)
def test_growth_is_steady_or_none(series, expected) -> None:
    assert steady_growth(series) == (None if expected is None else pytest.approx(expected))


def test_metrics_are_a_file_that_collectors_read(fake_torch, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "3")
    path = tmp_path / "gpu-{rank}.prom"

    for _ in watch(range(2), file=io.StringIO(), metrics=path, device=0):
        fake_torch.alloc(3)

    text = (tmp_path / "gpu-3.prom").read_text()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    labels = '{rank="3",device="0"}'
    assert samples[f"fragdoctor_gpu_memory_allocated_bytes{labels}"] == str(6 << 20)
    assert samples[f"fragdoctor_gpu_memory_steps_total{labels}"] == "2"
    assert text.count("# TYPE") == text.count("# HELP") == len(samples)
    assert text.endswith("# EOF\n")
    assert [p.name for p in tmp_path.iterdir()] == ["gpu-3.prom"]


def test_metrics_that_cannot_be_written_do_not_end_a_training(fake_torch, tmp_path, capsys) -> None:
    (tmp_path / "taken").mkdir()

    for _ in watch(range(3), file=io.StringIO(), metrics=tmp_path / "taken"):
        fake_torch.alloc(1)

    assert capsys.readouterr().err.count("fragdoctor: no metrics") == 1
    with pytest.raises(ConfigError, match="is no folder"):
        watch(range(1), metrics=tmp_path / "nowhere" / "x.prom")


def test_labels_are_escaped() -> None:
    figures = Figures(1, 2, 3, None, 5)

    text = exposition(figures, 1, {"rank": 'a"b\\c\nd'})

    assert 'rank="a\\"b\\\\c\\nd"' in text
    assert "stranded" not in text
    assert "headroom" not in text
