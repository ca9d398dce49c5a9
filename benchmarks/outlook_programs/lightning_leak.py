"""Kind: framework; leaks: yes. A LightningModule appends its outputs of each training step to a list of its own."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Denoiser(L.LightningModule):
    def __init__(self, c=24):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, c, 3, padding=1), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1), nn.ReLU(),
            nn.Conv2d(c, c, 3, padding=1), nn.ReLU(), nn.Conv2d(c, 3, 3, padding=1),
        )
        self.training_step_outputs = []

    def training_step(self, batch, batch_idx):
        (clean,) = batch
        noisy = clean + 0.1 * torch.randn_like(clean)
        restored = noisy - self.body(noisy)
        loss = F.mse_loss(restored, clean)
        self.training_step_outputs.append({"loss": loss.detach(), "restored": restored})
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        print("step", batch_idx, len(self.training_step_outputs))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


loader = DataLoader(TensorDataset(torch.zeros(24 * 20, 3, 192, 192)), batch_size=24)
trainer = L.Trainer(
    accelerator="gpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Denoiser(), loader)
