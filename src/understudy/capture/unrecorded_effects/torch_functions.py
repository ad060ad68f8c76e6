"""The function mode of a capture: counts calls of torch functions for `torch_fn`, and handles those that read data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.capture.constants import REAL_OR_SEQUENCES, has_reals
from understudy.capture.unrecorded_effects import tensor_data
from understudy.capture.unrecorded_effects.tensor_data import GET_DATA, SET_DATA, get_data, set_data
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.data_dependent import convert_lengths_to_tensors
from understudy.ops.linalg.norms_and_distances import rank_into_out
from understudy.ops.traits.caching import AS_SYMBOLS
from understudy.spec.call import flat

if TYPE_CHECKING:
    from understudy.capture.tracer import PythonKeyTracer

aten = torch.ops.aten
Function = Callable[..., object]


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
