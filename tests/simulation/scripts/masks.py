"""A batch without padding needs no mask; one with padding does. Arguments: how many tokens are padding, and the device."""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

padding, device = int(sys.argv[1]), sys.argv[2]
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("tiny")).to(device)
model.gradient_checkpointing_enable()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = {
    "input_ids": torch.randint(0, 128, (2, 48)), "attention_mask": torch.tensor([[1] * 48, [1] * (48 - padding) + [0] * padding])
}  # fmt: skip
for _ in range(2):
    inputs = {name: tensor.to(device) for name, tensor in batch.items()}
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
