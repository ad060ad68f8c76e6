"""Reads of the data of tensors, and aliases of it, without an operator.

`x.tolist()`, `x.numpy()` and their like read memory in C++. While real tensors are traced, the values would be constants
of the graph; so they raise like `x.item()`, if the values depend on inputs, parameters or random numbers.

What makes an alias of a tensor is recorded as a node:

Parameter(x), x as one of a subclass               shares its memory with x
x.data                                             an alias of x; above autograd no operator is seen
x.data = y                                         x becomes an alias of y
x.as_subclass(Kind)                                the same value in an object of another class
Function.apply(x)                                  x may be a real tensor that has a stand-in
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from understudy import _torch
from understudy.errors import Context, DataDependentOutputException
from understudy.fake.patches.devices import OPTIONS, SYMBOLIC, has_stand_ins, stack_data
from understudy.fake.tensor import FakeTensor
from understudy.graph.node_values import is_constant, set_val
from understudy.graph.random_state import register_tracer_finder
from understudy.lines import user_line
from understudy.ops.traits.writes import written_values
from understudy.patching import RECORDING, patch, patch_call
from understudy.spec.call import flat, map_structure

if TYPE_CHECKING:
    from understudy._torch import OpOverload
    from understudy.capture.recorder import Route
    from understudy.capture.tracer import PythonKeyTracer

aten = torch.ops.aten
Function = Callable[..., object]
HINT = (
    'trace it with tracing_mode="symbolic", where such a value is a symbol; or accept a fixed value: '
    "make_fx(..., _error_on_data_dependent_ops=False)"
)


def refuse_read(
    what: OpOverload | str, tensors: Iterable[torch.Tensor], hint: str = HINT
) -> DataDependentOutputException:
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    return DataDependentOutputException(
        f"{what} is data-dependent: it reads a value of a traced tensor, and the graph would hold it fixed",
        func=what,
        context=Context(str(what), shapes, user_line(), hint),
    )


# --- functions that read data ---------------------------------------------------------------------------------


def _first(args: Any, kwargs: dict[str, object]) -> list[torch.Tensor]:
    return list(args[:1])


def _places(args: tuple[object, ...], kwargs: dict[str, object]) -> list[object]:
    return [value for value in (*args[1:2], *kwargs.values()) if isinstance(value, torch.Tensor)]


def _within_lists(args: tuple[object, ...], kwargs: dict[str, object]) -> list[object]:
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    return list(flat(torch.Tensor, (given,), {}))


def _past_dispatch(args: Any, kwargs: dict[str, object]) -> list[torch.Tensor]:
    """C++ reads a number, for `torch.Tensor([x[0], x[1]])`; if the program reads it itself, there is an operator."""
    return list(args[:1]) if _torch.is_past_dispatch() else []


STACK = "torch.stack makes a tensor of tensors, and is recorded"
READS: dict[Any, tuple[str, Callable[[Any, Any], list[Any]], str]] = {
    torch.Tensor.tolist: ("Tensor.tolist", _first, HINT),
    torch.Tensor.numpy: ("Tensor.numpy", _first, HINT),
    torch.Tensor.__array__: ("Tensor.__array__", _first, HINT),
    torch.Tensor.__dlpack__: ("Tensor.__dlpack__", _first, HINT),
    torch.tensor_split: ("torch.tensor_split", _places, HINT),
    torch.Tensor.tensor_split: ("Tensor.tensor_split", _places, HINT),
    torch.tensor: ("torch.tensor of a list of tensors", _within_lists, STACK),
    torch.as_tensor: ("torch.as_tensor of a list of tensors", _within_lists, STACK),
    torch.asarray: ("torch.asarray of a list of tensors", _within_lists, STACK),
    torch.Tensor.new_tensor: ("Tensor.new_tensor of a list of tensors", _within_lists, STACK),
    torch.Tensor.new: ("Tensor.new of a list of tensors", _within_lists, STACK),
    torch.sparse_coo_tensor: ("torch.sparse_coo_tensor of a list of tensors", _within_lists, STACK),
    torch.sparse_csr_tensor: ("torch.sparse_csr_tensor of a list of tensors", _within_lists, STACK),
    torch.sparse_compressed_tensor: (
        "torch.sparse_compressed_tensor of a list of tensors",
        _within_lists,
        STACK,
    ),
    torch.Tensor.__float__: ("a tensor made of a list of tensors", _past_dispatch, STACK),
    torch.Tensor.__int__: ("a tensor made of a list of tensors", _past_dispatch, STACK),
    torch.Tensor.__index__: ("a tensor made of a list of tensors", _past_dispatch, STACK),
    torch.Tensor.__bool__: ("a tensor made of a list of tensors", _past_dispatch, STACK),
    torch.Tensor.__complex__: ("a tensor made of a list of tensors", _past_dispatch, STACK),
}
"""Function → its name, the tensors whose values it reads, the hint of the error."""


def check(
    tracer: PythonKeyTracer, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Raise for a read of values that are not determined."""
    recorder = _torch.active_recorder()
    if _torch.active_fake_mode() is not None or not getattr(recorder, "_error_on_data_dependent_ops", False):
        return
    name, reads, hint = READS[func]
    tensors = [value for value in reads(args, kwargs) if isinstance(value, torch.Tensor)]
    if any(varies(tracer, tensor) and tracer.constants.read_value(tensor) is None for tensor in tensors):
        raise refuse_read(name, tensors, hint)


