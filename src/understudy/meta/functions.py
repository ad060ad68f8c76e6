"""Regions of a program with changed global state: `torch.autocast`, `torch.no_grad` and their like.

Their begin and end are nodes. Without them, a graph would compute in other dtypes, or have gradients where the program
has none. After the region, the state is what it was before, whatever it is when the graph runs.

A function of `torch.vmap` becomes a subgraph. The body is traced once, on one slice of each mapped input. Values that
it uses from outside (traced values, tensors of the root, sizes) become arguments that are not mapped.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import has_side_effect
from torch.overrides import is_tensor_method_or_property

from understudy import _torch
from understudy.errors import OperatorError, UnderstudyError
from understudy.fake.tensor import FakeTensor
from understudy.graph.random_state import torch_get_rng_state
from understudy.meta.errors import make_gradient_error
from understudy.meta.proxies import SYMBOLIC, UNKNOWN, DeviceOf, MetaProxy, attribute, is_fact, make_proxy
from understudy.meta.structures import holds, leaves_in

if TYPE_CHECKING:
    from understudy.meta.tracer import MetaTracer

@has_side_effect
def begin_grad_mode(enabled: bool) -> bool:
    """Set grad mode; returns the previous state."""
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(enabled)
    return before


@has_side_effect
def end_grad_mode(before: bool) -> None:
    torch.set_grad_enabled(before)


class Regions:
    """The regions that the traced program is in."""

    def __init__(self, tracer: MetaTracer) -> None:
        self._tracer = tracer
        self._autocasts: list[Node] = []
        self._before: dict[int, tuple[Any, Node]] = {}
        """By context manager: the node of the grad mode before it."""
        self.handlers: dict[Any, Callable[..., Any]] = {
            _torch.enter_autocast: self._enter_autocast,
            _torch.exit_autocast: self._exit_autocast,
            _torch.set_grad_enabled: self._set_grad_enabled,
        }

    def _enter_autocast(self, *options: object) -> Any:
        """`torch.autocast` has entered already. The code of a graph, which is traced again or read from a pickle, calls
        the function itself."""
        is_called = sys._getframe(2).f_code is _torch.handle_torch_function.__code__
        self._autocasts.append(self._tracer.append_call(_torch.enter_autocast, options, {}))
        return _torch.enter_autocast(*options) if is_called else None

    def _exit_autocast(self, *entered: object) -> None:
        if entered:
            _torch.exit_autocast(*entered)
        self._tracer.append_call(_torch.exit_autocast, (self._autocasts.pop(),), {})

    def _set_grad_enabled(self, enabled: bool) -> None:
        _torch.set_grad_enabled(enabled)
        step, manager = _step_of_manager(sys._getframe(1))
        known = self._before.get(id(manager))
        if step in ENDS and known is not None:
            self._tracer.append_call(end_grad_mode, (known[1],), {})
            return
        has_begun = step == "__enter__" and isinstance(manager, torch.set_grad_enabled) and known is not None
        if has_begun and known is not None and known[1] is self._tracer.last_node():
            return  # `set_grad_enabled` takes effect in `__init__`
        node = self._tracer.append_call(begin_grad_mode, (enabled,), {})
        if manager is not None and not has_begun:
            self._before[id(manager)] = manager, node


def erase_empty_regions(graph: Graph) -> None:
    """Erase regions without nodes, and random states that are not put back: a checkpoint reads one in any case."""
    for node in list(graph.nodes):
        if node.target is torch_get_rng_state and not node.users:
            graph.erase_node(node)
        if node.target is end_grad_mode and node.args[0] is node.prev and len(node.prev.users) == 1:
            began = node.prev
            graph.erase_node(node)
            graph.erase_node(began)


def _step_of_manager(frame: FrameType | None) -> tuple[str, Any]:
    """The context manager (`no_grad` and its like) that changes the state, and whether it is being entered or left."""
    found: tuple[str, Any] = "", None
    while frame is not None:
        name = frame.f_code.co_name
        if name in STEPS and frame.f_globals.get("__name__", "").startswith("torch.autograd."):
            found = name, frame.f_locals.get("self")
        elif found[0] or not _is_of_torch(frame):
            break
        frame = frame.f_back
    return found


ENDS = ("__exit__", "__call__")
"""`torch.set_grad_enabled(False)` also restores the state when it is called to decorate a function."""
STEPS = ("__init__", "__enter__", *ENDS)


def _is_of_torch(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").startswith(("torch.", "understudy."))


# --- Calls of torch's functions while a program is traced ---------------------------------------------------
# A function mode sees them all, in this thread only. A call is handled by its arguments:
#
#     a value of the trace, or a symbolic size    recorded
#     a tensor of the root                        recorded, unless only metadata is read
#     tensors that are constants                  run for real
#     no tensor, but the result is one: a factory recorded

Function = Callable[..., object]
Target = tuple[str, Any]
"""The kind and target of a node."""


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
        if self.tracer.is_deriving:
            return func(*args, **(kwargs or {}))
        region = self._regions.get(func)
        return region(*args) if region is not None else call_torch_function(self.tracer, func, args, kwargs or {})


def call_torch_function(tracer: MetaTracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Called for each torch function of the traced program."""
    has_traced, has_roots, has_tensors = _classify_arguments(tracer, args, kwargs)
    if func is torch.autograd.grad:
        _refuse_gradients_of_whole_modules(tracer, args, kwargs)
    if has_traced:
        return _record_call(tracer, func, args, kwargs)
    if has_roots:
        return _call_on_root_tensors(tracer, func, args, kwargs)
    if has_tensors:
        return func(*args, **kwargs)
    return _call_without_tensors(tracer, func, args, kwargs)


