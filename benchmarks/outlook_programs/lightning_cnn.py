"""Kind: framework; leaks: no. A LightningModule with validation in between, mixed precision."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitNet(L.LightningModule):
    def __init__(self, width=64):
        super().__init__()
        layers, c = [], 3
        for w in (width, 2 * width, 4 * width, 8 * width):
            layers += [nn.Conv2d(c, w, 3, padding=1), nn.BatchNorm2d(w), nn.ReLU(), nn.Conv2d(w, w, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            c = w
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        print("step", self.global_step)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x)
        self.log("val_acc", (out.argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def data(n):
    return TensorDataset(torch.zeros(n, 3, 96, 96), torch.zeros(n, dtype=torch.long))


train, val = DataLoader(data(48 * 4), batch_size=48), DataLoader(data(192), batch_size=96)
trainer = L.Trainer(
    accelerator="gpu", devices=1, max_epochs=3, precision="bf16-mixed", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
)
trainer.fit(LitNet(), train, val)
