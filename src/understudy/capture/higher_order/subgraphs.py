"""Higher-order operators in a trace: their functions become subgraphs.

    call ──► enter: closure tensors become operands ──► autograd, transforms ──► record: subgraphs, node, result

`enter` is called first, above autograd and the transforms of torch.func; `record` is called by the recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from understudy import _torch
from understudy.capture.graph_passes import promise_size
from understudy.capture.higher_order import torch_tracing
from understudy.capture.higher_order.closures import (
    Branch,
    ClosureFinder,
    copy_operand,
    interpret_graph,
    is_closed,
    prepare_flex,
    unbound_numbers,
    unflatten_operands,
)
from understudy.capture.higher_order.torch_tracing import (
    branches_below_autograd,
    capture_of_branches,
    current_capture,
)
from understudy.capture.higher_order.transforms import (
    as_operands,
    invoke_with_gradients,
    transform_operator,
    with_gradients,
)
from understudy.errors import Context, UnsupportedMutationAliasingException
from understudy.fake.higher_order import ignore_fresh_symbols, mismatch
from understudy.fake.mode import FakeTensorMode
from understudy.fake.realise import make_new
from understudy.fake.tensor import FakeTensor
from understudy.graph.node_values import convert_to_fakes
from understudy.lines import user_line
from understudy.ops.hops import HigherOrder, higher_order
from understudy.spec.call import flat

if TYPE_CHECKING:
    from understudy.capture.make_fx import Capture
    from understudy.capture.recorder import ProxyTorchDispatchMode

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
SPECIAL_ENTRIES = {"flex_attention": prepare_flex, "invoke_subgraph": invoke_with_gradients}
"""Operators with their own handling before autograd; NotImplemented: continue as usual."""


# --- above autograd ---------------------------------------------------------------------------------------------------


def enter(
    recorder: ProxyTorchDispatchMode,
    original: Callable[..., object],
    op: Any,
    key: object,
    args: object,
    kwargs: Any,
) -> Any:
    """Called when a higher-order operator is called while a recorder is active."""
    operands, kwargs = as_operands(args, kwargs)
    if operands is not args:
        return op(*operands, **kwargs)
    form = higher_order(op)
    capture = current_capture()
    if (
        form.takes_functions
        and capture is not None
        and not all(is_closed(args[position]) for position, _ in form.functions)
    ):
        return _call_with_flat_functions(capture, form, op, args, kwargs)
    if key == _torch.TRANSFORMS and (answer := transform_operator(op, args, kwargs)) is not NotImplemented:
        return answer
    if capture is not None and not capture.options.pre_dispatch and not _torch.has_transforms():
        answer = with_gradients(op, args, kwargs)
        if answer is not NotImplemented:
            return answer
    own = SPECIAL_ENTRIES.get(op.name())
    if own is not None and capture is not None:
        answer = own(capture, op, args, kwargs)
        if answer is not NotImplemented:
            return answer
    if recorder.pre_dispatch and _torch.is_recorded_above_autograd():
        if _torch.has_transforms():  # which handle it first
            with branches_below_autograd():
                return recorder.record_below_autograd(op, args, kwargs)
        if (
            form.takes_functions
            and (answer := _run_with_parts(recorder, op, args, kwargs)) is not NotImplemented
        ):
            return answer
        with _torch.without_recorder():
            return record(recorder, op, args, kwargs)
    return original(op, key, *args, **kwargs)


def _run_with_parts(recorder: ProxyTorchDispatchMode, op: Any, args: object, kwargs: object) -> Any:
    """Above autograd the operator is one node; its parts are recorded for a backward pass."""
    # why: it is a recorder itself, and recorders record these operators
    from understudy.capture.predispatch import InnerRecorder

    inner = InnerRecorder(recorder)
    with inner, branches_below_autograd(), _reserve_names(recorder.tracer.root, higher_order(op)):
        result = with_gradients(op, args, kwargs)
    if result is NotImplemented:
        return result
    inner.parts.close(result)
    with _torch.without_recorder():
        record(recorder, op, args, kwargs, result)
    inner.parts.replace_parts(recorder.tracer.graph.find_nodes(op="call_function", target=op)[-1])
    return result


@contextmanager
def _reserve_names(root: torch.nn.Module, form: HigherOrder) -> Iterator[None]:
    """Reserve the next names of subgraphs while others are recorded."""
    names = _names_of_graphs(root, form)
    for name in names:
        root.add_module(name, torch.nn.Module())
    try:
        yield
    finally:
        for name in names:
            delattr(root, name)


def _names_of_graphs(root: torch.nn.Module, form: HigherOrder) -> list[str]:
    prefixes = [prefix for _, prefix in form.functions]
    number = 0
    while hasattr(root, f"{prefixes[0]}_{number}"):
        number += 1
    return [f"{prefix}_{number}" for prefix in prefixes]


def _call_with_flat_functions(capture: Capture, form: HigherOrder, op: Any, args: Any, kwargs: Any) -> Any:
    """Call the operator with functions of flat operands and without closure tensors."""
    args = list(args)
    operands, in_spec = _torch.tree_flatten(tuple(args[form.operands]))
    group = (
        tuple if op.name() == "cond" else type(args[form.operands])
    )  # `cond` accepts a list or a tuple of operands
    flat_args = [*args[: form.operands], group(operands), *args[form.operands + 1 :]]
    functions = [args[position] for position, _ in form.functions]
    examples = _examples(capture, form, flat_args)
    given = len(examples) - len(operands)
    call = unflatten_operands(examples, given, in_spec)
    rehearsal, out_spec = _find_closures(capture, form, functions, examples, call)
    tensors = list(rehearsal.tensors.values())
    numbers = unbound_numbers(list(rehearsal.numbers), [*examples, *tensors])
    may_write = form.may_write and not torch.is_grad_enabled()
    for position, _ in form.functions:
        flat_args[position] = Branch(
            args[position], given, in_spec, tensors, may_write, position in form.returns_single_value
        )
    flat_args[form.operands] = group([*operands, *tensors, *numbers])
    result = op(*flat_args, **kwargs)
    return _torch.tree_unflatten(list(result), out_spec)


def _examples(capture: Capture, form: HigherOrder, args: Any) -> list[Any]:
    mode = capture.stand_ins
    with _torch.without_recorder(), mode:
        # Real ones are converted here: one that an operator meets is a constant, with known values.
        examples = form.examples(mode, tuple(args))
        return [copy_operand(convert_to_fakes(mode, x) if type(x) is torch.Tensor else x) for x in examples]


def _find_closures(
    capture: Capture, form: HigherOrder, functions: list[Any], examples: list[Any], call: tuple[object, ...]
) -> tuple[ClosureFinder, Any]:
    """Run the functions without recording, to find their closure tensors and the structure of their results."""
    rehearsal = ClosureFinder(capture, examples)
    counts = dict(capture.tracer.torch_fn_counts)
    specs = []
    mode = capture.stand_ins
    try:
        with _torch.without_recorder(), mode, ignore_fresh_symbols(mode):
            for function in functions:
                with rehearsal:
                    result = function(*call)
                rehearsal.inspect_values(result)
                specs.append(_torch.tree_flatten(result)[1])
    finally:
        capture.tracer.torch_fn_counts = counts
    if not form.returns_single_value and len(specs) > 1 and specs[0].num_leaves != specs[1].num_leaves:
        raise mismatch(f"one branch returns {specs[0]} and the other {specs[1]}")
    return rehearsal, specs[-1]


# --- in the recorder --------------------------------------------------------------------------------------------------


def record(recorder: ProxyTorchDispatchMode, op: Any, args: Any, kwargs: Any, known: Any = None) -> Any:
    """Record the operator's functions as subgraphs, and the call as a node. `known`: its result, if it has run already."""
    form = higher_order(op)
    if not form.takes_functions:
        return torch_tracing.record(recorder, op, args, kwargs)
    capture = capture_of_branches()
    mode = capture.stand_ins
    stand_ins = convert_to_fakes(mode, tuple(args))
    graphs = [_trace_function(capture, op, form, position, args, stand_ins) for position, _ in form.functions]
    node_args = _node_arguments(recorder, form, graphs, args)
    outputs: list[Sequence[Any]] = [output_values(graph) for graph in graphs]
    if _torch.active_fake_mode() is None:
        with mode, ignore_fresh_symbols(mode):  # raises if the branches do not match
            form.result(mode, stand_ins, outputs)
        result = op(*_replace_functions(form, graphs, args), **kwargs) if known is None else known
    else:
        with mode:
            result = tuple(form.result(mode, stand_ins, outputs)) if known is None else known
    tracer = recorder.tracer
    node_kwargs = {name: tracer.argument(value) for name, value in kwargs.items()}
    node = tracer.append_call(op, node_args, node_kwargs, op.name())
    recorder.track(result, node)
    if op.name() == "while_loop_stack_output" and _torch.active_fake_mode() is None:
        promise_size(tracer, result[0], "the iteration count is that of the recording")
    return result


