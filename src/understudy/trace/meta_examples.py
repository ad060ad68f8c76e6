"""From examples to stand-ins: the metadata that a trace begins with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from understudy.fake.convert import spec_of_real
from understudy.fake.mode import FakeTensorMode
from understudy.fake.native import canonical
from understudy.fake.realise import make_new
from understudy.fake.symbolic import symbolic_spec
from understudy.fake.tensor import FakeTensor
from understudy.shapes.env import ShapeEnv
from understudy.trace.meta_structures import leaves_in


class Examples:
    """Makes the stand-ins of the arguments.

    An example on the meta device says nothing of the device: it is taken to be where the tensors of the root are.
    """

    def __init__(self, root: torch.nn.Module, meta_args: Mapping[str, Any] | None, symbolic: Any) -> None:
        self._symbolic = symbolic
        self._device = _device_of(root)
        env = next((env for env in map(_env_of, leaves_in(dict(meta_args or {}))) if env is not None), None)
        # Even where the sizes of the inputs are numbers, those that depend on data are symbols.
        mode = FakeTensorMode(
            allow_non_fake_inputs=True, shape_env=env or ShapeEnv(), static_shapes=not symbolic
        )
        self.mode: FakeTensorMode = _mode_of(root) or mode
        self.env: Any = self.mode.shape_env

    def stand_in(self, tensor: torch.Tensor, source: str) -> Any:
        if type(tensor) is FakeTensor:
            spec = tensor._spec
        elif not self._symbolic:
            if not _has_no_device(tensor):
                return self.mode.from_tensor(tensor, static_shapes=True)
            spec = spec_of_real(tensor)
        else:
            context = self._symbolic.get(source) if isinstance(self._symbolic, Mapping) else None
            if isinstance(self._symbolic, Mapping) and context is None:
                return self.mode.from_tensor(tensor, static_shapes=True)
            if not _has_no_device(tensor):
                return self.mode.from_tensor(tensor, source=source, symbolic_context=context)
            spec = symbolic_spec(self.env, tensor, source, context)
        if spec.device.type == "meta":
            spec = spec.on(self._device)
        return make_new(self.mode, spec).requires_grad_(tensor.requires_grad)


def _has_no_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta" or getattr(tensor, "fake_mode", None) is not None


def _env_of(value: Any) -> Any:
    return value.fake_mode.shape_env if type(value) is FakeTensor else None


def _mode_of(root: torch.nn.Module) -> Any:
    """The mode of a root that is made of stand-ins itself."""
    tensors: list[Any] = list(root.parameters())
    return next((tensor.fake_mode for tensor in tensors if type(tensor) is FakeTensor), None)


def _device_of(root: torch.nn.Module) -> torch.device:
    for tensors in (root.parameters(), root.buffers()):
        for tensor in tensors:
            return canonical(tensor.device)
    return canonical(torch.get_default_device())
