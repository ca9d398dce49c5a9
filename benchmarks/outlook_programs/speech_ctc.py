"""Kind: audio; leaks: no. Speech recognition with CTC: convolutions and a GRU over utterances of any length."""

import random

import torch
import torch.nn as nn

random.seed(3)
torch.backends.cudnn.enabled = False


class DeepSpeech(nn.Module):
    def __init__(self, n_mels=80, width=384, n_chars=29):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 32, (11, 5), stride=(2, 2), padding=(5, 2)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (11, 5), stride=(1, 2), padding=(5, 2)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
        )
        self.proj = nn.Linear(32 * 20, width)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(4))
        self.fc = nn.Linear(width, n_chars)

    def forward(self, x):
        x = self.conv(x.unsqueeze(1).transpose(2, 3))
        b, c, t, f = x.shape
        x = self.proj(x.transpose(1, 2).reshape(b, t, c * f))
        for layer in self.layers:
            x = layer(x)
        return self.fc(x).log_softmax(-1)


def collate(n):
    seconds = [random.uniform(2, 12) for _ in range(n)]
    frames = [int(100 * s) for s in seconds]
    feats = torch.zeros(n, 80, max(frames))
    targets = torch.randint(1, 29, (n, int(max(seconds) * 6)))
    return feats, torch.tensor(frames), targets, torch.tensor([int(s * 6) for s in seconds])


model = DeepSpeech().cuda()
ctc = nn.CTCLoss(zero_infinity=True)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for i in range(11):
    feats, frames, targets, lengths = collate(16)
    logp = model(feats.cuda())
    loss = ctc(logp.transpose(0, 1), targets.cuda(), (frames // 2).cuda(), lengths.cuda())
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 400)
    opt.step()
    print("step", i, "frames", int(frames.max()), "loss", loss.item())