def _trace_function(
    capture: Capture, op: Any, form: HigherOrder, position: int, args: Any, stand_ins: Any
) -> GraphModule:
    mode = capture.stand_ins
    with mode:
        examples = form.examples(mode, stand_ins)
    function = args[position]
    fresh = tuple([_fresh(mode, value, capture.options.pre_dispatch) for value in examples])
    pending = [] if mode.shape_env is None else mode.shape_env.pending_fresh_unbacked_symbols
    before = list(pending)
    with _torch.with_autograd():  # a branch may compute gradients
        graph = capture.subgraph(interpret_graph(function), fresh)
    pending[:] = before  # symbols created in a branch are not bound outside
    if isinstance(function, Branch):
        operands = [value for value in stand_ins[form.operands] if type(value) is FakeTensor]
        check_effects(op, form, position, graph, function, operands)
    return graph


def _fresh(mode: FakeTensorMode, value: object, keeps_grad: bool) -> Any:
    """A new stand-in with the same metadata and no determined values: the subgraph has to hold for all values."""
    if type(value) is not FakeTensor:
        return value
    fresh = make_new(mode, value._spec)
    return fresh.requires_grad_(value.requires_grad) if keeps_grad and value.requires_grad else fresh


def _replace_functions(form: HigherOrder, graphs: list[Any], args: Any) -> list[Any]:
    replaced = list(args)
    for (position, _), graph in zip(form.functions, graphs, strict=True):
        replaced[position] = graph
    return replaced