def varies(tracer: PythonKeyTracer, tensor: torch.Tensor) -> bool:
    """Whether the value depends on inputs, parameters or random numbers, so that another run may have another value."""
    tensor = _torch.innermost(tensor)  # without the wrappers of torch.func
    node = tracer.find_node(tensor) if tensor.numel() else None
    todo = [] if node is None or tensor in tracer.known_values else [node]
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder" or (node.op == "get_attr" and not is_constant(node)) or _is_drawn(node):
            return True
        todo += node.all_input_nodes
    return False


def _is_drawn(node: Node) -> bool:
    return (
        isinstance(node.target, _torch.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    )


# --- Tensors that are made of lists with tensors or symbolic numbers in them: `torch.tensor([x[0], x[1]])` ---
# C++ reads the values without a dispatch, and they would be constants of the graph. Here they are stacked by operators.

MAKERS = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, torch.Tensor.new_tensor: 1}
"""Function → the position of the data among its arguments."""


def make_from_list(tracer: Any, func: Any, args: Any, kwargs: Any) -> object:
    place = MAKERS[func]
    data = args[place] if len(args) > place else None
    if not isinstance(data, (list, tuple, *SYMBOLIC)) or not _is_to_be_stacked(tracer, data):
        return func(*args, **kwargs)
    if len(args) == place + 1 and kwargs.keys() <= OPTIONS:
        return stack_data(func, args[:place], data, kwargs)
    check(tracer, func, args, kwargs)
    return func(*args, **kwargs)


def _is_to_be_stacked(tracer: Any, data: object) -> bool:
    if _torch.active_fake_mode() is not None:
        return has_stand_ins(data) or bool(flat(SYMBOLIC, (data,), {}))
    return any(varies(tracer, tensor) for tensor in flat(torch.Tensor, (data,), {}))


# --- Determined values while real tensors are traced: literals, and values computed from literals only ------------

LARGEST = 1
"""Values are tracked for tensors up to this many elements."""


