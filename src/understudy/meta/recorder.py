"""FunctionRecorder: while it is active, calls of torch functions with traced values become nodes.

A function mode sees them all, in this thread only. A call is handled by its arguments:

    a stand-in or proxy, or a symbolic size     run on stand-ins, and recorded
    real tensors, which are constants           run for real
    no tensor, but the result is one: a factory recorded

A call that only reads facts (a shape, a dtype, a number that is determined) is not recorded.
"""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import is_tensor_method_or_property

from understudy import _torch
from understudy.errors import OperatorError, UnderstudyError
from understudy.fake.tensor import FakeTensor
from understudy.meta.derivation import CALLS
from understudy.meta.devices import DeviceOf
from understudy.meta.errors import make_gradient_error
from understudy.meta.overrides import DEFAULTS, manual_meta_overrides
from understudy.meta.proxies import MetaProxy, read_attribute
from understudy.meta.regions import REGIONS, Regions
from understudy.meta.results import ATOMS, SYMBOLIC
from understudy.meta.structures import holds, leaves_in

if TYPE_CHECKING:
    from understudy.meta.tracer import MetaTracer

Target = tuple[str, Any]
"""The kind and target of a node."""
METHOD_WRAPPER: Any = type(torch.Tensor.shape.__get__)  # type: ignore[attr-defined]
METHODS: Any = type(torch.Tensor.add), type(torch.Tensor.__getitem__)
"""The types of methods in C."""
get_override, get_default_override = manual_meta_overrides.get, DEFAULTS.get


class FunctionRoute:
    """How calls of one torch function are recorded: as the access of a property, by a handler, or as a node of this kind
    and target. `operator`: the Python operator for which C++ calls this method."""

    __slots__ = (
        "base",
        "handler",
        "is_answered",
        "is_call",
        "is_reflected",
        "kind",
        "operator",
        "run",
        "target",
    )

    def __init__(self, func: Any) -> None:
        name = getattr(func, "__name__", "")
        self.handler = HANDLERS.get(name)
        self.is_answered = name in ANSWERED_BY_OBJECT
        self.kind, self.target = target_of(func)
        self.is_reflected = self.kind == "reflected"
        if self.is_reflected:
            self.kind = "call_function"
        is_method = self.kind == "call_method" and type(func) is not FunctionType
        self.operator = OPERATORS.get(self.target) if is_method else None
        self.run = CALLS.get(self.target) or func if self.kind == "call_function" else func
        is_special = self.handler or self.is_answered or self.is_reflected
        self.is_call = not is_special and type(func) is not METHOD_WRAPPER and func not in REGIONS
        """Whether a call with plain arguments is simply run and recorded."""


_routes: dict[Any, FunctionRoute] = {}


def make_route(func: Any) -> FunctionRoute:
    route = _routes[func] = FunctionRoute(func)
    return route


class FunctionRecorder(_torch.FunctionMode):
    """Passes the torch functions of a thread to its tracer."""

    def __init__(self, tracer: MetaTracer) -> None:
        super().__init__()
        self.tracer = tracer
        self._regions = Regions(tracer).handlers

    # torch.autocast calls only modes of torch's own class when it is entered and left.
    def _claimed_class(self) -> Any:
        return _torch.torch_state_recorder_class()

    __class__ = property(_claimed_class)

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """The hot path: stand-ins and literals in, one stand-in out. Everything else goes to `call_torch_function`."""
        tracer = self.tracer
        route = _routes.get(func) or make_route(func)
        tracer.depth += 1
        try:
            if not route.is_call:
                return self._call_unusual(func, args, kwargs or {}, route)
            if tracer.is_plain and are_plain(args) and (not kwargs or are_plain(kwargs.values(), False)):
                override = get_override(route.target)
                if override is None or get_default_override(route.target) is override:
                    return self._record_plain(func, args, kwargs or {}, route, sys._getframe(1))
            return call_torch_function(tracer, func, args, kwargs or {}, route, sys._getframe(1))
        finally:
            tracer.depth -= 1

    def _record_plain(self, func: Any, args: Any, kwargs: Any, route: FunctionRoute, frame: FrameType) -> Any:
        tracer = self.tracer
        kind, target = route.kind, route.target
        if route.operator is not None and is_operator(frame):
            kind, target = "call_function", route.operator
        try:
            result = route.run(*args, **kwargs)
        except Exception:  # run again, to locate the error
            return tracer.call(kind, target, args, kwargs, func)
        if type(result) is not FakeTensor:
            return tracer.record_result(kind, target, args, kwargs, result)
        graph, arguments = tracer.graph, tracer.arguments
        node_args: list[Any] = []
        for value in args:
            if type(value) is FakeTensor:
                node = value._node
                node_args.append(
                    node if node is not None and node.graph is graph else arguments.node_of(value)
                )
            else:
                node_args.append(arguments.argument(value))
        named = {name: arguments.argument(value) for name, value in kwargs.items()} if kwargs else {}
        node = tracer.append_node(kind, target, tuple(node_args), named)
        tracer.node_meta.mark(node, frame)
        tracer.write_meta(node, result)
        return tracer.results.assign_node(result, node)

    def _call_unusual(self, func: Any, args: Any, kwargs: Any, route: FunctionRoute) -> Any:
        tracer = self.tracer
        region = self._regions.get(func)
        if region is not None:
            tracer.depth -= 1  # it adds nodes to the program
            try:
                return region(*args)
            finally:
                tracer.depth += 1
        if type(func) is METHOD_WRAPPER:
            return access(tracer, func, args)
        return call_torch_function(tracer, func, args, kwargs, route, sys._getframe(2))


