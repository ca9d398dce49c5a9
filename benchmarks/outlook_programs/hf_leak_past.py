"""Kind: framework; leaks: yes. A chat loop keeps the past_key_values of each conversation for a reply that never comes."""

import random

import torch
from transformers import GPT2Config, GPT2LMHeadModel

random.seed(131)


class ChatBot:
    def __init__(self):
        config = GPT2Config(vocab_size=20000, n_positions=1024, n_embd=768, n_layer=6, n_head=12)
        self.model = GPT2LMHeadModel(config).half().cuda().eval()
        self.sessions = {}

    @torch.no_grad()
    def reply(self, session, ids, n_new=8):
        out = self.model(ids, past_key_values=self.sessions.get(session), use_cache=True)
        token, words = out.logits[:, -1:].argmax(-1), []
        for _ in range(n_new):
            words.append(token)
            out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        self.sessions[session] = out.past_key_values
        return torch.cat(words, 1)


bot = ChatBot()
for i in range(14):
    prompt = torch.randint(0, 20000, (6, random.randint(300, 700))).cuda()
    answer = bot.reply(f"user-{i}", prompt)
    print("step", i, answer.shape, len(bot.sessions))
