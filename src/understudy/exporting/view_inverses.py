"""The inverse of a view: from a new value of the view, the new value of what it is a view of.

    view_inverse    operator → function that adds the nodes for it; None where there is no operator for it
    Scattering      what such a function is given
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from understudy.ops.registry import Trait
from understudy.shapes.sizes import surely_equal

aten = torch.ops.aten


class Scattering(NamedTuple):
    """`view` is a view of `parent`, made by `call`; it has the new `value`. `before` is the parent's value until now."""

    graph: Graph
    call: Node
    view: Node
    parent: Node
    before: Node
    value: Node
    position: int | None
    """Which of the views that the call gave."""

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument of the call that made the view."""
        given = self.call.args
        return given[position] if position < len(given) else self.call.kwargs.get(name, default)

    @property
    def parent_shape(self) -> tuple[Any, ...]:
        shape: tuple[Any, ...] = self.parent.meta["val"]._spec.shape
        return shape

    @property
    def view_shape(self) -> tuple[Any, ...]:
        shape: tuple[Any, ...] = self.view.meta["val"]._spec.shape
        return shape

    def add(self, op: Any, *args: Any) -> Node:
        """A node that gives the parent's new value."""
        node = self.graph.call_function(op, args)
        node.meta = self.parent.meta.copy() if self.parent.op == "call_function" else self.call.meta.copy()
        node.meta["val"] = self.parent.meta["val"]
        return node


Inverse = Callable[[Scattering], Node | None]
view_inverse: Trait[Inverse] = Trait("the value of a tensor, from that of a view of it")


def sizes_of(graph: Graph, node: Node) -> list[Any]:
    """The sizes of a node's tensor, as arguments: numbers, and nodes that ask for those that vary."""
    sizes: list[Any] = []
    for dim, size in enumerate(node.meta["val"]._spec.shape):
        if isinstance(size, int):
            sizes.append(size)
            continue
        asked = graph.call_function(aten.sym_size.int, (node, dim))
        asked.meta = {name: value for name, value in node.meta.items() if name not in ("val", "tensor_meta")}
        asked.meta["val"] = node.meta["val"].shape[dim]
        sizes.append(asked)
    return sizes


@view_inverse("detach", "alias", "lift_fresh", "view_as", "contiguous")
def same(s: Scattering) -> Node:
    return s.value


@view_inverse("slice.Tensor")
def slice_(s: Scattering) -> Node:
    dim, start, end = s.argument(1, "dim", 0), s.argument(2, "start"), s.argument(3, "end")
    return s.add(aten.slice_scatter.default, s.before, s.value, dim, start, end, s.argument(4, "step", 1))


@view_inverse("select.int")
def select(s: Scattering) -> Node:
    return s.add(aten.select_scatter.default, s.before, s.value, s.argument(1, "dim"), s.argument(2, "index"))


@view_inverse("diagonal")
def diagonal(s: Scattering) -> Node:
    where = s.argument(1, "offset", 0), s.argument(2, "dim1", 0), s.argument(3, "dim2", 1)
    return s.add(aten.diagonal_scatter.default, s.before, s.value, *where)


@view_inverse("as_strided")
def as_strided(s: Scattering) -> Node:
    where = s.argument(1, "size"), s.argument(2, "stride"), s.argument(3, "storage_offset")
    return s.add(aten.as_strided_scatter.default, s.before, s.value, *where)


@view_inverse("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten.using_ints", "unflatten.int")
def view(s: Scattering) -> Node:
    packed = s.graph.call_function(aten.clone.default, (s.value,), {"memory_format": torch.contiguous_format})
    packed.meta = s.view.meta.copy()
    return s.add(aten.view.default, packed, sizes_of(s.graph, s.parent))


@view_inverse("view.dtype")
def view_dtype(s: Scattering) -> Node:
    return s.add(aten.view.dtype, s.value, s.parent.meta["val"].dtype)


@view_inverse("unsqueeze")
def unsqueeze(s: Scattering) -> Node:
    return s.add(aten.squeeze.dim, s.value, s.argument(1, "dim"))


@view_inverse("squeeze", "squeeze.dim", "squeeze.dims")
def squeeze(s: Scattering) -> Node | None:
    count = len(s.parent_shape)
    asked = s.argument(1, "dim", range(count))
    dims = sorted({dim % count for dim in ([asked] if isinstance(asked, int) else asked)}) if count else []
    value = s.value
    for dim in dims:
        if surely_equal(s.parent_shape[dim], 1):
            value = s.add(aten.unsqueeze.default, value, dim)
    return value


@view_inverse("permute")
def permute(s: Scattering) -> Node:
    dims = s.argument(1, "dims")
    order = [dim % len(dims) for dim in dims]
    return s.add(aten.permute.default, s.value, [order.index(dim) for dim in range(len(order))])


@view_inverse("transpose.int")
def transpose(s: Scattering) -> Node:
    return s.add(aten.transpose.int, s.value, s.argument(1, "dim0"), s.argument(2, "dim1"))


@view_inverse("t")
def t(s: Scattering) -> Node:
    return s.add(aten.t.default, s.value)


@view_inverse("expand")
def expand(s: Scattering) -> Node | None:
    is_same = len(s.parent_shape) == len(s.view_shape) and all(map(surely_equal, s.parent_shape, s.view_shape))
    return s.value if is_same else None


@view_inverse("view_as_real")
def view_as_real(s: Scattering) -> Node:
    return s.add(aten.view_as_complex.default, s.value)


@view_inverse("view_as_complex")
def view_as_complex(s: Scattering) -> Node:
    return s.add(aten.view_as_real.default, s.value)


@view_inverse("unbind.int")
def unbind(s: Scattering) -> Node:
    return s.add(aten.select_scatter.default, s.before, s.value, s.argument(1, "dim", 0), s.position)


@view_inverse("split.Tensor", "split_with_sizes", "chunk")
def split(s: Scattering) -> Node | None:
    dim = s.argument(2, "dim", 0)
    parts: Sequence[Any] = s.call.meta["val"]
    assert s.position is not None
    lengths = [part._spec.shape[dim] for part in parts[: s.position + 1]]
    if not all(isinstance(length, int) for length in lengths):
        return None
    end = sum(lengths)
    return s.add(aten.slice_scatter.default, s.before, s.value, dim, end - lengths[-1], end)
