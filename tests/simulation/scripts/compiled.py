"""torch.compile, and a loader with workers."""

import torch
from torch import nn


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.full((16,), float(index))
        return x, x.pow(2).sum()


@torch.compile
def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x).squeeze(-1), y)


def main():
    model = torch.compile(nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader(
        Squares(), batch_size=8, shuffle=True, num_workers=2, persistent_workers=True
    )
    for epoch in range(2):
        for x, y in loader:
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(epoch, loss.item())


if __name__ == "__main__":
    main()
