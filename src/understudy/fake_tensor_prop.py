"""Fake values for the nodes of a graph, under the names of `torch.fx.passes.fake_tensor_prop`.

A program that imports from there changes one line.
"""

from __future__ import annotations

from understudy.prop.propagation import FakeTensorProp

__all__ = [
    "FakeTensorProp",
]
