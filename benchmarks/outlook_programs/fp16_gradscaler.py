"""Kind: language; leaks: no. A text classifier in fp16 with a gradient scaler and the fused AdamW."""

import torch
import torch.nn as nn


class TextNet(nn.Module):
    def __init__(self, vocab=30000, d=384, layers=6, classes=6):
        super().__init__()
        self.embedding = nn.Embedding(vocab, d)
        encoder_layer = nn.TransformerEncoderLayer(d_model=d, nhead=6, dim_feedforward=4 * d, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder_layer, layers, enable_nested_tensor=False)
        self.classifier = nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Dropout(0.1), nn.Linear(d, classes))

    def forward(self, tokens):
        hidden = self.encoder(self.embedding(tokens))
        return self.classifier(hidden.max(dim=1).values)


def train_one_epoch(model, loader, optimizer, scaler, criterion, epoch):
    model.train()
    for i, (tokens, labels) in enumerate(loader):
        tokens, labels = tokens.cuda(), labels.cuda()
        optimizer.zero_grad(set_to_none=True)
        with torch.amp.autocast("cuda"):
            loss = criterion(model(tokens), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        print(f"step {epoch}/{i} loss {loss.item():.4f}")


def main():
    data = torch.utils.data.TensorDataset(torch.randint(0, 30000, (320, 256)), torch.randint(0, 6, (320,)))
    loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True, drop_last=True)
    model = TextNet().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(2):
        train_one_epoch(model, loader, optimizer, scaler, nn.CrossEntropyLoss(), epoch)


if __name__ == "__main__":
    main()