def _classify_arguments(tracer: MetaTracer, args: Any, kwargs: object) -> tuple[bool, bool, bool]:
    if any(isinstance(value, MetaProxy) for value in args):
        return True, False, False
    has_traced = has_roots = has_tensors = False
    for leaf in leaves_in((args, kwargs)):
        if isinstance(leaf, (MetaProxy, *SYMBOLIC)) or type(leaf) is DeviceOf:
            has_traced = True
        elif isinstance(leaf, torch.Tensor):
            has_tensors = True
            has_roots = has_roots or tracer.name_of(leaf) is not None
    return has_traced, has_roots, has_tensors


def _record_call(tracer: MetaTracer, func: Any, args: object, kwargs: object) -> Any:
    accessed = _property_of(func)
    if accessed is not None:
        return _access(tracer, accessed, func.__name__, args)
    kind, target = target_of(func)
    return tracer.create_proxy(kind, target, args, kwargs)


def target_of(func: Any) -> Target:
    """The target of a torch function in a graph: `x + 1`, `x.view(2)`, `torch.relu(x)`."""
    name = getattr(func, "__name__", "")
    if is_tensor_method_or_property(func):
        as_operator = getattr(operator, name, None) if name.startswith("__") else None
        return ("call_function", as_operator) if as_operator is not None else ("call_method", name)
    return "call_function", func


def _property_of(func: object) -> str | None:
    """The name of the property that `func` reads or writes."""
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") not in ("__get__", "__set__", "__delete__") or owner is None:
        return None
    name: str = getattr(owner, "__name__", "") or getattr(getattr(owner, "fget", None), "__name__", "")
    return name


def _access(tracer: MetaTracer, name: str, how: str, args: Any) -> Any:
    owner = args[0] if isinstance(args[0], MetaProxy) else tracer.proxy_of(args[0])
    if how == "__get__":
        return attribute(owner, name)
    if how == "__set__":
        return tracer.create_proxy("call_function", setattr, (owner, name, args[1]), {})
    return tracer.create_proxy("call_function", delattr, (owner, name), {})


# --- tensors of the root ------------------------------------------------------------------------------

READ = frozenset("__bool__ __int__ __float__ __complex__ __index__ __contains__ item tolist".split())
"""Methods that read the data of a tensor."""
ANSWERED_BY_OBJECT = frozenset(
    "__len__ __repr__ __str__ __format__ __hash__ __deepcopy__ __copy__ "
    "__reduce_ex__ __reduce__ __dir__ __array__ __dlpack__ __dlpack_device__ __setstate__ "
    "numpy data_ptr untyped_storage storage backward register_hook "
    "register_post_accumulate_grad_hook share_memory_ is_shared is_pinned __cuda_array_interface__".split()
)
"""Methods that a tensor of the root answers itself."""


def _call_on_root_tensors(tracer: MetaTracer, func: Any, args: Any, kwargs: Any) -> Any:
    accessed = _property_of(func)
    name = accessed or getattr(func, "__name__", "")
    if name in ANSWERED_BY_OBJECT or (accessed is None and name == "__iter__"):
        return func(*args, **kwargs)
    if name in READ:
        return _read(tracer, func, args, kwargs)
    if accessed is not None:
        if func.__name__ == "__get__":
            if name == "grad":
                _refuse_gradient_of_run(tracer, args[0])
            value = func(*args)
            if value is None or is_fact(value) or not isinstance(value, (torch.Tensor, torch.device)):
                return value
        return _access(tracer, accessed, func.__name__, args)
    return _record_call(tracer, func, args, kwargs)


