"""Functions that torch calls for each part of its inputs, as graphs of their own: `torch.vmap`.

The body is traced once, on one part of each mapped input. What it uses from around it, values of the trace, tensors of
the root, sizes, becomes an argument of it that is not mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule, Node

from understudy import _torch
from understudy.fake.tensor import FakeTensor
from understudy.meta.proxies import UNKNOWN, MetaProxy, make_proxy

if TYPE_CHECKING:
    from understudy.meta.tracer import MetaTracer

def run_vmap(body: Callable[..., Any], options: dict[str, Any], *args: Any) -> Any:
    """What the graph calls."""
    return torch.vmap(body, **options)(*args)


def apply_function(function: type[torch.autograd.Function], *args: object, **kwargs: object) -> Any:
    """`function.apply(…)`, a node of its own: its backward is more than that of what it calls."""
    return function.apply(*args, **kwargs)


def call_scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of TorchScript, which has no name that a graph could call it by. On stand-ins, the Python function that
    it was made of runs: TorchScript takes sizes for numbers."""
    is_stood_in = any(type(value) is FakeTensor for value in (*args, *kwargs.values()))
    return (_torch.python_behind(function) if is_stood_in else function)(*args, **kwargs)


class VmapBody:
    """A graph inside of another that is being recorded."""

    def __init__(self, outside: Graph) -> None:
        self.graph = Graph()
        self.outside = outside
        self.taken: dict[Node, Node] = {}

    def take(self, node: Node) -> Node:
        """A node from around it, as an argument of the body."""
        found = self.taken.get(node)
        if found is None:
            first = next(iter(self.graph.nodes))
            with self.graph.inserting_before(first):
                found = self.graph.placeholder(f"outer_{node.name}")
            found.meta.update(node.meta)
            self.taken[node] = found
        return found


def call_vmap(
    tracer: MetaTracer, func: Callable[..., Any], in_dims: object, out_dims: object, randomness: str, chunk_size: object,
    args: tuple[object, ...], kwargs: dict[str, object],
) -> Any:  # fmt: skip
    """A call of a function that was made by `torch.vmap`."""
    dims, flat, structure = _torch.vmap_inputs(in_dims, args, func)
    body = VmapBody(tracer.graph)
    with tracer.inside(body):
        parts = [_part(tracer, value, dim) for value, dim in zip(flat, dims, strict=True)]
        mapped_nodes = [
            node for node in body.graph.nodes if node.op == "placeholder" and node not in body.taken.values()
        ]
        result = func(*_torch.tree_unflatten(parts, structure), **kwargs)
        body.graph.output(tracer.create_arg(result))
    taken = list(body.taken)
    order = {
        node: position for position, node in enumerate(n for n in body.graph.nodes if n.op == "placeholder")
    }
    given: list[Any] = [None] * len(order)
    given_dims: list[int | None] = [None] * len(order)
    mapped = [(value, dim) for value, dim in zip(flat, dims, strict=True) if dim is not None]
    for node, (value, dim) in zip(mapped_nodes, mapped, strict=True):
        given[order[node]], given_dims[order[node]] = value, dim
    for node in taken:
        given[order[body.taken[node]]] = tracer.value_of(node)
    options = {
        "in_dims": tuple(given_dims),
        "out_dims": out_dims,
        "randomness": randomness,
        "chunk_size": chunk_size,
    }
    module = tracer.keep_body(GraphModule(tracer.root, body.graph, "Body"))
    arguments = (module, options, *given)
    whole = tracer.try_to_derive(run_vmap, arguments)
    if whole is UNKNOWN and mapped:
        whole = _from_one_part(tracer, result, out_dims, mapped[0])
    if whole is UNKNOWN:
        return tracer.create_proxy("call_function", run_vmap, arguments, {})
    return tracer.proxy_for("call_function", run_vmap, arguments, {}, whole)


def _from_one_part(tracer: MetaTracer, result: Any, out_dims: Any, mapped: tuple[Any, int]) -> Any:
    """What the body gives for all parts, by what it gives for one: new tensors, the mapped dimension outermost."""
    value, dim = mapped
    parts, structure = _torch.tree_flatten(result)
    if not all(isinstance(part, MetaProxy) and isinstance(part._meta, torch.Tensor) for part in parts):
        return UNKNOWN
    places = [out_dims] * len(parts) if isinstance(out_dims, int) else _torch.tree_flatten(out_dims)[0]
    with tracer.derivation.enter_mode():
        count = value.shape[dim]
        metas = [
            part._meta.new_empty((count, *part._meta.shape)).movedim(0, place)
            for part, place in zip(parts, places, strict=True)
        ]
    return _torch.tree_unflatten(metas, structure)


def _part(tracer: MetaTracer, value: Any, dim: int | None) -> Any:
    """What the body gets for an input: the first part along `dim` stands for all of them."""
    if dim is None:
        return value
    node = tracer.graph.placeholder("part")
    proxy = value if isinstance(value, MetaProxy) else tracer.proxy_of(value)
    if proxy._meta is UNKNOWN:
        return tracer.proxy(node)
    with tracer.derivation.enter_mode():
        meta = proxy._meta.select(dim, 0)
    tracer.write_meta(node, meta)
    return make_proxy(tracer, node, meta)
