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
        if not isinstance(symbolic, (bool, Mapping)):
            raise TypeError(
                "symbolic is True, or maps names of arguments to what becomes of their sizes; it is a "
                f"{type(symbolic).__name__}"
            )
        self._symbolic = symbolic
        self._sources: list[str] = []
        self._device = _device_of(root)
        env = next((env for env in map(_env_of, leaves_in(dict(meta_args or {}))) if env is not None), None)
        # Even where the sizes of the inputs are numbers, those that depend on data are symbols.
        mode = FakeTensorMode(
            allow_non_fake_inputs=True, shape_env=env or ShapeEnv(), static_shapes=not symbolic
        )
        self._seen: dict[int, torch.Tensor] = {}
        self.mode: FakeTensorMode = _mode_of(root) or mode
        self.env: Any = self.mode.shape_env

    def check_names(self) -> None:
        """Every name under which sizes are to be symbols is one of an example."""
        unknown = (
            [name for name in self._symbolic if name not in self._sources]
            if isinstance(self._symbolic, Mapping)
            else []
        )
        if unknown:
            raise TypeError(
                f"symbolic names {', '.join(map(repr, unknown))}, of which there is no example; there are examples of "
                f"{', '.join(self._sources) or 'nothing'}"
            )

    def stand_in(self, tensor: torch.Tensor, source: str) -> Any:
        self._sources.append(source)
        if self._symbolic and id(tensor) in self._seen:
            # An example of two arguments: they share their memory, but each has sizes of its own.
            tensor = tensor.detach().requires_grad_(tensor.requires_grad)
        self._seen[id(tensor)] = tensor
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
