"""A plain loop with accumulation, clipping, logging and a checkpoint of every step."""

import argparse
import os

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="checkpoints")
parser.add_argument("--accumulate", type=int, default=2)
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
best = float("inf")
os.makedirs(options.out, exist_ok=True)
for step in range(10):
    for _ in range(options.accumulate):
        x = torch.randn(32, 64, device=device)
        loss = nn.functional.mse_loss(model(x), x) / options.accumulate
        if not torch.isfinite(loss):
            raise RuntimeError(f"loss is {loss.item()}")
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if loss < best:
        best = loss.item()
        torch.save({"model": model.state_dict(), "step": step}, os.path.join(options.out, "best.pt"))
    print(f"step {step}: loss {loss:.4f}, norm {norm:.2f}, lr {scheduler.get_last_lr()[0]:.2e}")
    again = torch.load(os.path.join(options.out, "best.pt"), map_location=device)
    model.load_state_dict(again["model"])
print("evaluation")
