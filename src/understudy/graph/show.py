"""show: a captured graph as a table that people can read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from understudy.fake.tensor import FakeTensor
from understudy.lines import short_path
from understudy.spec.tensor_spec import SHORT_DTYPE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node, as text."""

    name: str
    operator: str
    spec: str
    module: str
    line: str


def show(
    graph_module: GraphModule,
    *,
    limit: int | None = None,
    nested: bool = True,
    console: Console | None = None,
) -> None:
    """Print the graph: name, operator and its arguments, result, module, source line.

    `limit`: print at most this many nodes, the first and the last ones. `nested`: also print the graphs of branches and
    loops.
    """
    from rich.console import Console  # why: only for those who look

    require_graph(graph_module)
    console = console or Console(soft_wrap=False)
    for title, module in _graphs(graph_module, nested):
        console.print(_table(title, rows_of(module), limit))
    guards = getattr(getattr(graph_module, "shape_env", None), "guards", None)
    if guards:
        console.print(f"guards ({len(guards)}):", style="bold", highlight=False)
        for guard in guards:
            console.print(f"  {guard}", highlight=False, markup=False)


def rows_of(graph_module: GraphModule) -> list[NodeRow]:
    """The rows of the table, for tools."""
    require_graph(graph_module)
    return [_row(node) for node in graph_module.graph.nodes]


def require_graph(value: object) -> None:
    """Raise a `TypeError` unless the value is a captured graph."""
    if not isinstance(value, GraphModule):
        what = value.__name__ if isinstance(value, type) else f"a {type(value).__name__}"
        raise TypeError(
            f"show: expected a captured graph (a torch.fx.GraphModule), got {what}: capture it first, with "
            'show(make_fx(module, tracing_mode="fake")(*inputs))'
        )


def _graphs(graph_module: GraphModule, nested: bool) -> Iterator[tuple[str, GraphModule]]:
    count = sum(node.op == "call_function" for node in graph_module.graph.nodes)
    yield f"{graph_module._get_name()}: {count} calls", graph_module
    if nested:
        for name, inner in graph_module.named_modules():
            if name and isinstance(inner, GraphModule):
                yield name, inner


def _table(title: str, rows: list[NodeRow], limit: int | None) -> Table:
    from rich.table import Table  # why: only for those who look

    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim"
    )
    has_modules = any(row.module for row in rows)
    table.add_column("name", style="cyan", no_wrap=True)
    table.add_column("operator", overflow="fold")
    table.add_column("gives", style="green", overflow="fold")
    if has_modules:
        table.add_column("module", style="magenta", overflow="fold")
    table.add_column("line", style="dim", overflow="fold")
    hidden = 0 if limit is None else max(len(rows) - limit, 0)
    head = len(rows) if not hidden else (len(rows) - hidden + 1) // 2
    for position, row in enumerate(rows):
        if hidden and head <= position < head + hidden:
            if position == head:
                table.add_row("…", f"{hidden} more", *[""] * (2 + has_modules))
            continue
        table.add_row(*[_escape(cell) for cell in _cells(row, has_modules)])
    return table


def _cells(row: NodeRow, has_modules: bool) -> list[str]:
    return [row.name, row.operator, row.spec, *([row.module] if has_modules else []), row.line]


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


def _row(node: Node) -> NodeRow:
    return NodeRow(node.name, _operator(node), describe_val(node.meta.get("val")), _module(node), _line(node))


def _operator(node: Node) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return f"self.{node.target}"
    shown = [_argument(value) for value in node.args]
    shown += [f"{name}={_argument(value)}" for name, value in node.kwargs.items()]
    if node.op == "output":
        return f"return {', '.join(shown)}"
    target: Any = node.target
    name = (
        str(target)
        if not callable(target) or hasattr(target, "overloadpacket")
        else getattr(target, "__name__", str(target))
    )
    return f"{name.removesuffix('.default')}({', '.join(shown)})"


def _argument(value: object) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_argument, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_argument(part)}" for key, part in value.items()) + "}"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return (
            SHORT_DTYPE.get(value, str(value).removeprefix("torch."))
            if isinstance(value, torch.dtype)
            else str(value)
        )
    return str(value)


def describe_val(val: object) -> str:
    """The value of a node in one line."""
    if type(val) is FakeTensor:
        return str(val._spec)
    if isinstance(val, torch.Tensor):
        dtype = SHORT_DTYPE.get(val.dtype, str(val.dtype).removeprefix("torch."))
        if val.is_nested and val.layout is torch.strided:  # nested tensors have no shape
            return f"nested {dtype}[{val.size(0)} tensors]@{val.device}"
        return f"{dtype}[{', '.join(map(str, val.shape))}]@{val.device}"
    if isinstance(val, (list, tuple)):
        return f"({', '.join(describe_val(part) or '–' for part in val)})"
    return "" if val is None else str(val)


def _module(node: Node) -> str:
    stack = node.meta.get("nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""


def _line(node: Node) -> str:
    """The innermost line of the user's code: `model.py:12`."""
    trace = node.meta.get("stack_trace") or ""
    for text in reversed(trace.splitlines()):
        if text.lstrip().startswith('File "'):
            name, line, *_ = text.strip().removeprefix('File "').split(", line ", 1)
            path = short_path(name.rstrip('"'))
            shown = path if path.count(os.sep) < 3 else os.sep.join(path.split(os.sep)[-2:])
            return f"{shown}:{line.split(',')[0]}"
    return ""