def call_torch_function(
    tracer: MetaTracer, func: Any, args: Any, kwargs: Any, route: FunctionRoute, frame: FrameType
) -> Any:
    """Called for each torch function of the traced program whose arguments are not plain."""
    if route.is_answered:
        return func(*args, **kwargs)
    has_traced, has_tensors = classify_arguments(tracer, args, kwargs)
    if has_traced:
        if route.handler is not None:
            return route.handler(tracer, func, args, kwargs)
        if route.operator is not None and is_operator(frame):
            return tracer.call("call_function", route.operator, args, kwargs, func)
        if route.is_reflected:
            return tracer.call(route.kind, route.target, (args[1], args[0]), kwargs)
        return tracer.call(route.kind, route.target, args, kwargs, route.run)
    if has_tensors:
        with _torch.no_modes():
            return func(*args, **kwargs)
    return _call_without_tensors(tracer, func, args, kwargs)


def are_plain(values: Any, has_stand_in: bool = True) -> bool:
    """Whether these are stand-ins and literals, also in a list or tuple. `has_stand_in`: at least one is a stand-in."""
    found = not has_stand_in
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            found = True
        elif kind is tuple or kind is list:
            for part in value:
                if type(part) is FakeTensor:
                    found = True
                elif type(part) not in ATOMS:
                    return False
        elif kind not in ATOMS:
            return False
    return found


def classify_arguments(tracer: MetaTracer, args: Any, kwargs: Any) -> tuple[bool, bool]:
    """Whether there are traced values or tensors of the root, and other tensors, among the arguments."""
    has_tensors = False
    for leaf in leaves_in((args, kwargs)):
        if type(leaf) is FakeTensor or type(leaf) is DeviceOf or isinstance(leaf, (MetaProxy, *SYMBOLIC)):
            return True, True
        if isinstance(leaf, torch.Tensor):
            if tracer.name_of(leaf) is not None:  # a parameter that an optimizer holds
                return True, True
            has_tensors = True
    return False, has_tensors


# --- the target of a call ------------------------------------------------------------------------------------------

OPERATORS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "matmul": operator.matmul,
    "remainder": operator.mod, "neg": operator.neg, "positive": operator.pos, "bitwise_and": operator.and_,
    "bitwise_or": operator.or_, "bitwise_xor": operator.xor,
    "gt": operator.gt, "lt": operator.lt, "ge": operator.ge, "le": operator.le, "ne": operator.ne, "eq": operator.eq,
    "add_": operator.iadd, "sub_": operator.isub, "mul_": operator.imul, "div_": operator.itruediv,
    "floor_divide_": operator.ifloordiv, "remainder_": operator.imod,
}  # fmt: skip
"""Methods that C++ calls for operators: `x + 1` is `Tensor.add`, and only the instruction of the caller shows it."""
REFLECTED = {
    "__rsub__": operator.sub, "__rdiv__": operator.truediv, "__rfloordiv__": operator.floordiv, "__rmod__": operator.mod,
    "__rpow__": operator.pow, "__rlshift__": operator.lshift, "__rrshift__": operator.rshift, "__rmatmul__": operator.matmul,
}  # fmt: skip
IN_PYTHON: dict[Any, Target] = {
    torch.Tensor.__pow__: ("call_function", operator.pow),
    torch.Tensor.__ipow__: ("call_function", operator.ipow),
    FakeTensor.to: ("call_method", "to"),
}
"""Methods whose names do not show it."""
OPERATOR_INSTRUCTIONS = frozenset(
    code
    for name, code in dis.opmap.items()
    if name == "COMPARE_OP" or (name.startswith(("BINARY_", "INPLACE_", "UNARY_")) and "SUBSCR" not in name)
)
_instructions: dict[CodeType, bytes] = {}