def _node_arguments(
    recorder: ProxyTorchDispatchMode, form: HigherOrder, graphs: list[GraphModule], args: object
) -> tuple[Any, ...]:
    tracer = recorder.tracer
    for value in _torch.tree_flatten(args)[0]:
        if isinstance(value, SYMBOLIC):
            tracer.argument(
                value
            )  # before the `get_attr` nodes of the subgraphs, which stand next to the call
    names = _names_of_graphs(tracer.root, form)
    nodes = [attribute(recorder, name, graph) for name, graph in zip(names, graphs, strict=True)]
    return tuple([
        value if isinstance(value, Node) else tracer.argument(value) for value in _replace_functions(form, nodes, args)
    ])  # fmt: skip


def attribute(recorder: ProxyTorchDispatchMode, name: str, graph: torch.nn.Module) -> Node:
    """Add a subgraph as a submodule; returns the node that reads it."""
    tracer = recorder.tracer
    tracer.root.add_module(name, graph)
    return tracer.graph.create_node("get_attr", name, (), {}, name=name)


# --- Checks of branches: no writes to operands, no results that alias them --------------------------


def output_values(graph: GraphModule) -> list[Any]:
    """The flat outputs of a graph: stand-ins, numbers, None."""
    (output,) = graph.graph.find_nodes(op="output")
    return [_value(leaf) for leaf in _torch.tree_flatten(output.args[0])[0]]


def _value(leaf: object) -> Any:
    return leaf.meta.get("val") if isinstance(leaf, Node) else leaf


def check_effects(
    op: Any, form: HigherOrder, position: int, graph: GraphModule, branch: Branch, operands: list[Any]
) -> None:
    """Raise if a branch writes to its operands where that is not supported, or returns a view of one."""
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
        raise _refuse_effect(f"{name} writes to a tensor that comes from outside", written[0], hint)
    if written:
        for operand in operands:
            operand._determined = None
    (output,) = graph.graph.find_nodes(op="output")
    for leaf in _torch.tree_flatten(output.args[0])[0]:
        value = _value(leaf)
        if type(value) is FakeTensor and _torch.storage_id(value) in inputs:
            what = f"{name} returns a tensor that comes from outside, or a view of it"
            raise _refuse_effect(what, leaf, "return a copy: x.clone()")


def _writes_to(node: Node, inputs: dict[int, Node]) -> bool:
    if not isinstance(node.target, _torch.OpOverload) or not _torch.is_mutable(node.target):
        return False
    values = [
        node.args[position] if position < len(node.args) else node.kwargs.get(name)
        for position, name in _torch.written_arguments(node.target)
    ]
    tensors = [_value(value) for value in flat(Node, values, {})]
    return any(type(tensor) is FakeTensor and _torch.storage_id(tensor) in inputs for tensor in tensors)


def _refuse_effect(what: str, node: Node, hint: str) -> UnsupportedMutationAliasingException:
    value = node.meta.get("val")
    shown = f"{node.format_node()}    {value._spec}" if type(value) is FakeTensor else str(node.format_node())
    lines = str(node.meta.get("stack_trace", "")).strip().splitlines()
    line = lines[-2].replace("File ", "") + ": " + lines[-1].strip() if len(lines) >= 2 else user_line()
    return UnsupportedMutationAliasingException(f"{what}:\n  {shown}", context=Context(line=line, hint=hint))
