"""PEFT: LoRA on a pretrained model, whose weights are not here; the adapter is saved and loaded."""

import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

folder = sys.argv[1]
base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
model.print_trainable_parameters()
model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
ids = torch.randint(0, 128, (2, 16))
for step in range(2):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    model.save_pretrained("adapter")
    optimizer.step() if step else None
    optimizer.zero_grad()
again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), "adapter")
optimizer.step()