def target_of(func: Any) -> Target:
    """The target of a torch function in a graph: `x + 1`, `x.view(2)`, `torch.relu(x)`."""
    name = getattr(func, "__name__", "")
    if isinstance(func, FunctionType) and func in IN_PYTHON:
        return IN_PYTHON[func]
    if not isinstance(func, METHODS) and not is_tensor_method_or_property(func):
        return "call_function", func
    if name in REFLECTED:
        return "reflected", REFLECTED[name]
    as_operator = getattr(operator, name, None) if name.startswith("__") else None
    return ("call_function", as_operator) if as_operator is not None else ("call_method", name)


def is_operator(frame: FrameType) -> bool:
    """Whether the current instruction of the calling program is an operator, and not a call."""
    code = frame.f_code
    instructions = _instructions.get(code)
    if instructions is None:
        instructions = _instructions[code] = code.co_code
    return instructions[frame.f_lasti] in OPERATOR_INSTRUCTIONS


# --- attributes --------------------------------------------------------------------------------------------------------


def access(tracer: MetaTracer, func: Any, args: Any) -> Any:
    """`x.T`, `x.data = y`: called for each property of a tensor that the program reads or writes."""
    owner, descriptor = args[0], func.__self__
    name: str = getattr(descriptor, "__name__", "") or descriptor.fget.__name__
    is_proxy = isinstance(owner, MetaProxy)
    if type(owner) is not FakeTensor and not is_proxy:
        if name == "grad":
            _refuse_gradient(tracer, owner)
        with _torch.no_modes():
            return func(*args)
    if func.__name__ != "__get__":
        return _change_attribute(tracer, func, name, args)
    if is_proxy:
        return read_attribute(owner, name)
    if name == "shape" and not owner._spec.is_symbolic:
        return torch.Size(owner._spec.shape)  # without asking C++
    value = func(*args)
    if value is owner or not isinstance(value, (torch.Tensor, torch.device)):
        return value
    if type(value) is FakeTensor and value._node is not None and tracer.is_open(value._node.graph):
        return value  # `x.grad` that the program has set
    node = tracer.append_call(getattr, (tracer.create_arg(owner), name), {})
    tracer.results.parts.append(node)
    tracer.write_meta(node, value)
    return tracer.results.present(node, value)


def _change_attribute(tracer: MetaTracer, func: Any, name: str, args: Any) -> Any:
    target = setattr if func.__name__ == "__set__" else delattr

    def change(owner: object, name: str, *value: object) -> None:
        func(owner, *value)

    tracer.call("call_function", target, (args[0], name, *args[1:]), {}, change)


# --- functions that are not recorded as they are -----------------------------------------------------------------------

ANSWERED_BY_OBJECT = frozenset(
    "__repr__ __str__ __format__ __hash__ __reduce_ex__ __reduce__ __dir__ __array__ __dlpack__ __dlpack_device__ "
    "__setstate__ data_ptr untyped_storage storage register_hook "
    "register_post_accumulate_grad_hook share_memory_ is_shared is_pinned __cuda_array_interface__".split()
)
"""Methods that run on the tensor itself, without a node."""


def _convert(tracer: MetaTracer, func: Any, args: Any, kwargs: Any) -> Any:
    """`bool(x)`, `int(x)`: the number, if it is determined."""
    return tracer.convert(args[0], func, args, kwargs)


def _deep_copy(tracer: MetaTracer, func: Any, args: Any, kwargs: Any) -> Any:
    return tracer.call("call_method", "clone", args[:1], {})


HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        "__bool__ __int__ __float__ __complex__ __index__ __contains__ __long__".split(), _convert
    ),
    "__deepcopy__": _deep_copy,
}


def _refuse_gradient(tracer: MetaTracer, tensor: torch.Tensor) -> None:
    """Raise if the gradient of a parameter of the root is read from the parameter itself, as optimizers do: in the trace,
    its stand-in has the gradient."""
    name = tracer.name_of(tensor)
    if name is not None and tracer.stand_in(tensor).grad is not None:
        raise make_gradient_error(
            f"{name}.grad is read outside of the traced module, as by an optimizer", "grad", name
        )


# --- factories -----------------------------------------------------------------------------------------------------------


def _call_without_tensors(tracer: MetaTracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a call without tensors: recorded if its result is a tensor (a factory)."""
    try:
        result = func(*args, **kwargs)
    except UnderstudyError as error:
        if isinstance(error, OperatorError):
            raise
        with _torch.no_modes():
            return func(*args, **kwargs)
    if type(result) is FakeTensor or holds(result, _is_stand_in):
        return tracer.record("call_function", func, args, kwargs, result)
    return result


def _is_stand_in(value: object) -> bool:
    return type(value) is FakeTensor
