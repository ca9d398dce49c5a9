"""Kind: framework; leaks: no. accelerate with gradient accumulation and clipping over a small Mistral."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import MistralConfig, MistralForCausalLM, get_cosine_schedule_with_warmup


def main():
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    config = MistralConfig(
        vocab_size=16000, hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=1024, sliding_window=None,
    )
    model = MistralForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 10)
    loader = DataLoader(TensorDataset(torch.randint(0, 16000, (128, 384))), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    running, update = 0.0, 0
    for (ids,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            running += loss.detach().float().item() / 4
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            print("step", update, "loss", running)
            running, update = 0.0, update + 1


main()
