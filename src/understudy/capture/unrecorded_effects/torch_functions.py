"""The function mode of a capture: counts calls of torch functions for `torch_fn`; recurrent layers with symbolic sizes.

`GRU`, `RNN` and the `LSTM`s that oneDNN does not support are loops over time steps. To keep the number of steps
symbolic, the layer is one node, the composite operator that eager calls. Only its gradient unrolls the steps,
specialised to the example.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.forward_ad import unpack_dual

from understudy import _torch
from understudy.capture.constants import REAL_OR_SEQUENCES, has_reals
from understudy.capture.unrecorded_effects import tensor_data
from understudy.capture.unrecorded_effects.tensor_data import GET_DATA, SET_DATA, get_data, set_data
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.data_dependent import convert_lengths_to_tensors
from understudy.ops.linalg.norms_and_distances import rank_into_out
from understudy.ops.nn import recurrent
from understudy.ops.traits.caching import AS_SYMBOLS
from understudy.patching import RECORDING, patch_call
from understudy.spec.call import flat

if TYPE_CHECKING:
    from understudy.capture.tracer import PythonKeyTracer

aten = torch.ops.aten
Function = Callable[..., object]


@patch_call("torch._VF.lstm", "torch._VF.gru", "torch._VF.rnn_tanh", "torch._VF.rnn_relu", during=RECORDING)
def record_layer(original: Any, *args: object, **kwargs: object) -> Any:
    """The number of steps may be a symbol: the layer is one node, the composite operator."""
    return _call_layer(getattr(aten, original.__name__).input, original, args, kwargs)


def record_operator(tracer: PythonKeyTracer, op: Any, args: object, kwargs: object) -> Any:
    """Record the operator of a recurrent layer as one node."""
    return _call_layer(op, op, args, kwargs)


def _call_layer(op: object, otherwise: Function, args: Any, kwargs: Any) -> Any:
    recorder = _torch.active_recorder()
    if recorder is None or kwargs or len(args) != 9 or not _can_be_whole(recorder, op, args):
        return otherwise(*args, **kwargs)
    x, state, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first = args
    states = [state] if isinstance(state, torch.Tensor) else list(state)
    if not (dropout and train and num_layers > 1):
        tensors = (x, *states, *weights)
        return _torch.apply_function(WholeLayer, recorder, op, len(states), args[3:], *tensors)
    x = x.transpose(0, 1) if batch_first else x
    directions, width = (2 if bidirectional else 1), len(weights) // num_layers
    last = []

    def run(x: Any, layer: int) -> Any:
        own = [part.narrow(0, layer * directions, directions) for part in states]
        settings = (has_biases, 1, 0.0, train, bidirectional, False)
        tensors = (x, *own, *weights[layer * width : (layer + 1) * width])
        x, *ends = _torch.apply_function(WholeLayer, recorder, op, len(states), settings, *tensors)
        last.append(ends)
        return x

    # Layer by layer, so that the gradient can use the dropout masks between layers.
    x = recurrent.run_layers(x, num_layers, dropout, train, run)
    ends = [torch.cat(parts, 0) for parts in zip(*last, strict=True)]
    return (x.transpose(0, 1) if batch_first else x, *ends)


def _can_be_whole(recorder: Any, op: object, args: Any) -> bool:
    """Whether the number of steps is symbolic, and neither a transform nor a mode needs the inner operators."""
    x, state, weights, has_biases = args[:4]
    if type(has_biases) is not bool or not hasattr(recorder, "below_autograd") or x.dim() != 3:
        return False
    states = [state] if isinstance(state, torch.Tensor) else state
    tensors = [x, *states, *weights]
    if any(type(tensor) is not FakeTensor for tensor in tensors):
        return False
    steps = x.shape[1 if args[-1] else 0]
    if not isinstance(steps, torch.SymInt) or steps.node.is_constant():
        return False
    listeners = [mode for mode in _torch.dispatch_modes() if mode is not recorder and mode is not x.fake_mode]
    if op is aten.lstm.input and recurrent.uses_onednn_layers(args):
        return False
    is_plain = not listeners and not recorder.pre_dispatch and op not in recorder.decomposition_table
    is_plain = is_plain and not _torch.has_transforms() and not torch.is_autocast_enabled(x.device.type)
    return is_plain and all(unpack_dual(tensor).tangent is None for tensor in tensors)


class WholeLayer(torch.autograd.Function):
    """The layer as one node; its gradient unrolls the steps."""

    @staticmethod
    def forward(ctx: Any, recorder: Any, op: Any, states: int, settings: object, *tensors: object) -> Any:
        ctx.save_for_backward(*tensors)
        ctx.op, ctx.states, ctx.settings = op, states, settings
        args = _arguments(op, states, settings, tensors)
        with _torch.without_recorder():
            result = _make_results(op, args)
        tracer = recorder.tracer
        node = tracer.append_call(op, tracer.argument(args), {}, op.overloadpacket.__name__)
        recorder.track(result, node)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        is_tracked = torch.is_grad_enabled()
        with _torch.grad_mode(True):
            tensors = [_make_leaf(tensor, is_tracked) for tensor in ctx.saved_tensors]
            with _torch.NoFunctionModes(), _torch.python_versions():
                results = ctx.op(*_arguments(ctx.op, ctx.states, ctx.settings, tensors))
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        found = iter(
            torch.autograd.grad(results, wanted, gradients, create_graph=is_tracked, allow_unused=True)
        )
        return None, None, None, None, *(next(found) if tensor.requires_grad else None for tensor in tensors)


def _make_leaf(tensor: torch.Tensor, is_tracked: bool) -> torch.Tensor:
    """A separate leaf for a tensor, to differentiate with respect to it."""
    return tensor.view_as(tensor) if is_tracked else tensor.detach().requires_grad_(tensor.requires_grad)


def _arguments(op: object, states: int, settings: Any, tensors: Any) -> tuple[Any, ...]:
    x, state, weights = tensors[0], list(tensors[1 : states + 1]), list(tensors[states + 1 :])
    return x, state if op is aten.lstm.input else state[0], weights, *settings


def _make_results(op: Any, args: Any) -> tuple[Any, ...]:
    """The results of the layer: computed for one step, which checks the sizes, and expanded to all steps."""
    x, batch_first = args[0], args[-1]
    dim = 1 if batch_first else 0
    with _torch.NoFunctionModes(), _torch.python_versions():
        output, *ends = op(x.narrow(dim, 0, 1), *args[1:])
    steps, batch, width = x.shape[dim], x.shape[1 - dim], output.shape[2]
    sizes, strides = (steps, batch, width), (batch * width, width, 1)
    if batch_first:
        sizes, strides = (batch, steps, width), (width, batch * width, 1)
    return (output.new_empty_strided(sizes, strides), *ends)


def _run_python_version(tracer: PythonKeyTracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Call torch's Python version, because C++ reads sizes as plain integers here."""
    has_symbols = any(fake._spec.is_symbolic for fake in flat(FakeTensor, args, kwargs))
    with _torch.python_versions() if has_symbols else nullcontext():
        return func(*args, **kwargs)


