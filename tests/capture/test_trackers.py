"""The mappings of a tracer: tensors and symbolic numbers to their proxies."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest
import torch
from torch.fx import Proxy

from understudy.proxy_tensor import get_proxy_mode, make_fx


def test_tensors_and_numbers() -> None:
    seen: list[Any] = []
    outside = torch.ones(2)

    def program(x: torch.Tensor) -> torch.Tensor:
        tracer: Any = get_proxy_mode().tracer
        y = x + x.shape[0]
        tensors, numbers = tracer.tensor_tracker, tracer.symnode_tracker
        assert isinstance(tensors, MutableMapping) and isinstance(numbers, MutableMapping)
        assert y in tensors and outside not in tensors
        assert isinstance(tensors[y].proxy, Proxy) and tensors[y].proxy.node.name == "add"
        names = {slot.proxy.node.name for slot in tensors.values()}
        assert {"x_1", "add"} <= names and len(tensors) == len(list(tensors)) >= 2
        size = x.shape[1]
        assert size in numbers and numbers[size].force().node.target is torch.ops.aten.sym_size.int
        assert len(numbers) == len(list(numbers)) and any(bool(key == size) for key in numbers)
        z = y.detach()
        tensors[z] = tensors[x]
        assert tensors[z].proxy.node.name == "x_1"
        del tensors[z]
        assert z not in tensors
        for tracker, key in ((tensors, outside), (tensors, z)):
            with pytest.raises(KeyError):
                tracker[key]
            with pytest.raises(KeyError):
                del tracker[key]
        seen.append(names)
        return y

    make_fx(program, tracing_mode="symbolic")(torch.ones(3, 4))
    assert seen