class DeterminedRealValues:
    """Values of small real tensors that do not depend on the inputs. The fake mode tracks those of stand-ins itself."""

    def __init__(self, tracer: PythonKeyTracer) -> None:
        self._tracer = tracer
        self._read: dict[int, str] = {}
        """By storage: the lines that read a number of the program."""

    def read(
        self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], fake_mode: object
    ) -> tuple[Any] | None:
        """The result of a data-dependent operator, if all values are determined."""
        is_converted = fake_mode is not None and getattr(fake_mode, "allow_non_fake_inputs", True)
        found: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            value = self._find_value(tensor, fake_mode is not None, is_converted)
            if value is None:
                return None
            found[id(tensor)] = value
        if not tensors:
            return None
        args, kwargs = map_structure(lambda t: found[id(t)], torch.Tensor, (tuple(args), dict(kwargs)))
        with _torch.no_modes():
            return (func(*args, **kwargs),)

    def _find_value(
        self, tensor: torch.Tensor, in_fake_mode: bool, is_converted: bool
    ) -> torch.Tensor | None:
        """A real tensor with the value of this one. None if it is not determined, or if the fake mode may know it."""
        if type(tensor) is not FakeTensor:
            if tensor in self._tracer.known_values:
                return self._tracer.known_values[tensor]
            if not is_converted and self._is_number_of_program(tensor):
                self._read.setdefault(_torch.storage_id(tensor), user_line())
                return tensor
        has_stand_in = in_fake_mode and type(tensor) is not FakeTensor
        if has_stand_in or getattr(tensor, "_determined", None) is not None:
            return None
        return self._tracer.constants.read_value(tensor)

    def _is_number_of_program(self, tensor: torch.Tensor) -> bool:
        """Whether this is a single number that the program has made before the trace, outside of modules: a constant."""
        is_plain = (
            type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
        )
        is_single = is_plain and tensor.numel() <= LARGEST and tensor.device.type == "cpu"
        return (
            is_single
            and self._tracer.find_node(tensor) is None
            and not self._tracer.constants.contains(tensor)
        )

    def before(self, func: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
        """The arguments with tensors replaced by copies of their values; None if one value is not determined."""
        values = self._tracer.known_values
        if not tensors or not all(t in values for t in tensors):
            if _torch.is_mutable(func):
                if self._read:
                    self._refuse_write_of_read(flat(torch.Tensor, (written_values(func, args, kwargs),), {}))
                self._forget(tensors)
            return None
        return map_structure(values.__getitem__, torch.Tensor, (tuple(args), dict(kwargs)))

    def after(self, func: Any, route: Route, known: Any, args: Any, result: Any) -> None:
        values = self._tracer.known_values
        if func is torch.ops.aten.lift_fresh.default:
            if result.numel() <= LARGEST:
                with _torch.no_modes():
                    values[result] = args[0].clone()
            return
        if known is None:
            return
        results = flat(torch.Tensor, (result,), {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._forget(results)
        elif all(tensor.numel() <= LARGEST for tensor in results):
            with _torch.no_modes():
                computed = func(*known[0], **known[1])
            for tensor, value in zip(results, flat(torch.Tensor, (computed,), {}), strict=True):
                values[tensor] = value

    def _refuse_write_of_read(self, tensors: Any) -> None:
        for tensor in tensors:
            line = self._read.get(_torch.storage_id(tensor)) if tensor.layout is torch.strided else None
            if line is not None:
                raise DataDependentOutputException(
                    f"the value of a tensor {tuple(tensor.shape)} was read at {line}, and the program also writes to it: "
                    "the graph would keep the value of this run",
                    context=Context(
                        line=user_line(), hint="pass it as an input, or read its value before the trace"
                    ),
                )

    def _forget(self, tensors: Any) -> None:
        """Drop the values of written tensors, and of tensors that share memory with them."""
        values = self._tracer.known_values
        written = (
            {_torch.storage_id(tensor) for tensor in tensors if tensor.layout is torch.strided}
            if values
            else ()
        )
        for tensor in list(values) if written else ():
            if _torch.storage_id(tensor) in written:
                del values[tensor]


# --- tensors that alias others -----------------------------------------------------------------------------------


@register_tracer_finder
def active_tracer() -> Any:
    """Return our active tracer of this thread, or None."""
    tracer = getattr(_torch.active_recorder(), "tracer", None)
    return tracer if hasattr(tracer, "append_call") else None


@patch("torch.Tensor._make_subclass", during=RECORDING)
def record_subclass(original: Function) -> Any:
    """`torch.nn.Parameter(x)` is made by it, on the memory of x, without an operator."""

    @functools.wraps(original)
    def make_parameter(kind: object, data: Any, *args: Any, **kwargs: object) -> Any:
        result = original(kind, data, *args, **kwargs)
        tracer = active_tracer()
        if tracer is None or type(result) is FakeTensor:
            return result
        made: Any = result
        while _torch.is_functorch_wrapped(data):  # inside a transform, the tensors of the trace are within
            (data, _), (made, _) = _torch.split_wrapper(data), _torch.split_wrapper(made)
        source = tracer.find_node(data)
        if source is not None:
            node = tracer.append_call(aten.detach.default, (source,), {})
            set_val(node, made)
            tracer.remember(made, node)
        return result

    return staticmethod(make_parameter)


@patch_call("torch.utils.dlpack.to_dlpack", during=RECORDING)
def check_to_dlpack(original: Function, tensor: torch.Tensor) -> Any:
    """The program reads data of a tensor that the graph computes."""
    tracer = active_tracer() if type(tensor) is not FakeTensor else None
    if tracer is not None:
        check(tracer, torch.Tensor.__dlpack__, (tensor,), {})
    return original(tensor)


@patch_call("torch.Tensor.as_subclass", during=RECORDING)
def record_as_subclass(original: Function, tensor: torch.Tensor, kind: Any) -> Any:
    """The result is the same value, in an object of another class, without an operator."""
    result = original(tensor, kind)
    tracer = active_tracer()
    if tracer is not None and tracer.find_node(result) is None:
        source = tracer.find_node(tensor)
        if source is not None:
            tracer.remember(result, source)
    return result


@patch("torch.autograd.Function.apply", during=RECORDING)
def apply_to_fakes(original: Any) -> Any:
    """An argument may be a real tensor that has a fake in the trace."""
    of_any_class = _torch.function_of_class_method(original)

    @functools.wraps(original)
    def apply(cls: object, *args: Any, **kwargs: Any) -> Any:
        tracer = active_tracer()
        if tracer is not None and tracer.outside_tensors is not None:
            args, kwargs = tracer.outside_tensors.replace(args, kwargs)
        return of_any_class(cls, *args, **kwargs)

    return classmethod(apply)


@patch_call("torch.Tensor.tolist", during=RECORDING)
def check_tolist(original: Function, tensor: torch.Tensor) -> Any:
    """Torch's own Python functions call `tolist` as well, which a function mode does not see."""
    if type(tensor) is FakeTensor:  # that of a real tensor: a stand-in has a method of its own
        return tensor.tolist()
    tracer = active_tracer()
    if tracer is not None:
        check(tracer, original, (tensor,), {})
    return original(tensor)


_DATA: Any = torch.Tensor.data
GET_DATA: Function = _DATA.__get__
SET_DATA: Function = _DATA.__set__


def get_data(tracer: PythonKeyTracer, tensor: torch.Tensor) -> torch.Tensor:
    """`x.data`: C++ makes the alias below autograd, so a recorder above it does not see `detach`."""
    data: Any = GET_DATA(tensor)
    if type(data) is FakeTensor and tracer.find_node(data) is None:
        node = tracer.append_call(aten.detach.default, (tracer.node_of_tensor(tensor),), {})
        set_val(node, data)
        tracer.remember(data, node)
    return data


def set_data(tracer: PythonKeyTracer, tensor: torch.Tensor, data: torch.Tensor) -> None:
    """`x.data = y`: an input that requires no grad is also written to in the graph."""
    if type(tensor) is FakeTensor and not hasattr(tensor, "_spec"):  # still under construction
        SET_DATA(tensor, data)
        return
    before = tracer.find_node(tensor)
    tracer.symbols.read_all()
    node = tracer.node_of_tensor(data)
    SET_DATA(tensor, data)
    is_input = before is not None and before.op == "placeholder" and not tensor.requires_grad
    target, args = (aten.set_.source_Tensor, (before, node)) if is_input else (aten.detach.default, (node,))
    node = tracer.append_call(target, args, {})
    set_val(node, tensor)
    tracer.remember(tensor, node)
