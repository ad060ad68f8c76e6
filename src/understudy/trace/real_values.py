"""Determined values while real tensors are traced: literals, and what is computed from nothing but literals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.fake.tensor import FakeTensor
from understudy.infer.call import flat, mapped

if TYPE_CHECKING:
    from understudy.trace.recorder import OpFacts
    from understudy.trace.tracer import PythonKeyTracer

LARGEST = 1
"""Elements of a tensor whose value is followed."""


class KnownValues:
    """Values of small real tensors that do not depend on the inputs. The fake mode follows those of stand-ins itself."""

    def __init__(self, tracer: PythonKeyTracer) -> None:
        self._tracer = tracer

    def read(self, func: Any, args: Any, kwargs: Any, tensors: Any, fake_mode: Any) -> tuple[Any] | None:
        """The answer to a question about data, if all of the data is determined."""
        values = self._tracer.known_values
        if not tensors or not all(type(t) is not FakeTensor and t in values for t in tensors):
            return None
        args, kwargs = mapped(values.__getitem__, torch.Tensor, (tuple(args), dict(kwargs)))
        with _torch.no_modes():
            return (func(*args, **kwargs),)

    def before(self, func: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
        """The arguments with values in the place of tensors, None if one of them is not determined."""
        values = self._tracer.known_values
        if not tensors or not all(t in values for t in tensors):
            if _torch.is_mutable(func):
                self._forget(tensors)
            return None
        return mapped(values.__getitem__, torch.Tensor, (tuple(args), dict(kwargs)))

    def after(self, func: Any, facts: OpFacts, known: Any, args: Any, result: Any) -> None:
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

    def _forget(self, tensors: Any) -> None:
        """What is written from elsewhere is not determined any more, nor is what shares memory with it."""
        values = self._tracer.known_values
        written = (
            {_torch.storage_id(tensor) for tensor in tensors if tensor.layout is torch.strided}
            if values
            else ()
        )
        for tensor in list(values) if written else ():
            if _torch.storage_id(tensor) in written:
                del values[tensor]
