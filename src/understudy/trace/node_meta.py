"""What is written into a recorded node: what it gives, and where in the user's program it comes from."""

from __future__ import annotations

import linecache
import sys
from types import CodeType
from typing import Any

import torch
from torch.fx import Node
from torch.fx import traceback as fx_traceback
from torch.fx.passes.shape_prop import TensorMetadata

from understudy.fake.tensor import FakeTensor
from understudy.lines import is_the_users
from understudy.trace.prop_values import snapshot, tensor_meta_of, val_of

CARRIED = ("nn_module_stack", "torch_fn", "source_fn_stack", "original_aten", "recompute", "ac_graph_id", "has_backward_hook",
           "from_node", "quantization_tag", "_numeric_debug_handle", "custom", "partitioner_tag", "arg_kwarg_vals", "seq_nr")  # fmt: skip
"""What is taken over from the node of another graph that is being run, under `preserve_node_meta`."""


class NodeMeta:
    """Where the program is just now: the user's lines, the torch function, the operator that is being decomposed."""

    def __init__(self) -> None:
        self.torch_call: tuple[Any, int] | None = None
        self._torch_fn: tuple[Any, tuple[str, str]] = (None, ("", ""))
        self.original_aten: Any = None
        self.module_stack: Any = None
        self._traces: dict[tuple[Any, ...], str] = {}
        self._is_users: dict[CodeType, bool] = {}
        self._tensor_meta: dict[Any, TensorMetadata] = {}

    def mark(self, node: Node) -> None:
        meta = node.meta
        if fx_traceback.has_preserved_node_meta():
            self._carry_over(meta)
        if self.original_aten is not None:
            meta["original_aten"] = self.original_aten
        if "stack_trace" not in meta:
            trace = self.stack_trace()
            if trace:
                meta["stack_trace"] = trace
        if self.torch_call is not None:
            meta.setdefault("torch_fn", self._described_call(self.torch_call))
        if self.module_stack is not None and "nn_module_stack" not in meta:
            stack = self.module_stack()
            if stack:
                meta["nn_module_stack"] = stack

    def _described_call(self, call: tuple[Any, int]) -> tuple[str, str]:
        if self._torch_fn[0] is not call:
            func, count = call
            name = getattr(func, "__name__", str(func))
            self._torch_fn = call, (f"{name}_{count}", f"{type(func).__name__}.{name}")
        return self._torch_fn[1]

    def _carry_over(self, meta: dict[str, Any]) -> None:
        current = fx_traceback.get_current_meta()
        for name in ("stack_trace", *CARRIED):
            value = current.get(name)
            if value is not None:
                meta[name] = value

    def stack_trace(self) -> str:
        """The user's lines that led here, outermost first. Written out once for each place."""
        is_users = self._is_users
        place: list[Any] = []
        frame: Any = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            known = is_users.get(code)
            if known is None:
                known = is_users[code] = is_the_users(code.co_filename)
            if known:
                place.append(code)
                place.append(frame.f_lineno)
            elif code in BOUNDARIES:
                break
            frame = frame.f_back
        key = tuple(place)
        found = self._traces.get(key)
        if found is None:
            found = self._traces[key] = _written_out(key)
        return found

    def tensor_meta(self, fake: FakeTensor) -> Any:
        """One for each spec: results of operators need no gradient themselves."""
        spec = fake._spec
        found = self._tensor_meta.get(spec)
        if found is None:
            found = self._tensor_meta[spec] = tensor_meta_of(fake)
        return found


BOUNDARIES: set[CodeType] = set()
"""Code at which a trace begins: what is outside of it is not part of the program that is recorded."""


def begins_here(function: Any) -> Any:
    """Mark the function that calls the user's program."""
    BOUNDARIES.add(function.__code__)
    return function


def _written_out(place: tuple[Any, ...]) -> str:
    lines = []
    for code, line in zip(place[-2::-2], place[-1::-2], strict=True):
        source = linecache.getline(code.co_filename, line).strip()
        lines.append(f'File "{code.co_filename}", line {line}, in {code.co_name}')
        if source:
            lines.append(f"    {source}")
    return "\n".join(lines)


def set_val(node: Node, value: Any) -> None:
    """`val` and `tensor_meta` of a node that gives this value."""
    if type(value) is FakeTensor:
        node.meta["val"] = snapshot(value)
        node.meta["tensor_meta"] = tensor_meta_of(value)
        return
    val = val_of(value, snapshot)
    if val is not None or isinstance(value, (bool, str)) or value is None:
        node.meta["val"] = val if val is not None else value
    if isinstance(value, torch.Tensor):
        node.meta["tensor_meta"] = tensor_meta_of(value)
