"""Kind: framework; leaks: no. Whisper from a configuration, transcripts of any length, Adam on all parameters."""

import random

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

random.seed(113)


def batches(n, size=6):
    for _ in range(n):
        lengths = [random.randint(20, 220) for _ in range(size)]
        labels = torch.full((size, max(lengths)), -100)
        for row, length in zip(labels, lengths):
            row[:length] = torch.randint(0, 20000, (length,))
        yield torch.randn(size, 80, 3000), labels


config = WhisperConfig(
    vocab_size=20000, d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6,
    decoder_attention_heads=6, encoder_ffn_dim=1536, decoder_ffn_dim=1536, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, decoder_start_token_id=1,
)
model = WhisperForConditionalGeneration(config).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
model.train()
for i, (features, labels) in enumerate(batches(9)):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(input_features=features.cuda(), labels=labels.cuda()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", i, labels.size(1), loss.item())
