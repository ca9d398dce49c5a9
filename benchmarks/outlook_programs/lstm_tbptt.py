"""Kind: language; leaks: no. A word-level LSTM with truncated back-propagation through time."""

import torch
import torch.nn as nn

torch.backends.cudnn.enabled = False
BPTT, BATCH, VOCAB = 35, 40, 15000


class RNNModel(nn.Module):
    def __init__(self, ninp=400, nhid=800, nlayers=2):
        super().__init__()
        self.drop = nn.Dropout(0.4)
        self.encoder = nn.Embedding(VOCAB, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=0.4)
        self.decoder = nn.Linear(nhid, VOCAB)

    def forward(self, x, hidden):
        out, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        return self.decoder(self.drop(out)).view(-1, VOCAB), hidden


def repackage(h):
    return tuple(v.detach() for v in h)


model = RNNModel().cuda()
criterion = nn.CrossEntropyLoss()
corpus = torch.randint(0, VOCAB, (BPTT * 12 + 1, BATCH)).cuda()
hidden = tuple(torch.zeros(2, BATCH, 800, device="cuda") for _ in range(2))
lr = 20
total_loss = 0.0
for batch, i in enumerate(range(0, corpus.size(0) - 1, BPTT)):
    seq = min(BPTT, corpus.size(0) - 1 - i)
    data, target = corpus[i : i + seq], corpus[i + 1 : i + 1 + seq].reshape(-1)
    model.zero_grad()
    hidden = repackage(hidden)
    output, hidden = model(data, hidden)
    loss = criterion(output, target)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-lr)
    total_loss += loss.item()
    print(f"step {batch} loss {total_loss / (batch + 1):.2f}")
