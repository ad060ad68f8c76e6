"""to_torch: a captured graph with torch's own fake values in its nodes, for torch's own tools.

The only module of the library that uses torch's fake tensors and symbolic shapes. It is loaded when it is first used.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.fx.experimental.symbolic_shapes import ShapeEnv as TorchShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp as TorchFakeTensorProp

from understudy import _torch
from understudy.errors import UnderstudyError
from understudy.fake.tensor import FakeTensor
from understudy.shapes.node import SymNode
from understudy.spec import TensorSpec

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
OURS = ("val", "tensor_meta", "unbacked_bindings")


def to_torch(graph_module: GraphModule, mode: Any = None) -> GraphModule:
    """The same graph, with torch's own fake tensors and symbols in `meta["val"]`, for `torch._inductor` and its like.

    `mode`: the `torch._subclasses.FakeTensorMode` that they shall belong to. Parameters and constants are shared with
    the given graph module, which stays as it is.
    """
    mode = mode or TorchFakeTensorMode(allow_non_fake_inputs=True, shape_env=TorchShapeEnv())
    symbols = TorchSymbols(mode.shape_env)
    return _convert_graph(graph_module, mode, symbols)


class TorchSymbols:
    """Torch's symbols for ours: one for each, with the same example, in one of torch's environments."""

    def __init__(self, shape_env: Any) -> None:
        self._env = shape_env
        self._symbols: dict[Any, Any] = {}

    def number(self, value: Any) -> Any:
        """Torch's number for a plain or symbolic one of ours."""
        node = value.node if isinstance(value, SYMBOLIC) else value
        if type(node) is not SymNode:
            return value
        if node.is_plain:
            return node.value
        expression = node.value
        if not hasattr(expression, "symbols") or self._env is None:
            raise UnderstudyError(f"{node} has no counterpart among torch's symbols")
        values = {symbol: self._symbol(node.shape_env, symbol) for symbol in expression.symbols}
        return expression.evaluate(values)

    def _symbol(self, env: Any, symbol: Any) -> Any:
        if symbol not in self._symbols:
            hint = env.get_hint(symbol)
            if hint is None:
                self._symbols[symbol] = self._env.create_unbacked_symint()
                if symbol.low is not None and symbol.low >= 0:
                    torch._check(self._symbols[symbol] >= 0)
            else:
                source = torch._dynamo.source.ConstantSource(symbol.name)
                made = self._env.create_symbol(
                    hint, source, dynamic_dim=DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
                )
                self._symbols[symbol] = self._env.create_symintnode(made, hint=hint, source=source)
        return self._symbols[symbol]


def _convert_graph(graph_module: GraphModule, mode: Any, symbols: TorchSymbols) -> GraphModule:
    result = GraphModule(graph_module, _copy_graph(graph_module.graph), graph_module._get_name())
    for name, inner in graph_module.named_children():
        if isinstance(inner, GraphModule):
            setattr(result, name, _convert_graph(inner, mode, symbols))
    inputs = [
        _as_torch(node.meta.get("val"), mode, symbols) for node in result.graph.find_nodes(op="placeholder")
    ]
    for node in result.graph.nodes:
        for name in OURS:
            node.meta.pop(name, None)
    with torch.no_grad():
        TorchFakeTensorProp(result, mode).propagate_dont_convert_inputs(*inputs)
    return result


def _copy_graph(graph: torch.fx.Graph) -> torch.fx.Graph:
    made = torch.fx.Graph()
    nodes: dict[Node, Node] = {}
    output = made.graph_copy(graph, nodes)
    made.output(output)
    made.set_codegen(copy.copy(_torch.codegen_of(graph)))
    return made


def _as_torch(value: Any, mode: Any, symbols: TorchSymbols) -> Any:
    if type(value) is FakeTensor:
        return _tensor(value._spec, mode, symbols)
    if isinstance(value, SYMBOLIC):
        return symbols.number(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_as_torch(part, mode, symbols) for part in value)
    return value


def _tensor(spec: TensorSpec, mode: Any, symbols: TorchSymbols) -> torch.Tensor:
    shape = [symbols.number(size) for size in spec.shape]
    stride = [symbols.number(step) for step in spec.stride]
    with mode:
        tensor = torch.empty_strided(shape, stride, dtype=spec.dtype, device=spec.device)
        offset = symbols.number(spec.offset)
        return tensor if isinstance(offset, int) and offset == 0 else tensor.as_strided(shape, stride, 0)
