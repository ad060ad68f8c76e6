"""Values under the names that their symbols had in an earlier run."""

from __future__ import annotations

from typing import Any

import torch

from understudy.fake.mode import FakeTensorMode
from understudy.fake.realise import make_view
from understudy.fake.tensor import FakeTensor
from understudy.infer.call import mapped
from understudy.shapes.conditions import Condition
from understudy.shapes.floats import FloatExpr
from understudy.shapes.node import SymNode
from understudy.spec import TensorSpec

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def in_known_names(mode: FakeTensorMode, value: Any) -> Any:
    """The same tensors and numbers, with each symbol that was renamed under its new name."""
    env = mode.shape_env

    def renamed_value(value: Any) -> Any:
        if isinstance(value, FloatExpr):
            return env.float_expr(value.operation, *map(renamed_value, value.arguments))
        return env.with_merged_symbols(value) if isinstance(value, Condition) else env.simplify(value)

    def renamed(size: Any) -> Any:
        return env.node(renamed_value(size.value), size.kind) if type(size) is SymNode else size

    def of_spec(spec: TensorSpec) -> TensorSpec:
        shape, stride = tuple(map(renamed, spec.shape)), tuple(map(renamed, spec.stride))
        return spec.viewed(shape, stride, renamed(spec.offset))

    def of_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            node = leaf.node
            return renamed(node).symbolic if type(node) is SymNode else leaf
        if type(leaf) is not FakeTensor or not leaf._spec.is_symbolic or leaf._spec.sparse is not None:
            return leaf
        spec = of_spec(leaf._spec)
        return leaf if spec is leaf._spec else make_view(mode, leaf, spec)

    return mapped(of_leaf, (torch.Tensor, *SYMBOLIC), value)
