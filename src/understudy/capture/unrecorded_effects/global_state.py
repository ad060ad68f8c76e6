"""Changes of global state and of tensors without an operator, recorded as nodes.

torch.get_rng_state, set_rng_state, manual_seed    become nodes: a checkpointed region that is run again puts the
                                                   generator's state back first, to draw the same numbers twice
torch.set_default_dtype                            becomes a node: factories without dtype depend on it
Parameter(x), x as one of a subclass               shares its memory with x
torch.from_dlpack(x)                               shares its memory with x
x.data                                             an alias of x; above autograd no operator is seen
x.data = y                                         x becomes an alias of y
x.as_subclass(Kind)                                the same value in an object of another class
Function.apply(x)                                  x may be a real tensor that has a stand-in
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from understudy import _torch
from understudy.capture.unrecorded_effects import data_reads
from understudy.fake.tensor import FakeTensor
from understudy.graph.node_values import set_val
from understudy.ops.traits.writes import draws_numbers
from understudy.patching import RECORDING, patch

if TYPE_CHECKING:
    from understudy.capture.tracer import PythonKeyTracer

aten = torch.ops.aten
Function = Callable[..., object]


def active_tracer() -> Any:
    """Our active tracer of this thread; None if there is none."""
    tracer = getattr(_torch.active_recorder(), "tracer", None)
    return tracer if hasattr(tracer, "append_call") else None


# --- the random generator --------------------------------------------------------------------------------------

STATES = (torch.get_rng_state, torch.set_rng_state, torch.manual_seed)
CHANGES_OF_STATE = "The call is a node of the graph: operators that are recorded after it depend on it."


@patch("torch.get_rng_state", "torch.random.get_rng_state", during=RECORDING, reason=CHANGES_OF_STATE)
def record_get_rng_state(original: Function) -> Function:
    return _record_calls(torch_get_rng_state, original)


@patch("torch.set_rng_state", "torch.random.set_rng_state", during=RECORDING, reason=CHANGES_OF_STATE)
def record_set_rng_state(original: Function) -> Function:
    return _record_calls(torch_set_rng_state, original)


@patch("torch.manual_seed", "torch.random.manual_seed", during=RECORDING, reason=CHANGES_OF_STATE)
def record_manual_seed(original: Function) -> Function:
    return _record_calls(torch_manual_seed, original)


@patch("torch.set_default_dtype", during=RECORDING, reason=CHANGES_OF_STATE)
def record_set_default_dtype(original: Function) -> Function:
    return _record_calls(torch_set_default_dtype, original)


torch_get_rng_state, torch_set_rng_state, torch_manual_seed = STATES
torch_set_default_dtype = torch.set_default_dtype


def _record_calls(target: Function, original: Function) -> Function:
    """`target`: the function that the node calls."""

    @functools.wraps(original)
    def call(*args: object, **kwargs: Any) -> Any:
        tracer = active_tracer()
        if tracer is None:
            return original(*args, **kwargs)
        node_args = tracer.argument(args)
        node_kwargs = {name: tracer.argument(value) for name, value in kwargs.items()}
        with _torch.no_modes():
            result = original(*args, **kwargs)
        node = tracer.append_call(target, node_args, node_kwargs)
        if isinstance(result, torch.Tensor):
            set_val(node, result)
            tracer.remember(result, node)
        return result

    return call


def remove_unused_rng_states(graph: Graph) -> None:
    """Remove nodes that read or write the generator's state, if the graph draws no random numbers."""
    states = [node for target in STATES for node in graph.find_nodes(op="call_function", target=target)]
    if not states or any(
        isinstance(node.target, _torch.OpOverload) and draws_numbers(node.target, node.args, node.kwargs)
        for node in graph.nodes
    ):
        return
    for node in reversed(list(graph.nodes)):
        if node in states and not node.users:
            graph.erase_node(node)


# --- tensors that alias others -----------------------------------------------------------------------------------


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