def _refuse_gradients_of_whole_modules(tracer: MetaTracer, args: Any, kwargs: Any) -> None:
    """Raise if gradients are asked for of parameters that only their modules have read: a module that the trace keeps
    whole is derived with stand-ins of its own, of which the call knows nothing."""
    whole = {
        id(parameter): node
        for node in tracer.graph.find_nodes(op="call_module")
        for parameter in tracer.root.get_submodule(node.target).parameters()
    }
    for tensor in leaves_in((args[1:2], kwargs.get("inputs"))) if whole else ():
        if isinstance(tensor, torch.Tensor) and id(tensor) in whole:
            name = tracer.name_of(tensor)
            raise make_gradient_error(
                f"the gradient of {name} is asked for, a parameter of a module that the trace keeps whole", "grad", name
            )


def _refuse_gradient_of_run(tracer: MetaTracer, tensor: torch.Tensor) -> None:
    """Raise if a backward pass is in the graph: the gradients that it will leave are not there while the program is
    traced."""
    has_backward = tracer.graph.find_nodes(op="call_method", target="backward") or tracer.graph.find_nodes(
        op="call_function", target=torch.autograd.backward
    )
    if has_backward and tensor.requires_grad:
        name = tracer.name_of(tensor)
        raise make_gradient_error(
            f"{name}.grad is read after backward(), which runs when the graph does: there is no gradient yet", "grad", name
        )


def _read(tracer: MetaTracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Read the data of a tensor of the root. It is a constant of the trace, unless the program has written to it."""
    if not tracer.derivation.is_written(args[0]):
        return func(*args, **kwargs)
    try:
        with tracer.derivation.enter_mode():
            return func(tracer.derivation.stand_in(args[0]), *args[1:], **kwargs)
    except UnderstudyError as error:
        name = tracer.name_of(args[0])
        raise tracer.make_refusal(
            f"{name} was written to, and is read now: {error.reason}", tracer.proxy_of(args[0])
        ) from error


# --- factories -----------------------------------------------------------------------------------------------------------


def _call_without_tensors(tracer: MetaTracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a call without tensors: recorded if its result is a tensor (a factory)."""
    try:
        with tracer.derivation.enter_mode():
            result = func(*args, **kwargs)
    except UnderstudyError as error:
        if isinstance(error, OperatorError):
            raise
        return func(*args, **kwargs)
    if not holds(result, lambda part: type(part) is FakeTensor):
        return result
    return tracer.proxy_for("call_function", func, args, kwargs, result)


def run_vmap(body: Callable[..., object], options: dict[str, Any], *args: object) -> Any:
    """The target of the node."""
    return torch.vmap(body, **options)(*args)


def apply_function(function: type[torch.autograd.Function], *args: object, **kwargs: object) -> Any:
    """`function.apply(…)` as one node, because it has its own backward."""
    return function.apply(*args, **kwargs)


def call_scripted(function: Any, *args: object, **kwargs: object) -> Any:
    """Call a TorchScript function, which has no importable name. On stand-ins, its original Python function runs,
    because TorchScript reads sizes as numbers."""
    is_stood_in = any(type(value) is FakeTensor for value in (*args, *kwargs.values()))
    return (_torch.original_python_function(function) if is_stood_in else function)(*args, **kwargs)


class VmapBody:
    """A subgraph that is being recorded."""

    def __init__(self, outside: Graph) -> None:
        self.graph = Graph()
        self.outside = outside
        self.taken: dict[Node, Node] = {}

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
    module = tracer.add_body(GraphModule(tracer.root, body.graph, "Body"))
    arguments = (module, options, *given)
    whole = tracer.try_to_derive(run_vmap, arguments)
    if whole is UNKNOWN and mapped:
        whole = _from_one_part(tracer, result, out_dims, mapped[0])
    if whole is UNKNOWN:
        return tracer.create_proxy("call_function", run_vmap, arguments, {})
    return tracer.proxy_for("call_function", run_vmap, arguments, {}, whole)


def _from_one_part(tracer: MetaTracer, result: object, out_dims: object, mapped: tuple[Any, int]) -> Any:
    """The results for all slices, from the results for one: new tensors, with the mapped dimension outermost."""
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


def _part(tracer: MetaTracer, number: int, value: Any, dim: int | None) -> Any:
    """The argument of the body for an input: the first slice along `dim`."""
    if dim is None:
        return value
    node = tracer.graph.placeholder(f"part_{number}")
    proxy = value if isinstance(value, MetaProxy) else tracer.proxy_of(value)
    if proxy._meta is UNKNOWN:
        return tracer.proxy(node)
    with tracer.derivation.enter_mode():
        shape = list(proxy._meta.shape)
        is_empty = type(shape[dim]) is int and shape.pop(dim) == 0  # has no slice
        meta = proxy._meta.new_empty(shape) if is_empty else proxy._meta.select(dim, 0)
    tracer.write_meta(node, meta)
    return make_proxy(tracer, node, meta)
