from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.ops.layouts import MORE_DTYPES, every, layouts

hash_tensor = torch.ops.aten.hash_tensor.default


def test_hashes() -> None:
    def calls() -> Iterator[Any]:
        for shape in ((3, 4), (), (0, 3), (2, 1, 3)):
            for x in layouts(shape, few=True):
                yield hash_tensor, x
                for dim in ([0], [-1], [0, 1], [1, 1], [5]):
                    yield hash_tensor, x, dim
                    yield hash_tensor, x, dim, {"keepdim": True}
        for dtype in MORE_DTYPES:
            yield hash_tensor, torch.ones(3).to(dtype)
        yield hash_tensor, torch.ones(3), {"mode": 1}

    every(calls())