@patch("torch.from_dlpack", "torch.utils.dlpack.from_dlpack", during=RECORDING)
def record_from_dlpack(original: Function) -> Function:
    """The result shares its memory with the argument, without an operator."""

    @functools.wraps(original)
    def from_dlpack(ext_tensor: Any, *, device: Any = None, copy: bool | None = None) -> Any:
        tracer = active_tracer() if isinstance(ext_tensor, torch.Tensor) else None
        if tracer is None or tracer.find_node(ext_tensor) is None or not _is_plain(ext_tensor):
            return original(ext_tensor, device=device, copy=copy)
        result = aten.alias.default(ext_tensor)
        result = result.clone() if copy else result
        return result if device is None else result.to(device)

    return from_dlpack


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory can be exported as it is."""
    has_bits = tensor.is_conj() or tensor.is_neg()
    return tensor.layout is torch.strided and not has_bits and not tensor.requires_grad


@patch("torch.to_dlpack", "torch.utils.dlpack.to_dlpack", during=RECORDING)
def check_to_dlpack(original: Function) -> Function:
    """The program reads data of a tensor that the graph computes."""

    @functools.wraps(original)
    def to_dlpack(tensor: torch.Tensor) -> Any:
        tracer = active_tracer() if type(tensor) is not FakeTensor else None
        if tracer is not None:
            data_reads.check(tracer, torch.Tensor.__dlpack__, (tensor,), {})
        return original(tensor)

    return to_dlpack


@patch("torch.Tensor.as_subclass", during=RECORDING)
def record_as_subclass(original: Function) -> Function:
    """The result is the same value, in an object of another class, without an operator."""

    @functools.wraps(original)
    def as_subclass(tensor: torch.Tensor, kind: Any) -> Any:
        result = original(tensor, kind)
        tracer = active_tracer()
        if tracer is not None and tracer.find_node(result) is None:
            source = tracer.find_node(tensor)
            if source is not None:
                tracer.remember(result, source)
        return result

    return as_subclass


@patch("torch.autograd.Function.apply", during=RECORDING)
def apply_to_fakes(original: Any) -> Any:
    """An argument may be a real tensor that has a fake in the trace."""
    of_any_class = _torch.function_of_class_method(original)

    @functools.wraps(original)
    def apply(cls: object, *args: Any, **kwargs: Any) -> Any:
        tracer = active_tracer()
        if tracer is not None and tracer.strays is not None:
            args, kwargs = tracer.strays.replace(args, kwargs)
        return of_any_class(cls, *args, **kwargs)

    return classmethod(apply)


@patch("torch.Tensor.tolist", during=RECORDING)
def check_tolist(original: Function) -> Function:
    """Torch's own Python functions call `tolist` as well, which a function mode does not see."""

    @functools.wraps(original)
    def read(tensor: torch.Tensor) -> Any:
        tracer = active_tracer() if type(tensor) is not FakeTensor else None
        if tracer is not None:
            data_reads.check(tracer, original, (tensor,), {})
        return original(tensor)

    return read


GET_DATA: Function = torch.Tensor.data.__get__  # type: ignore[attr-defined]
SET_DATA: Function = torch.Tensor.data.__set__  # type: ignore[attr-defined]


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


# --- Random generators that a program makes itself: `torch.Generator().manual_seed(0)` ----------------------
# Each run of the graph makes its own generator, as each run of the program does. No mode sees calls of a generator's
# methods, so during a trace a generator is of a subclass that records them.

NATIVE = torch.Generator


class GeneratorType(type(NATIVE)):  # type: ignore[misc]
    """Every generator is an instance: programs check `isinstance(x, torch.Generator)`."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, NATIVE)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        tracer = active_tracer()
        if tracer is None:
            return NATIVE(*args, **kwargs)
        generator = super().__call__(*args, **kwargs)
        node = tracer.append_call(NATIVE, (), {"device": generator.device}, "generator")
        node.meta["val"] = None
        tracer.generators[_torch.generator_id(generator)] = generator, node
        return generator


class RecordedGenerator(NATIVE, metaclass=GeneratorType):
    """A generator that was made in a trace."""

    def manual_seed(self, seed: int) -> RecordedGenerator:
        self._call_recorded("manual_seed", seed)
        return self

    def seed(self) -> int:
        number: int = self._call_recorded("seed")
        return number

    def set_state(self, new_state: torch.Tensor) -> RecordedGenerator:
        self._call_recorded("set_state", new_state)
        return self

    def get_state(self) -> torch.Tensor:
        state: torch.Tensor = self._call_recorded("get_state")
        return state

    def _call_recorded(self, method: str, *args: Any) -> Any:
        tracer = active_tracer()
        source = None if tracer is None else node_of_generator(self, tracer)
        given = () if source is None else tracer.argument(args)
        with _torch.no_modes():
            result = getattr(NATIVE, method)(self, *args)
        if source is not None:
            node = tracer.create_node("call_method", method, (source, *given), {})
            node.meta["val"] = None
            if isinstance(result, torch.Tensor):
                set_val(node, result)
                tracer.remember(result, node)
        return result


def node_of_generator(generator: Any, tracer: PythonKeyTracer) -> Node | None:
    """The node of a generator; None if it was made before the trace. C++ may wrap the same state in another object."""
    return tracer.generators.get(_torch.generator_id(generator), (None, None))[1]


@patch("torch.Generator", "torch._C.Generator", during=RECORDING)
def record_generators(original: Any) -> Callable[..., Any]:
    """A generator that the program makes is made by the graph, too."""
    return RecordedGenerator
