"""Mixed precision with a scaler, and checkpointed blocks."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

device = "cuda" if torch.cuda.is_available() else "cpu"
blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(3)).to(
    device
)
optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler(device)
for step in range(5):
    x = torch.randn(16, 64, device=device)
    with torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16):
        for block in blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        loss = x.float().pow(2).mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(blocks.parameters(), 1.0)
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    assert scaler.get_scale() >= scale
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item())
