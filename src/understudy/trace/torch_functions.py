"""Which call of torch's Python functions a node comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from understudy.trace.tracer import PythonKeyTracer


class TorchFunctionMetadataMode(TorchFunctionMode):
    """Numbers the calls of each torch function: `("linear_2", "builtin_function_or_method.linear")`."""

    def __init__(self, tracer: PythonKeyTracer) -> None:
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer = self.tracer
        tracer.torch_fn_metadata = func
        counts = tracer.torch_fn_counts
        counts[func] = counts.get(func, 0) + 1
        tracer.node_meta.torch_call = (func, counts[func])
        return func(*args, **kwargs) if kwargs else func(*args)
