"""Which call of torch's Python functions a node comes from."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from understudy import _torch
from understudy.capture.constants import has_reals
from understudy.capture.unrecorded_effects import data_reads, recurrent_layers
from understudy.capture.unrecorded_effects.global_state import SET_DATA, set_data
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.data_dependent import with_tensors_of_lengths
from understudy.ops.nn import recurrent
from understudy.spec.call import flat

if TYPE_CHECKING:
    from understudy.capture.tracer import PythonKeyTracer

def _in_python(tracer: PythonKeyTracer, func: Any, args: Any, kwargs: Any) -> Any:
    """C++ reads sizes as plain integers here, past every dispatch; torch has a Python version that does not."""
    has_symbols = any(fake._spec.is_symbolic for fake in flat(FakeTensor, args, kwargs))
    with _torch.python_versions() if has_symbols else nullcontext():
        return func(*args, **kwargs)


def _with_lengths(tracer: PythonKeyTracer, func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = with_tensors_of_lengths(args, kwargs)
    return func(*args, **kwargs)


def _set_data(tracer: PythonKeyTracer, func: Any, args: Any, kwargs: Any) -> Any:
    return set_data(tracer, *args)


def _read(tracer: PythonKeyTracer, func: Any, args: Any, kwargs: Any) -> Any:
    data_reads.check(tracer, func, args, kwargs)
    return func(*args, **kwargs)


READS_ONLY = data_reads.READS.keys() - data_reads.MAKERS.keys()
SPECIAL = {
    torch.istft: _in_python,
    torch.ctc_loss: _with_lengths,
    torch.nn.functional.ctc_loss: _with_lengths,
    SET_DATA: _set_data,
    **dict.fromkeys(recurrent.PADDED_LAYERS, recurrent_layers.operator_called),
    **dict.fromkeys(data_reads.READS, _read),
    **dict.fromkeys(data_reads.MAKERS, data_reads.make_from_list),
}
"""Functions that are not only called."""


class TorchFunctionMetadataMode(TorchFunctionMode):
    """Numbers the calls of each torch function: `("linear_2", "builtin_function_or_method.linear")`."""

    only_counts = True
    """What it would hear of a call can be told without it."""

    def __init__(self, tracer: PythonKeyTracer) -> None:
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer = self.tracer
        counts = tracer.torch_fn_counts
        count = counts[func] = counts.get(func, 0) + 1
        tracer.node_meta.torch_call = func, count
        if tracer.strays is not None and has_reals(args, kwargs) and func not in READS_ONLY:
            args, kwargs = tracer.strays.replace(args, kwargs or {})
        if func in SPECIAL:
            return SPECIAL[func](tracer, func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)
