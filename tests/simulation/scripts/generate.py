"""generate(): sampling and beams, to the last new token."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(
    LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
).eval()
ids = torch.randint(3, 128, (2, 7))
for options in ({"do_sample": False}, {"do_sample": True, "top_k": 5, "temperature": 0.7}, {"num_beams": 2}):
    result = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, pad_token_id=0, **options)
    print(tuple(result.shape))
