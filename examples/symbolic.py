"""One run of a transformer that answers for every batch size and length.

    python -m examples.symbolic

The model is run once, on stand-ins whose sizes are symbols. What comes out has its shape in terms of `batch` and
`seq`; what had to be assumed on the way is listed with the line that assumed it, and can be checked on real inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.llama import SIZES, Llama
from understudy import Dim, FakeTensorMode, ShapeEnv

WINDOW = 8
LONGEST = 2048


class Summary(nn.Module):
    """One vector for each window of 8 tokens, above a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Llama(SIZES["tiny"])
        self.positions = nn.Parameter(torch.zeros(LONGEST, self.model.size.vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > LONGEST:
            tokens = tokens[:, -LONGEST:]
        logits = self.model(tokens)
        logits = logits + self.positions[: tokens.shape[1]]
        windows = logits.view(-1, WINDOW, logits.shape[-1])
        return windows.mean(1)


def main() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    with mode:
        model = Summary()
    example = torch.zeros(4, 96, dtype=torch.int64)
    tokens = mode.from_tensor(
        example, source="tokens", symbolic_context=(Dim("batch"), Dim("seq", max=100_000))
    )
    with mode, torch.no_grad():
        out = model(tokens)

    print("input:  ", tokens.spec)
    print("output: ", out.spec)
    print("\nThis holds for all inputs with:")
    for guard in env.guards:
        print("  ", guard)
    for shape in ((2, 2048), (16, 100), (3, 100)):
        broken = env.check(torch.zeros(shape, dtype=torch.int64))
        print(f"\ntokens of shape {shape}: {'fine' if not broken else ''}")
        for entry in broken:
            print("  ", entry)


if __name__ == "__main__":
    main()
