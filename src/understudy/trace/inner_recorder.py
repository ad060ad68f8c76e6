"""Above autograd an operator is one node, whatever it is made of; a backward pass needs what it is made of.

`layer_norm` is recorded whole, but its derivative reads the mean that was computed inside. So what an operator runs is
recorded as well, before its own node, as long as it could be left out again: nobody uses it in most programs, and then
it is removed with the rest of the dead code. What cannot be left out (random numbers, writes) is not recorded, and
tensors that come of it are *hidden*: an error says so, if a backward pass asks for one.
"""

from __future__ import annotations

from typing import Any

import torch

from understudy import _torch
from understudy.fake.mode import FakeTensorMode
from understudy.infer.call import flat
from understudy.trace.effects import is_pure
from understudy.trace.recorder import ProxyTorchDispatchMode


class InnerRecorder(ProxyTorchDispatchMode):
    """Records what one operator runs, below autograd."""

    def __init__(self, outer: ProxyTorchDispatchMode, op: Any) -> None:
        allow = outer._allow_fake_constant
        super().__init__(outer.tracer, outer.tracing_mode, _allow_fake_constant=allow, decomposition_table={})
        self._op = op
        self._made: dict[int, torch.Tensor] = {}
        self._is_late = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = flat(torch.Tensor, args, kwargs)
        hidden = self.tracer.hidden
        if self._is_late or not is_pure(func, args, kwargs) or any(tensor in hidden for tensor in tensors):
            return self._unrecorded(func, types, args, kwargs, tensors)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._made.update((id(tensor), tensor) for tensor in flat(torch.Tensor, (result,), {}))
        return result

    def _unrecorded(self, func: Any, types: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
        fake_mode = _torch.active_fake_mode()
        is_fake = type(fake_mode) is FakeTensorMode
        result = fake_mode.__torch_dispatch__(func, types, args, kwargs) if is_fake else func(*args, **kwargs)
        for tensor in flat(torch.Tensor, (result,), {}):
            if id(tensor) in self._made or not any(tensor is given for given in tensors):
                self._made[id(tensor)] = tensor
                self.tracer.hide(tensor, self._op)
            else:  # the operator writes to its own input: what comes after would read it before it is written
                self._is_late = True
        return result


def needs_its_parts(args: Any, kwargs: Any) -> bool:
    """Whether a backward pass could ask for what an operator computes inside."""
    return torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in flat(torch.Tensor, args, kwargs)
    )
