"""Kind: language; leaks: no. A language model on batches of similar lengths, AdamW, a token budget."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, DIM, LAYERS = 16000, 384, 6
random.seed(11)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Embedding(1024, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 6, 4 * DIM, dropout=0.1, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        t = ids.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(t, device=ids.device)
        x = self.emb(ids) + self.pos(torch.arange(t, device=ids.device))
        return self.head(self.enc(x, mask=mask, is_causal=True))


def batches(n, tokens=4096):
    """Batches of one length each, with about the same number of tokens."""
    for _ in range(n):
        length = random.choice([64, 96, 128, 176, 256, 384, 512]) + random.randrange(0, 24)
        yield torch.randint(1, VOCAB, (max(1, tokens // length), length))


model = LM().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for i, ids in enumerate(batches(12)):
    ids = ids.cuda(non_blocking=True)
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"step {i}: {tuple(ids.shape)} loss {loss.item():.3f}")
