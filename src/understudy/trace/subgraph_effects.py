"""What a branch must not do: write to what it was given, or return a part of it."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from understudy import _torch
from understudy.errors import Context, UnsupportedMutationAliasingException
from understudy.fake.tensor import FakeTensor
from understudy.infer.call import flat
from understudy.lines import user_line
from understudy.trace.subgraph_closures import Branch
from understudy.trace.subgraph_forms import Form


def values_of_output(graph: GraphModule) -> list[Any]:
    """What a graph returns, flat: stand-ins, numbers, None."""
    (output,) = graph.graph.find_nodes(op="output")
    return [_value(leaf) for leaf in _torch.tree_flatten(output.args[0])[0]]


def _value(leaf: Any) -> Any:
    return leaf.meta.get("val") if isinstance(leaf, Node) else leaf


def check_effects(
    op: Any, form: Form, position: int, graph: GraphModule, branch: Branch, operands: list[Any]
) -> None:
    """Refuse a branch that writes to its operands where that can't be followed, or that returns a view of one."""
    name = f"{op.name()}: the function {branch.__name__}, its {dict(form.functions)[position]},"
    inputs = {
        _torch.storage_id(node.meta["val"]): node
        for node in graph.graph.find_nodes(op="placeholder")
        if type(node.meta.get("val")) is FakeTensor
    }
    written = [node for node in graph.graph.nodes if _writes_to(node, inputs)]
    if written and not branch.may_write:
        hint = "write to a clone of it"
        if form.may_write:
            hint += "; or, where no gradients are needed, call it under torch.no_grad()"
        raise _refused(f"{name} writes to a tensor that comes from outside", written[0], hint)
    if written:
        for operand in operands:
            operand._known = None
    (output,) = graph.graph.find_nodes(op="output")
    for leaf in _torch.tree_flatten(output.args[0])[0]:
        value = _value(leaf)
        if type(value) is FakeTensor and _torch.storage_id(value) in inputs:
            what = f"{name} returns a tensor that comes from outside, or a view of it"
            raise _refused(what, leaf, "return a copy: x.clone()")


def _writes_to(node: Node, inputs: dict[int, Node]) -> bool:
    if not isinstance(node.target, _torch.OpOverload) or not _torch.is_mutable(node.target):
        return False
    values = [
        node.args[position] if position < len(node.args) else node.kwargs.get(name)
        for position, name in _torch.written_arguments(node.target)
    ]
    tensors = [_value(value) for value in flat(Node, values, {})]
    return any(type(tensor) is FakeTensor and _torch.storage_id(tensor) in inputs for tensor in tensors)


def _refused(what: str, node: Node, hint: str) -> UnsupportedMutationAliasingException:
    value = node.meta.get("val")
    shown = f"{node.format_node()}    {value._spec}" if type(value) is FakeTensor else str(node.format_node())
    lines = str(node.meta.get("stack_trace", "")).strip().splitlines()
    line = lines[-2].replace("File ", "") + ": " + lines[-1].strip() if len(lines) >= 2 else user_line()
    return UnsupportedMutationAliasingException(f"{what}:\n  {shown}", context=Context(line=line, hint=hint))
