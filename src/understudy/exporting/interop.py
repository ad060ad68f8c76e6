"""to_torch: a captured graph with torch's own fake values in its nodes, for torch's own tools.

The only module of the library that uses torch's fake tensors and symbolic shapes. It is loaded when it is first used.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor as TorchFakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.fx.experimental.symbolic_shapes import ShapeEnv as TorchShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp as TorchFakeTensorProp
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from understudy import _torch
from understudy.errors import UnderstudyError
from understudy.fake.tensor import FakeTensor
from understudy.graph.lazy_dict import LazyDict
from understudy.graph.symbol_nodes import OPERATIONS, RELATIONS
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.algebra.floats import Operand
from understudy.shapes.algebra.writers import Term, Writable, Writer
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


class TorchNumbers(Writer[Any]):
    """An expression, computed with torch's numbers for its symbols. Nothing is decided: a number that varies stays one."""

    def __init__(self, symbols: Mapping[Expr, Any]) -> None:
        self._symbols = symbols

    def write_number(self, number: float) -> Any:
        return number

    def write_symbol(self, symbol: Expr) -> Any:
        return self._symbols[symbol]

    def write_sum(self, terms: Sequence[Term]) -> Any:
        total: Any = 0
        for monomial, coefficient in terms:
            for atom, exponent in monomial:
                coefficient = coefficient * self.write(atom) ** exponent
            total = total + coefficient
        return total

    def write_operation(self, value: Writable, operation: str, operands: Sequence[Operand]) -> Any:
        parts = [self.write(operand) for operand in operands]
        return parts[0] if operation == "value" else OPERATIONS[operation](*parts)

    def write_comparison(self, relation: str, left: Any, right: Any) -> Any:
        return RELATIONS[relation](left, right)

    def write_junction(self, kind: str, parts: Sequence[Writable]) -> Any:
        return functools.reduce(operator.and_ if kind == "and" else operator.or_, map(self.write, parts))


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
        expression: Any = node.shape_env.simplify(node.value)
        if isinstance(expression, (int, float, bool)):
            return expression
        if not hasattr(expression, "symbols") or self._env is None:
            raise UnderstudyError(f"{node} has no counterpart among torch's symbols")
        numbers = TorchNumbers(
            {symbol: self._symbol(node.shape_env, symbol) for symbol in expression.symbols}
        )
        return numbers.write(expression)

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
            self._set_range(self._symbols[symbol], env, symbol)
        return self._symbols[symbol]

    def _set_range(self, number: Any, env: Any, symbol: Any) -> None:
        low, high = symbol.low, symbol.high
        if env.is_unbacked(symbol):  # no input to check: promises about it are its range
            low, high = env.facts.interval(symbol)
        bounds = ValueRanges(0 if low is None else low, int_oo if high is None else high)
        if number.node.expr in self._env.var_to_range:
            self._env.var_to_range[number.node.expr] = bounds

    def ranges(self) -> dict[Any, Any]:
        """The range of each symbol that was converted, as exported programs state them."""
        return {
            number.node.expr: self._env.var_to_range[number.node.expr]
            for number in self._symbols.values()
            if number.node.expr in self._env.var_to_range
        }

    def range_of(self, number: Any) -> Any:
        """The range of a converted number."""
        return self._env.bound_sympy(number.node.expr)


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
    with _torch.grad_mode(False):
        TorchFakeTensorProp(result, mode).propagate_dont_convert_inputs(*inputs)
    return result


def _copy_graph(graph: torch.fx.Graph) -> torch.fx.Graph:
    made = torch.fx.Graph()
    nodes: dict[Node, Node] = {}
    output = made.graph_copy(graph, nodes)
    made.output(output)
    made.set_codegen(copy.copy(_torch.codegen_of(graph)))
    return made


def _as_torch(value: object, mode: object, symbols: TorchSymbols) -> Any:
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


# --- The values of an exported program: made on access, one for each spec -------------------------


class TorchValues:
    """Torch's fake tensors and symbols for ours."""

    def __init__(self) -> None:
        self.env = TorchShapeEnv()
        self.mode = TorchFakeTensorMode(allow_non_fake_inputs=True, shape_env=self.env, export=True)
        self.symbols = TorchSymbols(self.env)
        self._made: dict[tuple[TensorSpec, bool], torch.Tensor] = {}

    def convert(self, value: Any) -> Any:
        """The value of torch for a stand-in, a symbolic number, or a structure of them."""
        if type(value) is FakeTensor:
            return self._convert_tensor(value._spec, value.requires_grad and value.is_leaf)
        if isinstance(value, SYMBOLIC):
            return self.symbols.number(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.convert, value))
        return value

    def _convert_tensor(self, spec: TensorSpec, requires_grad: bool) -> torch.Tensor:
        found = self._made.get((spec, requires_grad))
        if found is None:
            shape, stride = (
                [self.symbols.number(size) for size in sizes] for sizes in (spec.shape, spec.stride)
            )
            # No guards are added here, and no mode of the caller is used.
            with _torch.no_modes(), self.env.suppress_guards():
                plain = torch.empty_strided(shape, stride, dtype=spec.dtype, device="meta")
                device = torch.device(spec.device)
                found = TorchFakeTensor(self.mode, plain, device, requires_grad=requires_grad)
            self._made[spec, requires_grad] = found
        return found

    def bind_unbacked(self, node: Node) -> None:
        """Set `unbacked_bindings` of a node for torch's symbols."""
        from torch.fx.experimental.symbolic_shapes import _free_unbacked_symbols_with_path  # why: private

        env = self.env
        found = _free_unbacked_symbols_with_path(
            node.meta["val"], (), shape_env=env, pending=set(env.var_to_range), simplify=True
        )
        env.pending_fresh_unbacked_symbols.clear()
        if found:
            node.meta["unbacked_bindings"] = found


class TorchMeta(LazyDict):
    """The metadata of a node, in which a stand-in is converted to torch's fake tensor on access."""

    __slots__ = ("values_of_torch",)
    pending = FakeTensor
    values_of_torch: TorchValues

    def _make(self, pending: FakeTensor) -> Any:
        return self.values_of_torch.convert(pending)

    def copy(self) -> Any:
        other = TorchMeta()
        for key in self:
            dict.__setitem__(other, key, dict.__getitem__(self, key))
        other.values_of_torch = self.values_of_torch
        return other


def convert_values(graph_module: GraphModule, values: TorchValues) -> None:
    """Convert the metadata of the nodes of a graph and its subgraphs to torch's values."""
    for module in graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.nodes:
            meta = TorchMeta()
            meta.values_of_torch = values
            val = node.meta.get("val")
            is_bound = False
            for name, value in node.meta.items():
                if name == "unbacked_bindings":
                    is_bound = True
                elif name != "tensor_meta":
                    meta[name] = value
            if val is not None and type(val) is not FakeTensor:
                meta["val"] = values.convert(val)
            _torch.set_node_meta(node, meta)
            if is_bound:
                values.bind_unbacked(node)
