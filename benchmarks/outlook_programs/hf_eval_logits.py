"""Kind: framework; leaks: no. A Llama of transformers; evaluation gathers logits on the GPU and lets them go."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

VOCAB, LENGTH = 8000, 256


def batch(n=8):
    ids = torch.randint(0, VOCAB, (n, LENGTH)).cuda()
    return {"input_ids": ids, "labels": ids}


@torch.no_grad()
def evaluate(model, n_batches=8):
    model.eval()
    preds, labels = [], []
    for _ in range(n_batches):
        inputs = batch()
        out = model(**inputs)
        preds.append(out.logits)
        labels.append(inputs["labels"])
    preds, labels = torch.cat(preds), torch.cat(labels)
    accuracy = (preds[:, :-1].argmax(-1) == labels[:, 1:]).float().mean().item()
    model.train()
    return accuracy


def main():
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=6, max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 9)
    for step in range(1, 10):
        loss = model(**batch()).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            print("accuracy", evaluate(model))
        print("step", step, loss.item())


main()
