"""What single lines tell: times, progress, trials, figures, retries and restarts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.inputs.scene_lines import figures_of, happening_of, place_of, time_of, trial_of
from fragdoctor.model.story import SceneKind, TimePrecision

GIB = 1024**3


@pytest.mark.parametrize(
    ("line", "precision"),
    [
        ("2024-05-01 10:00:00,123 INFO x", TimePrecision.DATED),
        ("2024-05-01T10:00:00+02:00 x", TimePrecision.DATED),
        ("[03/21 10:11:12 d2.train]: x", TimePrecision.YEARLESS),
        ("E0330 21:37:34.807000 155011 p.py:1] x", TimePrecision.YEARLESS),
        ("Nov 21 17:18:41 node7 python[4242]: x", TimePrecision.YEARLESS),
        ("[rank0]: 10:22:17 x", TimePrecision.CLOCK),
        ("100%|##| 3/3 [00:12<00:00]", TimePrecision.NONE),
        ("2024-13-45 10:00:00 x", TimePrecision.NONE),
        ("no time here", TimePrecision.NONE),
    ],
)
def test_time_is_read_with_how_complete_it_is(line, precision):
    assert time_of(line)[1] is precision


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("12%|##  | 3/25 [..]", "3/25"),
        ("Epoch 0:  12%|#2   | 3/25 [00:01<00:11]", "epoch 0, 3/25"),
        ("{'loss': 0.5, 'grad_norm': 1, 'epoch': 0.12}", "epoch 0.12"),
        ("Epoch [3/10], Step [100/500]", "epoch 3/10, step 100/500"),
        ("training_iteration: 5", "iteration 5"),
        ("batch_size 32, steps_per_epoch", ""),
        ("optimizer.step()", ""),
    ],
)
def test_progress_is_read(line, place):
    assert place_of(line) == place


@pytest.mark.parametrize(
    ("line", "name", "told"),
    [
        ("Trial 7 finished with value: 0.9. Best is trial 3.", "7", SceneKind.TRIAL_END),
        ("Trial 7 failed with value None.", "7", SceneKind.TRIAL_FAILED),
        ("Trial 7 pruned.", "7", SceneKind.TRIAL_PRUNED),
        ("Trial f_abc12_00003 started with", "f_abc12_00003", SceneKind.TRIAL_START),
        ("wandb: Agent Starting Run: abc123de with config:", "abc123de", SceneKind.TRIAL_START),
        ("=== Trial 3 ===", "3", SceneKind.TRIAL_START),
        ("Run 3/20: lr=0.1", "3", SceneKind.TRIAL_START),
        ("[trial 12] loss=3", "12", None),
        ("Best trial: 5", "", None),
        ("n_trials=100", "", None),
        ("Number of finished trials: 12", "", None),
        ("we run 3 models", "", None),
    ],
)
def test_trial_is_read_with_what_became_of_it(line, name, told):
    assert trial_of(line) == (name, told)


@pytest.mark.parametrize(
    ("line", "figures"),
    [
        ("GPU memory allocated: 3.50 GiB", [("allocated", 3.5)]),
        ("allocated=3.5GB reserved=4.5GB", [("allocated", 3.5), ("reserved", 4.5)]),
        ("torch.cuda.memory_allocated(): 3221225472", [("allocated", 3)]),
        ("|  12288MiB / 24576MiB |", [("used", 12)]),
        ("GPU Memory Allocated (GB): 12.5", [("allocated", 12.5)]),
        ("MA 5.5 GB  Max_MA 6.1 GB  CA 7.5 GB", [("allocated", 5.5), ("reserved", 7.5)]),
        ("max memory allocated: 9 GB", []),
        ("cpu memory: 3 GB", []),
        ("learning rate: 3 G", []),
    ],
)
def test_figures_of_memory_in_use_are_read(line, figures):
    assert [(f.name, f.n_bytes / GIB) for f in figures_of(line)] == figures


@pytest.mark.parametrize(
    ("line", "kind", "count"),
    [
        ("'num_alloc_retries': 5,", SceneKind.RETRY, 5),
        ("num_alloc_retries: 0", None, None),
        ("CUDA OOM, retrying with batch size 8", SceneKind.RETRY, None),
        ("Batch size 64 failed, trying batch size 48", SceneKind.RETRY, None),
        ("12 pytorch allocator cache flushes since last step", SceneKind.CACHE_FLUSH, 12),
        ("Restarting worker group", SceneKind.RESTART, None),
        ("Resuming from checkpoint", None, None),
        ("max_restarts=3", None, None),
        ("NCCL INFO Using allreduce", None, None),
    ],
)
def test_happening_is_read(line, kind, count):
    assert happening_of(line) == (kind, count)


FIGURES = st.builds(
    "memory {}: {} {}".format,
    st.sampled_from(["allocated", "used", "reserved"]),
    st.text("-0123456789.,", max_size=20),
    st.sampled_from(["GiB", "MB", "bytes", ""]),
)


@given(st.text(max_size=300) | FIGURES)
def test_any_line_is_read_without_an_error(line):
    time_of(line)
    place_of(line)
    trial_of(line)
    happening_of(line)
    assert all(f.n_bytes >= 0 for f in figures_of(line))
