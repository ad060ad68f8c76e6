from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.ops.layouts import MORE_DTYPES, every, layouts

pinv = torch.ops.aten.linalg_pinv.atol_rtol_tensor


def test_pseudo_inverses() -> None:
    def calls() -> Iterator[Any]:
        for shape in ((3, 3), (4, 3), (2, 3, 4), (2, 3, 3), (0, 3, 4), (2, 0, 3), (3,), (), (1, 2, 4, 3)):
            for x in layouts(shape, few=True):
                yield pinv, x
                yield pinv, x, {"atol": torch.tensor(0.1), "rtol": torch.tensor(0.1)}
                if len(shape) >= 2 and shape[-1] == shape[-2]:
                    yield pinv, x, {"hermitian": True}
        for shape in ((3, 4), (0, 3, 4), (2, 0, 3)):
            yield pinv, torch.rand(shape), {"hermitian": True}
        yield pinv, torch.rand(3, 4), {"atol": torch.tensor(0.1j)}
        for dtype in MORE_DTYPES:
            yield pinv, torch.eye(3).to(dtype)

    every(calls())
