"""generate(): greedy, sampling and beams, to the last new token."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
).eval()
calls = []
model.register_forward_hook(lambda *args: calls.append(args))
ids = torch.randint(3, 128, (2, 7))
WAYS = (
    {"do_sample": False},
    {"do_sample": True, "top_k": 5, "temperature": 0.7},
    {"num_beams": 2},
    {"num_beams": 3, "early_stopping": True},
    {"cache_implementation": "static"},
)
for context in (torch.no_grad, torch.inference_mode):
    for options in WAYS:
        calls.clear()
        with context():
            result = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, pad_token_id=0, **options
            )
        if (tuple(result.shape), len(calls)) != ((2, 13), 6):
            raise ValueError(f"{context.__name__}, {options}: {tuple(result.shape)}, {len(calls)} calls")