def _with_lengths(tracer: PythonKeyTracer, func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = convert_lengths_to_tensors(args, kwargs)
    return func(*args, **kwargs)


def _fill_out(tracer: PythonKeyTracer, func: Any, args: Any, kwargs: Any) -> Any:
    """As the patch of this function does, for programs that have imported it before."""
    return rank_into_out(func, *args, **kwargs)


def _get_data(tracer: PythonKeyTracer, func: object, args: Any, kwargs: object) -> Any:
    return get_data(tracer, *args)


def _set_data(tracer: PythonKeyTracer, func: object, args: Any, kwargs: object) -> Any:
    return set_data(tracer, *args)


def _read(tracer: PythonKeyTracer, func: Any, args: Any, kwargs: Any) -> Any:
    tensor_data.check(tracer, func, args, kwargs)
    return func(*args, **kwargs)


def _read_as_symbols(tracer: PythonKeyTracer, func: Any, args: Any, kwargs: Any) -> Any:
    return AS_SYMBOLS[func](*args, **kwargs)


READS_ONLY = tensor_data.READS.keys() - tensor_data.MAKERS.keys()
SPECIAL = {
    torch.istft: _run_python_version,
    torch.linalg.matrix_rank: _fill_out,
    torch.ctc_loss: _with_lengths,
    torch.nn.functional.ctc_loss: _with_lengths,
    GET_DATA: _get_data,
    SET_DATA: _set_data,
    **dict.fromkeys(AS_SYMBOLS, _read_as_symbols),
    **dict.fromkeys(recurrent.PADDED_LAYERS, record_operator),
    **dict.fromkeys(tensor_data.READS, _read),
    **dict.fromkeys(tensor_data.MAKERS, tensor_data.make_from_list),
}
"""Functions with special handling."""


class TorchFunctionMetadataMode(_torch.FunctionMode):
    """Numbers the calls of each torch function: `("linear_2", "builtin_function_or_method.linear")`."""

    only_counts = True
    """Its effect on a replayed layer can be computed without it."""

    def __init__(self, tracer: PythonKeyTracer) -> None:
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        tracer = self.tracer
        counts = tracer.torch_fn_counts
        count = counts[func] = counts.get(func, 0) + 1
        tracer.node_meta.torch_call = func, count
        outside = tracer.outside_tensors
        if outside is not None:
            given = (*args, *kwargs.values()) if kwargs else args
            # nearly all calls have no such arguments
            if not (REAL_OR_SEQUENCES.isdisjoint(map(type, given)) or func in READS_ONLY) and has_reals(
                given
            ):
                args, kwargs = outside.replace(args, kwargs or {})
        if func in SPECIAL:
            return SPECIAL[func](tracer, func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)
