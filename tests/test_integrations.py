"""Callbacks of frameworks: with stand-ins for each, and with the real ones where installed."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rehearsal_stage import Stage

from fragdoctor.capture.watch import read_figures
from fragdoctor.errors import ConfigError
from fragdoctor.integrations import AccelerateLog, lightning_callback, trainer_callback

MIB = 1 << 20
NAMES = {"allocated_bytes", "peak_bytes", "reserved_bytes", "stranded_bytes", "retries"}


class Gpu:
    """Stands for torch.cuda."""

    def __init__(self) -> None:
        self.is_there = True
        self.fraction = 1.0
        self.now = self.peak = 0

    def is_available(self) -> bool:
        return self.is_there

    def use(self, n_bytes: int) -> None:
        self.now += n_bytes
        self.peak = max(self.peak, self.now)

    def memory_stats(self, device: int | None = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.now,
            "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.current": 2 * self.now,
            "inactive_split_bytes.all.current": 5,
            "num_alloc_retries": 1,
        }

    def reset_peak_memory_stats(self, device: int | None = None) -> None:
        self.peak = self.now

    def mem_get_info(self, device: int | None = None) -> tuple[int, int]:
        return 100 * MIB, 200 * MIB

    def get_per_process_memory_fraction(self, device: int | None = None) -> float:
        return self.fraction


class Logger:
    """Stands for what logs: a trainer, a logger, an accelerator."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        self.logged.append(values)

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.logged.append(values)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    torch: Any = ModuleType("torch")
    torch.cuda = Gpu()
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    for name, base in (("transformers", "TrainerCallback"), ("lightning.pytorch", "Callback")):
        module: Any = ModuleType(name)
        setattr(module, base, type(base, (), {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    return torch.cuda  # type: ignore[no-any-return]


def test_trainer_logs_in_the_steps_in_which_it_logs(gpu: Gpu) -> None:
    trainer = Logger()
    callback = trainer_callback(trainer)
    callback.on_train_begin(None, None, None)

    for should_log in (False, True, True):
        gpu.use(3 * MIB)
        callback.on_step_end(None, None, SimpleNamespace(should_log=should_log), model=None)
    gpu.use(-2 * MIB)
    callback.on_step_end(None, None, SimpleNamespace(should_log=True))
    callback.on_train_end(None, None, None)

    first = trainer.logged[0]
    assert {f"gpu_memory/{name}" for name in (*NAMES, "headroom_bytes")} == set(first)
    assert [logged["gpu_memory/allocated_bytes"] / MIB for logged in trainer.logged] == [6, 9, 7]
    assert [logged["gpu_memory/peak_bytes"] / MIB for logged in trainer.logged] == [6, 9, 9]
    assert first["gpu_memory/headroom_bytes"] == (100 + 12 - 6) * MIB
    assert isinstance(callback, sys.modules["transformers"].TrainerCallback)


def test_headroom_ends_where_the_memory_fraction_does(gpu: Gpu) -> None:
    gpu.use(3 * MIB)
    gpu.fraction = 0.25

    assert read_figures(sys.modules["torch"], None).headroom == (50 - 3) * MIB


def test_lightning_logs_through_its_loggers_as_often_as_it_logs(gpu: Gpu) -> None:
    loggers = [Logger(), Logger()]
    trainer = SimpleNamespace(global_step=0, log_every_n_steps=2, loggers=loggers)
    callback = lightning_callback()
    callback.on_train_start(trainer, None)

    for trainer.global_step in (1, 2, 3, 4):
        callback.on_train_batch_end(trainer, None, None, None, 0)
    callback.on_exception(trainer, None, ValueError())

    assert [len(logger.logged) for logger in loggers] == [2, 2]


def test_accelerate_logs_every_nth_step(gpu: Gpu) -> None:
    accelerator = Logger()

    with AccelerateLog(accelerator, every=3) as memory:
        for _ in range(7):
            memory.step()

    assert len(accelerator.logged) == 2


def test_without_a_gpu_training_goes_on_and_nothing_is_logged(gpu: Gpu) -> None:
    gpu.is_there = False
    accelerator = Logger()

    with AccelerateLog(accelerator, bundle="never/made") as memory:
        memory.step()

    assert accelerator.logged == []


def test_stranded_is_left_out_where_it_is_not_counted(gpu, monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    accelerator = Logger()

    with AccelerateLog(accelerator) as memory:
        memory.step()

    assert "gpu_memory/stranded_bytes" not in accelerator.logged[0]


def test_missing_frameworks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(ConfigError, match="transformers is not installed"):
        trainer_callback(None)
    with pytest.raises(ConfigError, match="lightning is not installed"):
        lightning_callback()


FRAMEWORKS = {
    "transformers": """
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
        from fragdoctor.integrations import trainer_callback

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 64
            def __getitem__(self, i):
                tokens = torch.randint(0, 100, (16,))
                return {"input_ids": tokens, "labels": tokens}

        config = GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=1, n_positions=16)
        args = TrainingArguments(
            "out", max_steps=4, logging_steps=2, report_to=[], save_strategy="no"
        )
        trainer = Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=Data())
        trainer.add_callback(trainer_callback(trainer))
        trainer.train()
        rows = [r for r in trainer.state.log_history if "gpu_memory/peak_bytes" in r]
    """,
    "lightning": """
        import torch, lightning.pytorch as L
        from lightning.pytorch.loggers import CSVLogger
        from fragdoctor.integrations import lightning_callback

        class Module(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = torch.nn.Linear(64, 64)
            def training_step(self, batch, i):
                return self.net(batch[0]).square().mean()
            def configure_optimizers(self):
                return torch.optim.Adam(self.parameters())

        data = torch.utils.data.TensorDataset(torch.randn(64, 64))
        rows, logger = [], CSVLogger("csv")
        logger.log_metrics = lambda metrics, step=None: rows.append(metrics)
        trainer = L.Trainer(
            max_steps=4, accelerator="gpu", devices=1, logger=logger, log_every_n_steps=2,
            callbacks=[lightning_callback()], enable_progress_bar=False,
            enable_checkpointing=False,
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=8))
        rows = [r for r in rows if "gpu_memory/peak_bytes" in r]
    """,
    "accelerate": """
        import torch
        from accelerate import Accelerator
        from accelerate.tracking import GeneralTracker
        from fragdoctor.integrations import AccelerateLog

        class Tracker(GeneralTracker):
            name, requires_logging_directory = "test", False
            tracker = None
            def store_init_configuration(self, values):
                pass
            def log(self, values, step=None, **kwargs):
                rows.append(values)

        rows = []
        accelerator = Accelerator(log_with=Tracker())
        accelerator.init_trackers("test")
        net = torch.nn.Linear(64, 64)
        net, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters()))
        with AccelerateLog(accelerator, every=2) as memory:
            for _ in range(4):
                optimizer.zero_grad()
                loss = net(torch.randn(8, 64, device=accelerator.device)).sum()
                accelerator.backward(loss)
                optimizer.step()
                memory.step()
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_real_framework_logs_what_the_model_of_the_gpu_counts(name: str, tmp_path: Path) -> None:
    """Rehearsed: no GPU is needed, and the figures are those of the allocator model."""
    pytest.importorskip("torch")
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    check = "assert len(rows) == 2 and all(r['gpu_memory/peak_bytes'] > 1e4 for r in rows), rows\n"
    Stage(tmp_path).script(textwrap.dedent(FRAMEWORKS[name]) + check)

    found = Stage(tmp_path).json("train.py", "--gpu", "24GiB", "--steps", "99", apart=True)

    assert found["rehearsal"]["steps"] == 4
