"""Kind: inference; leaks: no. Translation by beam search: encoder outputs repeated, prefixes grown by torch.cat."""

import random

import torch
import torch.nn as nn

random.seed(43)
VOCAB, D, BEAMS = 24000, 512, 5


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.src, self.tgt = nn.Embedding(VOCAB, D), nn.Embedding(VOCAB, D)
        self.model = nn.Transformer(D, 8, 4, 4, 2048, 0.0, batch_first=True)
        self.out = nn.Linear(D, VOCAB)

    def step(self, prefix, memory):
        t = prefix.size(1)
        mask = torch.triu(torch.ones(t, t, dtype=torch.bool, device=prefix.device), 1)
        h = self.model.decoder(self.tgt(prefix), memory, tgt_mask=mask)
        return self.out(h).log_softmax(-1)[:, -1]


@torch.no_grad()
def beam_search(model, source, max_len):
    n = source.size(0)
    memory = model.model.encoder(model.src(source)).repeat_interleave(BEAMS, 0)
    prefix = torch.ones(n * BEAMS, 1, dtype=torch.long, device=source.device)
    scores = torch.zeros(n, BEAMS, device=source.device)
    for _ in range(max_len):
        logp = model.step(prefix, memory).view(n, BEAMS, VOCAB)
        total = (scores[:, :, None] + logp).view(n, -1)
        scores, index = total.topk(BEAMS, dim=-1)
        beam, token = index // VOCAB, index % VOCAB
        rows = (beam + torch.arange(n, device=beam.device)[:, None] * BEAMS).view(-1)
        prefix = torch.cat([prefix[rows], token.view(-1, 1)], dim=1)
    return prefix.view(n, BEAMS, -1)[:, 0]


translator = Translator().cuda().eval()
for i in range(8):
    n, length = random.choice([8, 16, 32]), random.randint(20, 120)
    best = beam_search(translator, torch.randint(2, VOCAB, (n, length)).cuda(), max_len=random.randint(10, 30))
    print("step", i, tuple(best.cpu().shape))
