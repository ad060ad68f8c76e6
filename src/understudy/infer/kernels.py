"""Torch's own kernels as sources of answers: the meta kernel, and the real one on zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from understudy import _torch
from understudy.errors import UnsupportedOperatorException
from understudy.ops.traits.devices import device_of
from understudy.shapes.node import SymNode
from understudy.shapes.sizes import from_torch, to_torch
from understudy.spec import New, Same, TensorSpec, Value, View
from understudy.spec.call import Call, map_structure
from understudy.spec.sparse import is_sparse, sparse_on, spec_of_sparse

META = torch.device("meta")
CPU = torch.device("cpu")


class MetaTensorOfDevice(torch.Tensor):
    """A plain meta tensor that remembers which device it stands for: some of torch's meta functions ask."""

    fake_device: torch.device
    fake_mode = None
    __torch_function__ = _torch.no_torch_function
    __torch_dispatch__ = _torch.no_torch_dispatch

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return _torch.torch_fake_tensor_class()


def strided_on(spec: TensorSpec, device: torch.device, zero: bool = False) -> torch.Tensor:
    """A tensor of torch's own with this spec's metadata, on another device."""
    if spec.sparse is not None:
        return sparse_on(spec, device)
    if spec.is_symbolic:
        return _symbolic_on(spec, device)
    extent = spec.offset + 1
    for size, step in zip(spec.shape, spec.stride, strict=True):
        if size == 0:
            extent = spec.offset
            break
        extent = extent + (size - 1) * step
    make = torch.zeros if zero else torch.empty
    tensor = make((extent,), dtype=spec.dtype, device=device).as_strided(spec.shape, spec.stride, spec.offset)
    if spec.conj:
        _torch.set_conj(tensor, True)
    if spec.neg:
        _torch.set_neg(tensor, True)
    return tensor


def _symbolic_on(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    if device.type != "meta":
        raise UnsupportedOperatorException("the real kernel can't run on symbolic sizes")
    shape, stride = [to_torch(size) for size in spec.shape], [to_torch(size) for size in spec.stride]
    return torch.empty_strided(shape, stride, dtype=spec.dtype, device=device)


def spec_of_result(tensor: torch.Tensor, device: torch.device) -> TensorSpec:
    if is_sparse(tensor):
        return spec_of_sparse(tensor, device)
    if tensor.layout is not torch.strided:
        raise UnsupportedOperatorException(f"a result of layout {tensor.layout} can't be described")
    shape, stride = map(from_torch, tensor.shape), map(from_torch, tensor.stride())
    return TensorSpec(
        tuple(shape), tuple(stride), from_torch(tensor.storage_offset()), dtype=tensor.dtype, device=device,
        conj=tensor.is_conj(), neg=tensor.is_neg(),
    )  # fmt: skip


def run_meta_kernel(call: Call) -> Any:
    def stand_in(spec: TensorSpec) -> torch.Tensor:
        tensor = _torch.make_subclass(MetaTensorOfDevice, strided_on(spec, META))
        tensor.fake_device = spec.device
        return tensor

    try:
        return _run(call, stand_in, META)
    except NotImplementedError:
        return NotImplemented
    except RuntimeError as error:
        if any(spec.is_symbolic for spec in call.inputs) and any(words in str(error) for words in NEEDS_INTEGERS):
            return NotImplemented
        raise


NEEDS_INTEGERS = ("with symbolic sizes/strides", "only concrete integers", "called with NO overloaded args")
"""How C++ says that it wants to read sizes as plain integers."""


def with_fixed_sizes(call: Call) -> Call:
    """The call at the sizes at hand, which are assumed from now on."""

    def fix_sizes(spec: TensorSpec) -> TensorSpec:
        if not spec.is_symbolic:
            return spec
        return spec.as_view([int(size) for size in spec.shape], [int(step) for step in spec.stride], int(spec.offset))

    args, kwargs = map_structure(fix_sizes, TensorSpec, (call.args, call.kwargs))
    args, kwargs = map_structure(int, SymNode, (args, kwargs))
    return Call.of(call.op, args, kwargs)


def run_real_kernel(call: Call) -> Any:
    try:
        return run_on_zeros(call)
    except NotImplementedError as error:
        raise UnsupportedOperatorException(
            f"{call.op} has neither a rule nor a kernel that could tell: {str(error).splitlines()[0]}",
            func=call.op,
        ) from error


def run_on_zeros(call: Call, make: Callable[[TensorSpec], torch.Tensor] | None = None) -> Any:
    """What the real operator does, or raises, on tensors of zeros, or on those that `make` gives for the specs in order.

    The state of the random numbers stays.
    """
    state = torch.random.get_rng_state()
    # Without an explicit choice torch warns, once in a process, that it does not check indices of sparse tensors.
    unchecked = torch.sparse.check_sparse_tensor_invariants(enable=False)
    try:
        with unchecked if any(spec.sparse is not None for spec in call.inputs) else nullcontext():
            return _run(call, make or (lambda spec: strided_on(spec, CPU, zero=True)), CPU)
    finally:
        torch.random.set_rng_state(state)


def _run(call: Call, stand_in: Any, native: torch.device) -> Any:
    """Call the operator on stand-ins, past every mode, and say what it did."""
    device = result_device(call)
    stand_ins: list[torch.Tensor] = []

    def place(spec: TensorSpec) -> torch.Tensor:
        stand_ins.append(stand_in(spec))
        return stand_ins[-1]

    guard = _torch.NoDispatch()
    try:
        args = map_structure(place, TensorSpec, call.args)
        kwargs = map_structure(place, TensorSpec, call.kwargs)
        args, kwargs = map_structure(lambda _: native, torch.device, (args, kwargs))
        args, kwargs = map_structure(to_torch, SymNode, (args, kwargs))
        result = call.op(*args, **kwargs)
        return outcomes_of(result, stand_ins, call, lambda tensor: spec_of_result(tensor, device))
    finally:
        del guard


def result_device(call: Call) -> torch.device:
    asked = call.kwargs.get("device")
    return asked or device_of(call) or CPU


def outcomes_of(result: Any, inputs: Sequence[torch.Tensor], call: Call, spec_of: Any) -> Any:
    """Read outcomes off the tensors that a call gave, by identity and by storage."""
    if isinstance(result, tuple):
        return tuple(outcomes_of(part, inputs, call, spec_of) for part in result)
    if isinstance(result, list):
        return [outcomes_of(part, inputs, call, spec_of) for part in result]
    if not isinstance(result, torch.Tensor):
        return Value(result)
    spec = spec_of(result)
    for position, tensor in enumerate(inputs):
        if tensor is result:
            return Same(position) if spec is call.inputs[position] else Same(position, spec)
    if spec.layout is not torch.strided:
        return New(spec)
    storage = _torch.storage_id(result)
    for position, tensor in enumerate(inputs):
        if tensor.layout is torch.strided and _torch.storage_id(tensor) == storage:
            return View(position, spec)
    return New(spec)
