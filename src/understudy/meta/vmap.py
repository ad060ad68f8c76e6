"""`torch.vmap` in a traced program: one node, whose function is a subgraph.

The body is traced once, on one slice of each mapped input. Values that it uses from outside (results of other nodes,
tensors of the root, sizes) become arguments that are not mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule, Node

from understudy import _torch
from understudy.errors import UnderstudyError
from understudy.fake.tensor import FakeTensor
from understudy.meta.proxies import UNKNOWN

if TYPE_CHECKING:
    from understudy.meta.tracer import MetaTracer


def run_vmap(body: Callable[..., object], options: dict[str, Any], *args: object) -> Any:
    """The target of the node."""
    return torch.vmap(body, **options)(*args)


class VmapBody:
    """A subgraph that is being recorded."""

    def __init__(self, outside: Graph) -> None:
        self.graph = Graph()
        self.outside = outside
        self.taken: dict[Node, Node] = {}
        """Nodes from outside, with the placeholders for them."""

    def take(self, node: Node) -> Node:
        """Make a node from outside an argument of the body."""
        found = self.taken.get(node)
        if found is None:
            first = next(iter(self.graph.nodes))
            with self.graph.inserting_before(first):
                found = self.graph.placeholder(f"outer_{node.name}")
            found.meta.update(node.meta)
            self.taken[node] = found
        return found


def call_vmap(
    tracer: MetaTracer, func: Callable[..., object], in_dims: object, out_dims: object, randomness: str, chunk_size: object,
    args: tuple[object, ...], kwargs: dict[str, object],
) -> Any:  # fmt: skip
    """Record a call of a function that was made by `torch.vmap`."""
    dims, flat, structure = _torch.vmap_inputs(in_dims, args, func)
    body = VmapBody(tracer.graph)
    with tracer.record_body(body):
        parts = [_part(tracer, n, value, dim) for n, (value, dim) in enumerate(zip(flat, dims, strict=True))]
        mapped_nodes = [
            node for node in body.graph.nodes if node.op == "placeholder" and node not in body.taken.values()
        ]
        result = func(*_torch.tree_unflatten(parts, structure), **kwargs)
        body.graph.output(tracer.create_arg(result))
    mapped = [(value, dim) for value, dim in zip(flat, dims, strict=True) if dim is not None]
    values: dict[Node, tuple[Any, Any, int | None]] = {
        node: (tracer.create_arg(value), tracer.find_meta(value), dim)
        for node, (value, dim) in zip(mapped_nodes, mapped, strict=True)
    }
    for outer, node in body.taken.items():
        values[node] = tracer.node_in_graph(outer), outer.meta.get("val", UNKNOWN), None
    given = [values[node] for node in body.graph.find_nodes(op="placeholder")]
    options = {
        "in_dims": tuple(dim for _, _, dim in given),
        "out_dims": out_dims,
        "randomness": randomness,
        "chunk_size": chunk_size,
    }
    module = GraphModule(tracer.root, body.graph, "Body")
    whole = _run_body(tracer, module, options, [meta for _, meta, _ in given])
    if whole is UNKNOWN and mapped:
        whole = _from_one_part(tracer, result, out_dims, mapped[0])
    node = tracer.append_call(
        run_vmap, (tracer.add_body(module), options, *(node for node, _, _ in given)), {}
    )
    tracer.write_meta(node, whole)
    return tracer.results.present(node, whole)


def _run_body(tracer: MetaTracer, module: GraphModule, options: dict[str, Any], metas: list[Any]) -> Any:
    if any(meta is UNKNOWN for meta in metas):
        return UNKNOWN
    try:
        with tracer.suspend():
            return run_vmap(module, options, *metas)
    except (UnderstudyError, RuntimeError, ValueError, TypeError):
        return UNKNOWN


def _from_one_part(tracer: MetaTracer, result: object, out_dims: object, mapped: tuple[Any, int]) -> Any:
    """The results for all slices, from the results for one: new tensors, with the mapped dimension outermost."""
    value, dim = mapped
    parts, structure = _torch.tree_flatten(result)
    if not all(type(part) is FakeTensor for part in parts):
        return UNKNOWN
    places = [out_dims] * len(parts) if isinstance(out_dims, int) else _torch.tree_flatten(out_dims)[0]
    with tracer.suspend():
        count = value.shape[dim]
        metas = [
            part.new_empty((count, *part.shape)).movedim(0, place)
            for part, place in zip(parts, places, strict=True)
        ]
    return _torch.tree_unflatten(metas, structure)


def _part(tracer: MetaTracer, number: int, value: Any, dim: int | None) -> Any:
    """The argument of the body for an input: the first slice along `dim`."""
    if dim is None:
        return value
    node = tracer.graph.placeholder(f"part_{number}")
    meta = tracer.find_meta(value)
    if meta is UNKNOWN:
        return tracer.proxy(node)
    with tracer.suspend():
        shape = list(meta.shape)
        is_empty = type(shape[dim]) is int and shape.pop(dim) == 0  # has no slice
        part = meta.new_empty(shape) if is_empty else meta.select(dim, 0)
    tracer.write_meta(node, part)
    return tracer.results.present(node, part)
